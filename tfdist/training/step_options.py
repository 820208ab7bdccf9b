"""How training steps are computed; most of these options do not change the result."""

from dataclasses import dataclass

from tfdist.options import OptionGroup, option

CHECKS = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class StepOptions(OptionGroup):
    """How a step is computed.

    Args:
      micro_batches: the number of parts in which a replica computes its examples of a global
        batch, one after the other. It needs the memory of one part; the result is unchanged.
      compress_gradients: whether workers sum their gradients in bfloat16, which halves the network
        traffic and keeps three significant digits. For `MultiWorkerMirroredStrategy`.
      jit_compile: whether XLA compiles the forward and backward pass.
      fused_layers: whether LSTM layers on CPUs and batch normalization are computed by TensorFlow's
        fused kernels, which is faster. Results differ from Keras's by rounding.
      steps_per_loop: the number of steps that run at a time, without the host in between.
        Callbacks see each step with its logs, but after all of them: what they change, such as a
        learning rate or `stop_training`, takes effect in the next loop. Unlike it,
        `steps_per_execution` in Keras's `compile` decides how often callbacks are called.
      rematerialize: whether activations are recomputed in the backward pass, so that only those
        between the model's stages stay in memory. For functional and sequential models. Their
        stages are chosen so that as little as possible stays in memory.
      shard_optimizer: whether each replica of a `MirroredStrategy` or `MultiWorkerMirroredStrategy`
        keeps a part of the optimizer's state, and updates this part of the weights for all.
      batch_norm: `global` makes Keras's batch normalization use the moments of the global batch,
        on replicas too; `per_replica` is as in Keras.
      gather_outputs: whether every replica computes the loss of the global batch, from the outputs
        and labels of all replicas. For a loss that is not a mean over the examples, such as
        `keras.losses.Dice()`. They cross the network at each step, and each device holds them.
      check: whether the guard computes the first batch on several replicas, or in micro-batches,
        both divided and whole, without lasting effects, and refuses a program whose results differ.
        `auto` does so for programs that are not known to be divisible; `on`; `off`.
      random_augmentation: whether a dataset, generator or `PyDataset` changes its examples at
        random, differently on each worker. Workers then compare the sizes of their batches and the
        tensors with one number per example, such as labels, instead of all contents.
      max_in_flight: under `ParameterServerStrategy`, the number of steps in flight; 0 for one per
        worker.
      shard_tables_bytes: under `ParameterServerStrategy`, the size of the smallest table of an
        `Embedding` whose rows are divided over the servers; 0 for none.
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
