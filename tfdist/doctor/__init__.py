"""Finds what is wrong with a machine or a cluster, and why more devices are not faster."""
