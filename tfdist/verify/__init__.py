"""Compares a few training steps under each strategy with the same steps on one device."""
