"""From what `fit`, `evaluate` and `predict` accept to batches for each replica, in a known order.

Arrays, datasets, generators and sources enter; a `DataAdapter` leaves.
"""
