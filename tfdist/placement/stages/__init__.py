"""Placement by stages: consecutive parts of a model on devices, one after the other."""
