"""Placement by shards: the output units of layers divided over devices."""
