"""Runs the model: sequences, blocks, prefix cache, step plan and loop know no torch; the rest does."""
