"""A policy over several ranks."""
