"""Keras's methods under any strategy: `Trainer`, and the loop that calls steps and callbacks.

A model, a strategy and data enter; weights, a history and predictions leave. `trainer` is the way
in, `engine` holds the model and its steps, `loop` runs the epochs.
"""
