"""Losses, KL, importance ratios, their reduction and metrics."""
