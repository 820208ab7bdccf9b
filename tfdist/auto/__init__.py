"""`--strategy=auto`: trials of the strategies that give the same result, and their cache."""
