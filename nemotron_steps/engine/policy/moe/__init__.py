"""Mixtures of experts over flat tokens."""
