"""Discrete-event simulations of collectives and of training, which check the formulas."""
