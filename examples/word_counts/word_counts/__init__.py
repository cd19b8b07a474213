"""A data set's words, counted."""
