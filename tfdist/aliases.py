"""Types that several packages name. Keras and TensorFlow have none for most of them."""

from typing import Annotated, Any, TypeAlias, TypeVar

T = TypeVar("T")

Nested = Annotated[T, "or tuples, lists and dictionaries of such leaves, to any depth"]
# What `keras.Model.fit` takes as x, y and sample_weight: arrays, tensors, data frames, structures
# of these; or, as x, a dataset, a generator or a `keras.utils.PyDataset`.
KerasData: TypeAlias = Any
# A `keras.callbacks.CallbackList`, one callback, a sequence of them, or None.
Callbacks: TypeAlias = Any
# A global batch or a replica's examples of it: x, (x, y) or (x, y, sample_weight), each a structure
# of tensors (or of arrays, before a step) whose first axis is that of the examples.
Batch: TypeAlias = Any
# The iterator of a dataset or of a strategy: it returns each `Batch` once.
BatchIterator: TypeAlias = Any
