"""Placement by strips: the rows of images divided over devices."""
