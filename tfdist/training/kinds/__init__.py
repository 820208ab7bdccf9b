"""The kinds of training in which every worker runs the program: synchronous steps and local SGD.

Batches enter; the logs of steps leave, for the loop of `fit`.
"""
