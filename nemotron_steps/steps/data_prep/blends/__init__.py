"""Rows of any size and number from their sources (`sources`, `formats`) over `shards` to `splits`, by `prepare`."""
