"""Mixtures of experts over flat tokens: who computes a token (router.py), the experts, and the layer around both."""
