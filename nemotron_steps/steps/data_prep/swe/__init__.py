"""Software engineering tasks out of pure-Python packages: packages, faults, proofs, demonstrations."""
