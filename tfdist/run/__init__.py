"""A Keras script of the user's own, unchanged, under any strategy."""
