"""The rule for several replicas: the result of a global batch is that of one device.

What Keras computes on one replica's examples enters: losses, metrics, gradients, normalization,
random numbers. The same of the global batch leaves.
"""
