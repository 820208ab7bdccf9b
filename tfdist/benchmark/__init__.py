"""Measures how fast the trainer is: strategies, precisions and baselines in one run."""
