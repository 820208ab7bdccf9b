"""What is trained: a model's layers and what they cost, and the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

TRAINING_PASSES = 3
"""A training step computes as much as three forward passes."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An operation of a model, in the order in which they run.

    Attributes:
      flops: operations of its forward pass, for one example.
      activations: bytes of its outputs, for one example; 0 where they take no memory of their own.
      moved: bytes that its forward pass reads and writes, for one example.
      weights: bytes of its variables.
      gradients: bytes of the gradients of its trainable variables.
      tensors: the number of these gradients.
      halo: bytes per example that a strip takes from each neighbor; -1 if it needs whole images.
      side: the same for parts of the width.
      sums: the number of all-reduces by which it computes the moments of the global batch.
      is_divisible: whether its units can be divided over devices.
    """

    name: str
    flops: float
    activations: float
    moved: float
    weights: float = 0.0
    gradients: float = 0.0
    tensors: int = 0
    inputs: tuple[int, ...] = ()
    halo: float = 0.0
    side: float = 0.0
    sums: int = 0
    is_divisible: bool = False

    @property
    def work(self) -> float:
        """As `tfdist.placement.costs.Cost.work`, by which stages are cut."""
        return self.flops + 10.0 * 2 * self.activations


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained.

    Attributes:
      global_batch_size: the examples of a step.
      optimizer: bytes of the optimizer's state for each byte of a weight.
      precision: see `tfdist.train`.
      num_examples: the examples of an epoch; 0 if unknown.
      example_core_s: the seconds for which preparing an example keeps a core busy.
      micro_batches: the parts in which a replica computes its examples.
      rematerialized: bytes per example that are kept with rematerialization; None without it.
      refusal: why the model cannot be computed in micro-batches; empty if it can.
      bytes_per_pack: see `multi_worker_mirrored`.
      compressed: the share of the gradients' bytes that cross the network.
      sync_every: see `local_sgd`.
      all_reduce: see `mirrored`.
    """

    layers: tuple[Layer, ...]
    global_batch_size: int
    optimizer: float = 2.0
    precision: str = "float32"
    num_examples: int = 0
    example_core_s: float = 0.0
    micro_batches: int = 1
    rematerialized: float | None = None
    refusal: str = ""
    bytes_per_pack: float = 4 * 2.0**20
    compressed: float = 1.0
    sync_every: int = 8
    all_reduce: str = "auto"

    @property
    def flops(self) -> float:
        """The operations of an example's forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def weights(self) -> float:
        """The bytes of all variables of the model."""
        return sum(layer.weights for layer in self.layers)

    @property
    def gradients(self) -> float:
        """The bytes of all gradients."""
        return sum(layer.gradients for layer in self.layers)

    @property
    def tensors(self) -> int:
        """The number of all gradients."""
        return sum(layer.tensors for layer in self.layers)

    @property
    def activations(self) -> float:
        """The bytes per example that the backward pass needs."""
        if self.rematerialized is not None:
            return self.rematerialized
        return sum(layer.activations for layer in self.layers)

    def count_taken(self, layer: Layer) -> float:
        """Returns the bytes per example of a layer's inputs."""
        return sum(self.layers[i].activations for i in layer.inputs)

    @property
    def sums(self) -> int:
        """The number of small all-reduces of a step, for the moments of the global batch."""
        return sum(layer.sums for layer in self.layers)


def make_layers(model: "keras.Model", *, syncs: bool = True) -> tuple[Layer, ...]:
    """Returns the layers of a built functional or sequential model.

    Args:
      syncs: whether Keras's batch normalization uses the moments of the global batch.

    Raises:
      TfdistError: the model is neither.
    """
    from tfdist.placement.costs import count_bytes, estimate_costs
    from tfdist.placement.graph import make_graph

    graph = make_graph(model)
    costs = estimate_costs(graph)
    maker = {n: place for place, op in enumerate(graph.operations) for n in op.outputs}
    seen: set[int] = set()
    layers: list[Layer] = []
    for place, (operation, cost) in enumerate(zip(graph.operations, costs, strict=True)):
        inputs = tuple(maker[n] for n in operation.inputs if n in maker)
        own = [v for v in operation.variables if v.trainable and id(v) not in seen]
        seen.update(map(id, own))
        taken = sum(layers[i].activations for i in inputs if i < place)
        layer = operation.layer
        halo, side = _find_halos(layer)
        layers.append(
            Layer(
                name=operation.name,
                flops=cost.flops,
                activations=cost.activations,
                moved=cost.activations + taken,
                weights=cost.weights,
                gradients=float(sum(count_bytes(v.shape, v.dtype) for v in own)),
                tensors=len(own),
                inputs=inputs,
                halo=halo,
                side=side,
                sums=_count_sums(layer, syncs=syncs),
                is_divisible=bool(own) and hasattr(layer, "kernel"),
            )
        )
    return tuple(layers)


def count_state(optimizer: "keras.Optimizer", variables: Sequence[Any]) -> float:
    """Returns the bytes of an optimizer's state for each byte of a weight."""
    optimizer.build(variables)
    held = sum(math.prod(v.shape) for v in optimizer.variables)
    return held / max(1, sum(math.prod(v.shape) for v in variables))


def _find_halos(layer: "keras.Layer") -> tuple[float, float]:
    """Returns the bytes per example of the rows and of the columns that a part takes.

    Both are those of one neighbor along the whole side of an image, and -1 without a rule.
    """
    shape: Any = getattr(getattr(layer, "input", None), "shape", ())
    window = getattr(layer, "kernel_size", getattr(layer, "pool_size", None))
    if len(shape) != 4 or None in shape[1:]:
        return (-1.0, -1.0) if hasattr(layer, "kernel") else (0.0, 0.0)
    if window is None:
        return 0.0, 0.0
    size = 2 if str(getattr(layer, "compute_dtype", "")).endswith("16") else 4
    pixel = shape[3] * size
    return (window[0] - 1) / 2 * shape[2] * pixel, (window[1] - 1) / 2 * shape[1] * pixel


def _count_sums(layer: "keras.Layer", *, syncs: bool) -> int:
    """Returns the all-reduces of a layer: moments forward, their gradients backward."""
    import keras

    if "BatchNormalization" not in type(layer).__name__ or not layer.trainable:
        return 0
    # Keras's own layer has that attribute, too: it is False unless the user sets it.
    is_synced = syncs and isinstance(layer, keras.layers.BatchNormalization)
    return 2 if is_synced or getattr(layer, "synchronized", False) else 1
