"""A run of `tfdist.train`: its options, its plan, and what serves it alone."""
