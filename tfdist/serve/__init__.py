"""Serves SavedModels over HTTP, in the REST shape of TensorFlow Serving."""

from tfdist.serve.options import ServeOptions

__all__ = ["ServeOptions"]
