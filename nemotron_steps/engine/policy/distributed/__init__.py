"""A policy over several ranks: parallel sizes and groups, exchanges, pipeline schedules, shards."""
