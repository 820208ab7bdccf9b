"""Keras's layers on TensorFlow's fused kernels, whose results differ by rounding only.

Keras computes an LSTM on CPUs in a loop of small operations, and batch normalization in several
passes over its inputs. TensorFlow has one operation for each.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals import lstm_module
from tfdist.models.batch_norm import normalize_by_batch
from tfdist.replacing import find_function, replaced
from tfdist.training.replicas.global_norm import make_norm_call


@contextlib.contextmanager
def fusing_layers(is_on: bool, *, is_compiled: bool = False) -> Iterator[None]:
    """Computes Keras's layers by fused kernels during a trace, if on; XLA has none for LSTMs."""
    if not is_on:
        yield
        return
    norm = keras.layers.BatchNormalization
    with contextlib.ExitStack() as stack:
        fused = make_norm_call(find_function(norm, "call"), lambda: normalize_by_batch)
        stack.enter_context(replaced(norm, "call", fused))
        # On GPUs, Keras itself uses cuDNN.
        if not is_compiled and not tf.config.list_logical_devices("GPU"):
            stack.enter_context(
                replaced(lstm_module, "lstm", _make_lstm(find_function(lstm_module, "lstm")))
            )
        yield


def _make_lstm(original: Callable[..., Any]) -> Any:
    """Returns the function that Keras asks for a fast LSTM; where there is none, it raises."""

    @functools.wraps(original)
    def lstm(
        inputs: tf.Tensor, h: tf.Tensor, c: tf.Tensor, mask: tf.Tensor | None, **options: Any
    ) -> Any:
        is_usual = options["activation"] is keras.activations.tanh
        is_usual &= options["recurrent_activation"] is keras.activations.sigmoid
        if inputs.dtype != tf.float32 or mask is not None or not is_usual or options["unroll"]:
            raise NotImplementedError
        kernel = tf.concat([options["kernel"], options["recurrent_kernel"]], 0)
        bias = options["bias"]
        x = tf.transpose(inputs, [1, 0, 2])
        states, outputs = _run_block(
            tf.reverse(x, [0]) if options["go_backwards"] else x,
            h,
            c,
            kernel,
            tf.zeros([kernel.shape[-1]]) if bias is None else tf.convert_to_tensor(bias),
        )
        last = outputs[-1]
        shown = last[:, None]
        if options["return_sequences"]:
            shown = tf.transpose(outputs, [1, 0, 2])
        return last, shown, [last, states[-1]]

    return lstm


def _run_block(
    x: tf.Tensor, h: tf.Tensor, c: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the cell states and the outputs, [time, batch, units], of an LSTM.

    Args:
      x: float32 [time, batch, features].
      h, c: float32 [batch, units], the first output and the first cell state.
      kernel: float32 [features + units, 4 * units], with the gates in Keras's order.
      bias: float32 [4 * units].
    """
    no_peephole = tf.zeros([h.shape[-1]])
    out = tf.raw_ops.BlockLSTM(
        seq_len_max=tf.shape(x, tf.int64)[0],
        x=x,
        cs_prev=c,
        h_prev=h,
        w=_reorder_gates(kernel),
        wci=no_peephole,
        wcf=no_peephole,
        wco=no_peephole,
        b=_reorder_gates(bias),
        forget_bias=0.0,
        cell_clip=0.0,
    )
    return out.cs, out.h


def _reorder_gates(weights: tf.Tensor) -> tf.Tensor:
    """Changes Keras's order of gates (input, forget, cell, output) into that of the kernel."""
    # BlockLSTMV2 has Keras's order, but TensorFlow 2.21 registers the gradient of the other one.
    i, f, c, o = tf.split(weights, 4, axis=-1)
    return tf.concat([i, c, f, o], -1)
