"""The decoder that computes Baton's families, and its parts that not every family has."""
