"""Environments that run what the model wrote, in the sandbox."""
