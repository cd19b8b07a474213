"""What a run came to, as pages that open from disk without a network: `page` lays out, `data` reads, `svg` draws."""
