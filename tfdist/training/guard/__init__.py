"""The guard: a program and its first batch enter; an error leaves if replicas cannot divide it."""
