"""Serves SavedModels over HTTP, in the REST shape of TensorFlow Serving."""
