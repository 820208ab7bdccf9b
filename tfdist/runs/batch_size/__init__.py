"""`--global_batch_size=auto`: the largest global batch that fits, found by trials."""
