"""Checkpoints: the state of a trainer enters, and leaves again with the same bits."""
