"""A run of `tfdist.train`: its options, its plan, and the modules that only it uses."""
