"""Training batches: rows padded, split and packed into micro-batches."""
