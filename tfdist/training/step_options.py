"""How training steps are computed; most of these options do not change the result."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tfdist.options import OptionGroup, option

CHECKS = ("auto", "on", "off")

_of_the_command: "list[StepOptions]" = []


@dataclass(frozen=True, kw_only=True)
class StepOptions(OptionGroup):
    """How a step is computed.

    Callbacks see each of the `steps_per_loop` steps with its logs, but after all of them: what they
    change, such as a learning rate or `stop_training`, takes effect in the next loop.
    `steps_per_execution` in Keras's `compile` runs several steps at a time as well, and decides how
    often callbacks are called.

    `rematerialize` is for functional and sequential models, whose stages are chosen so that as
    little as possible stays in memory. `gather_outputs` is for losses such as
    `keras.losses.Dice()`; the outputs cross the network, and each device holds them. With
    `random_augmentation`, a dataset, generator or `PyDataset` changes its examples differently on
    each worker; the tensors that are compared are those with one number per example.
    """

    micro_batches: int = option(
        1,
        "number of parts in which a replica computes its examples, one after the other, if they "
        "do not fit in memory at once",
        result=False,
        minimum=1,
    )
    compress_gradients: bool = option(
        False, "several workers: sum gradients in bfloat16, which halves the bytes sent"
    )
    jit_compile: bool = option(False, "compile the step's gradient with XLA", result=False)
    fused_layers: bool = option(
        False,
        "compute LSTM layers (on CPUs) and batch normalization with TensorFlow's fused kernels, "
        "which are faster and round differently",
        result=False,
    )
    steps_per_loop: int = option(
        1,
        "steps to run at a time, without the host in between; callbacks follow after all of them",
        minimum=1,
        result=False,
        must_match=True,
    )
    rematerialize: bool = option(
        False,
        "recompute activations in the backward pass, so that only those between the model's "
        "stages stay in memory",
        result=False,
    )
    shard_optimizer: bool = option(
        False,
        "mirrored, multi_worker_mirrored: each replica keeps and updates a part of the optimizer's "
        "state, instead of all of it",
        result=False,
    )
    batch_norm: str = option(
        "global",
        "batch normalization uses the moments of the global batch, or of each replica as in Keras",
        choices=("global", "per_replica"),
    )
    gather_outputs: bool = option(
        False,
        "compute the loss from the outputs and labels of all replicas, sent at each step, for a "
        "loss that is not a mean over the examples",
        result=False,
    )
    check: str = option(
        "auto",
        "before the first step, compute a batch divided over the replicas and whole, and refuse a "
        "program whose results differ; auto: unless it is known to be divisible",
        choices=CHECKS,
        result=False,
    )
    random_augmentation: bool = option(
        False,
        "several workers: the script's own data are augmented at random, so workers compare the "
        "sizes and labels of their batches only",
        result=False,
        must_match=True,
    )
    max_in_flight: int = option(
        0,
        "parameter_server: number of steps in flight, one more than the highest staleness; 0 for "
        "one per worker",
        result=False,
        minimum=0,
    )
    shard_tables_bytes: int = option(
        0,
        "parameter_server: divide the rows of Embedding tables of at least so many bytes over the "
        "servers; a step sends only the rows that it uses; 0: divide none",
        result=False,
        minimum=0,
    )

    @property
    def changes_gradient(self) -> bool:
        """Whether the gradient is computed differently from Keras's `train_step`."""
        return self.micro_batches > 1 or self.jit_compile


def find_default_options() -> StepOptions:
    """Returns the options of a trainer that is given none: those of the command, if any."""
    return _of_the_command[-1] if _of_the_command else StepOptions()


@contextlib.contextmanager
def using_by_default(options: StepOptions) -> Iterator[None]:
    """Makes a command's options those of all trainers of a script that are given none."""
    _of_the_command.append(options)
    try:
        yield
    finally:
        _of_the_command.remove(options)
