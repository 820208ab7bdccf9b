"""Asynchronous training: the chief hands out steps, workers compute them, servers apply them.

Batches enter; the logs of steps leave, for the loop of `fit`.
"""
