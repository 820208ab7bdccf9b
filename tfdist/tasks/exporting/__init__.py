"""Exports the models of finished runs as single files, and compares these with the models."""
