"""Requests to stop, at any moment."""
