"""What a run came to: read from its files by `data` once it is over and by `follow` while it works, averaged over seeds
by `seed_stats`, and drawn by `page` as pages that open from disk without a network."""
