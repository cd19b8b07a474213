"""Training checkpoints: what they hold, and when one must be saved by."""
