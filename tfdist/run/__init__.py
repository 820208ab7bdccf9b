"""Runs the user's own Keras script, unchanged, under any strategy."""
