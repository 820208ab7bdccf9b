"""The checks: each takes a `Machine` and yields what it finds, in a module of its own."""
