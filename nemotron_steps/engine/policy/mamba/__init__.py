"""Mamba-2 over flat tokens: the convolution, the scan, and the mixer made of them."""
