"""How training steps are computed, which changes nothing of their result."""

from dataclasses import dataclass

from tfdist.options import OptionGroup, option

CHECKS = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class StepOptions(OptionGroup):
    """How it computes a step.

    Args:
      micro_batches: the parts, one after the other, in which a replica computes its rows of a
        global batch: its memory is that of one part, the result that of the whole.
      compress_gradients: whether workers sum their gradients in bfloat16: half of what crosses
        the network, at three significant digits. For `MultiWorkerMirroredStrategy`.
      jit_compile: whether XLA compiles the forward and backward pass.
      steps_per_loop: the steps that are run at a time, without the host in between. Callbacks
        see each with its logs, but after all of them: what they change, such as a learning rate
        or `stop_training`, counts from the next loop on.
      rematerialize: whether activations are computed again in the backward pass, so that only those
        between the model's stages stay in memory. For functional models whose layers' names start
        with a stage's (`tfdist.models.stages`).
      batch_norm: `global`, by which Keras's batch normalization takes the moments of the global
        batch on replicas too; or `per_replica`, as Keras does.
      gather_outputs: whether every replica computes the loss of the global batch, from the outputs
        and labels of all replicas: for a loss that is no mean over the rows, such as
        `keras.losses.Dice()`. They cross the network at each step, and each device holds them.
      check: whether the first batch of a run of several replicas is computed divided and undivided,
        without an effect, and a program refused that gives something else. `auto` does so for
        programs that are not known to be divisible; `on`; `off`.
      max_in_flight: under `ParameterServerStrategy`, how many steps are given out to workers
        at a time; 0 for one a worker.
    """

    micro_batches: int = option(
        1,
        "parts, one after the other, in which a replica computes its rows of a global batch: for "
        "those that do not fit",
        result=False,
        minimum=1,
    )
    compress_gradients: bool = option(
        False, "several workers: sum their gradients in bfloat16, half the bytes"
    )
    jit_compile: bool = option(False, "XLA compiles the forward and backward pass", result=False)
    steps_per_loop: int = option(
        1,
        "steps run at a time, without the host in between; callbacks see each, after all of them",
        minimum=1,
        result=False,
        alike=True,
    )
    rematerialize: bool = option(
        False,
        "compute activations again in the backward pass, so that only those between the model's "
        "stages stay in memory",
        result=False,
    )
    batch_norm: str = option(
        "global",
        "Keras's batch normalization takes the moments of the global batch, or per_replica",
        choices=("global", "per_replica"),
    )
    gather_outputs: bool = option(
        False,
        "every replica computes the loss of the outputs and labels of all replicas, for a loss "
        "that is no mean over the examples; they cross the network at each step",
        result=False,
    )
    check: str = option(
        "auto",
        "before the first step, replicas compute a batch divided and undivided; what differs is "
        "refused; auto: where the program is not known to be divisible",
        choices=CHECKS,
        result=False,
    )
    max_in_flight: int = option(
        0,
        "parameter_server: steps given out to workers at a time, one more than the highest "
        "staleness; 0 for one a worker",
        result=False,
        minimum=0,
    )

    @property
    def changes_gradient(self) -> bool:
        """Whether the gradient is computed in another way than Keras's `train_step` does."""
        return self.micro_batches > 1 or self.jit_compile or self.rematerialize
