"""Tasks, one package for each, on top of the core, which does not depend on any of them."""
