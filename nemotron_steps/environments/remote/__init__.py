"""Environments on other servers, and this package's environments served to others."""
