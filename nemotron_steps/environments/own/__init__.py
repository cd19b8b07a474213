"""Rewards by functions of the user's own."""
