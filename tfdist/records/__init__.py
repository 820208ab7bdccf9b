"""Files that runs write and read again: durable ones, the run directory and what it records.

Nothing here loads TensorFlow, so that reports need not wait for it.
"""
