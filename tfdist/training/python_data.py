"""The data adapter for data that only Python can read: generators, `PyDataset`s, loaders."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.fingerprint import make_header
from tfdist.errors import TfdistError
from tfdist.internals import data_adapters
from tfdist.training.data_adapter import SKIPPING, DataAdapter, place_batches


def make_python_adapter(
    x: Any, y: Any, sample_weight: Any, *, class_weight: dict[int, float] | None
) -> DataAdapter:
    """Returns the data adapter for a generator, a `keras.utils.PyDataset` or a loader.

    Raises:
      TfdistError: Keras does not accept the data.
    """
    keras_adapter = _make_keras_adapter(x, y, sample_weight, class_weight)
    spec = _drop_missing(keras_adapter.get_tf_dataset().element_spec)
    num_batches = keras_adapter.num_batches
    hooks = x if isinstance(x, keras.utils.PyDataset) else keras_adapter

    def read() -> Iterator[Any]:
        source = keras_adapter
        if hooks is x:  # threads and processes that read ahead belong to one pass
            source = _make_keras_adapter(x, y, sample_weight, class_weight)
        try:
            # Not the dataset: TensorFlow hangs if a dataset reads another one in Python.
            for count, batch in enumerate(source.get_numpy_iterator(), start=1):
                yield _drop_missing(batch)
                if count == num_batches:
                    return
        finally:
            if getattr(source, "enqueuer", None) is not None:
                source.enqueuer.stop()

    def replay(epochs: int, steps_per_epoch: int) -> None:
        batches: Iterator[Any] = iter(())
        for _ in range(epochs):
            hooks.on_epoch_begin()
            for _ in range(steps_per_epoch if num_batches else 0):
                if next(batches, None) is None:
                    batches = read()
                    next(batches)
            hooks.on_epoch_end()

    def make_pass() -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(read, output_signature=spec)

    return DataAdapter(
        batch_spec=spec,
        num_steps=num_batches,
        num_examples=None,
        make_train=lambda context, step: place_batches(make_pass().skip(step), context),
        make_eval=lambda context: place_batches(make_pass(), context),
        is_endless=False,
        begins_anew=True,
        how_to_continue=SKIPPING,
        is_python=True,
        on_epoch_begin=hooks.on_epoch_begin,
        on_epoch_end=hooks.on_epoch_end,
        replay=replay,
        make_fingerprint=lambda: make_header(
            kind="batches", num_examples=num_batches or 0, element_spec=spec
        ),
    )


def _make_keras_adapter(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
    try:
        return data_adapters.get_data_adapter(x, y, sample_weight, class_weight=class_weight)
    except ValueError as error:
        raise TfdistError(" ".join(str(error).split())) from error


def _drop_missing(batch: Any) -> Any:
    """Returns a batch, or its spec, without the labels and weights that are None."""
    while isinstance(batch, tuple) and _is_missing(batch[-1]):
        batch = batch[:-1]
    return batch


def _is_missing(part: Any) -> bool:
    return part is None or isinstance(part, tf.OptionalSpec)
