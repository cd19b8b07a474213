"""Environments that ask a language model for a verdict, and the judges they ask."""
