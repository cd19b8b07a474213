"""Environments that grade an answer's text by rule."""
