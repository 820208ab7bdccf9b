"""The same U-Net in PyTorch: checked against tfdist's, and measured.

    python benchmarks/pytorch_unet.py check DIRECTORY
    python benchmarks/pytorch_unet.py measure DIRECTORY
    python -m benchmarks.pytorch_unet compete DIRECTORY

Reads and writes files in that directory; see benchmarks/against_pytorch.py. Does not import
TensorFlow, because the threads of the two libraries would interfere.
"""

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_BATCHES = 4  # kept in memory and reused


class UNet(nn.Module):
    """tfdist's `unet` with batch normalization; its layers have the same names.

    Args:
      num_classes, base_filters, depth: see `tfdist.models.make_model`.
    """

    def __init__(self, *, num_classes: int, base_filters: int, depth: int):
        super().__init__()
        self.depth = depth
        self.layers = nn.ModuleDict()
        channels = 3
        for level in range(depth):
            channels = self._add_block(f"encoder_{level}", channels, base_filters << level)
        channels = self._add_block("bottleneck", channels, base_filters << depth)
        for level in reversed(range(depth)):
            filters = base_filters << level
            self.layers[f"decoder_{level}_up"] = nn.ConvTranspose2d(channels, filters, 2, stride=2)
            channels = self._add_block(f"decoder_{level}", 2 * filters, filters)
        self.layers["head_logits"] = nn.Conv2d(channels, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, classes, h, w] for images [batch, 3, h, w] in [0, 255]."""
        x = (images - 127.5) / 127.5
        skips = []
        for level in range(self.depth):
            x = self._run_block(f"encoder_{level}", x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self._run_block("bottleneck", x)
        for level in reversed(range(self.depth)):
            x = self.layers[f"decoder_{level}_up"](x)
            x = self._run_block(f"decoder_{level}", torch.cat([skips[level], x], 1))
        return self.layers["head_logits"](x).float()

    def _add_block(self, stage: str, channels: int, filters: int) -> int:
        for i in (1, 2):
            self.layers[f"{stage}_conv_{i}"] = nn.Conv2d(
                channels, filters, 3, padding=1, bias=False
            )
            self.layers[f"{stage}_norm_{i}"] = nn.BatchNorm2d(filters, eps=1e-3, momentum=0.1)
            channels = filters
        return channels

    def _run_block(self, stage: str, x: torch.Tensor) -> torch.Tensor:
        for i in (1, 2):
            x = self.layers[f"{stage}_norm_{i}"](self.layers[f"{stage}_conv_{i}"](x))
            x = nn.functional.relu(x)
        return x

    def load_keras_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Loads Keras's weights, given as `layer/weight` -> array, in PyTorch's order of axes."""
        names = {
            "kernel": "weight",
            "bias": "bias",
            "gamma": "weight",
            "beta": "bias",
            "moving_mean": "running_mean",
            "moving_variance": "running_var",
        }
        state = self.state_dict()
        left = {name for name in state if not name.endswith("num_batches_tracked")}
        for path, value in weights.items():
            layer, _, name = path.rpartition("/")
            # In both kinds of convolution, the last two axes of Keras come first, swapped.
            array = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value
            key = f"layers.{layer}.{names[name]}"
            assert state[key].shape == array.shape, (key, state[key].shape, array.shape)
            state[key] = torch.from_numpy(np.ascontiguousarray(array))
            left.remove(key)
        assert not left, f"no weights for {sorted(left)}"
        self.load_state_dict(state)


def check(directory: Path) -> None:
    """Compares the outputs for the same weights and images, and writes the result."""
    task = json.loads((directory / "task.json").read_text())
    with np.load(directory / "keras.npz") as arrays:
        given = dict(arrays)
    images, expected = given.pop("images"), given.pop("outputs")
    model = UNet(**task["model"])
    model.load_keras_weights(given)
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy().transpose(0, 2, 3, 1)
    difference = float(np.abs(found - expected).max() / np.abs(expected).max())
    parameters = sum(p.numel() for p in model.parameters())
    (directory / "result.json").write_text(
        json.dumps({"relative_difference": difference, "parameters": parameters})
    )


def measure(directory: Path) -> None:
    """Trains as `task.json` says; the first process writes the examples per second."""
    task = json.loads((directory / "task.json").read_text())
    cluster = json.loads(os.environ["TF_CONFIG"])
    rank, workers = cluster["task"]["index"], len(cluster["cluster"]["worker"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if workers > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=workers
        )
    step = _make_step(task, rank, workers)
    ends, began = [], time.perf_counter()
    for _ in range(task["warmup_steps"] + task["steps"]):
        assert np.isfinite(step().item())
        ends.append(time.perf_counter())
    seconds = ends[-1] - ends[task["warmup_steps"] - 1]
    if rank == 0:
        (directory / "result.json").write_text(
            json.dumps(
                {
                    "examples_per_second": task["steps"] * task["global_batch_size"] / seconds,
                    "first_step_s": ends[0] - began,
                    "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }
            )
        )


def compete(directory: Path) -> None:
    """Trains on one device as `task.json` says, in turns; see benchmarks/turns.py."""
    from benchmarks.turns import Turns

    step = _make_step(json.loads((directory / "task.json").read_text()))
    turns = Turns(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    turns.begin()
    while True:
        step()
        turns.end_steps()


def _make_step(task: dict[str, Any], rank: int = 0, workers: int = 1) -> Callable[[], torch.Tensor]:
    """Returns a function that trains one step and returns the loss, in PyTorch's fastest form."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() and workers == 1 else "cpu"
    model: nn.Module = UNet(**task["model"]).to(device, memory_format=torch.channels_last)
    if workers > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if task["compiled"]:
        model = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=device == "cuda")
    loss_of = nn.CrossEntropyLoss()
    random = np.random.default_rng(rank)
    shape = (_BATCHES, task["global_batch_size"] // workers, *task["image_size"])
    images = torch.from_numpy(random.uniform(0, 255, (*shape, 3)).astype(np.float32))
    masks = torch.from_numpy(random.integers(0, task["model"]["num_classes"], shape))
    if device == "cuda":
        images, masks = images.pin_memory(), masks.pin_memory()
    images = images.permute(0, 1, 4, 2, 3)  # channels_last in memory, as it was made
    batches: Iterator[Sequence[torch.Tensor]] = (
        _copy_ahead(images, masks)
        if device == "cuda"
        else itertools.cycle(zip(images, masks, strict=True))
    )

    def step() -> torch.Tensor:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=task["bfloat16"]):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _copy_ahead(*parts: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yields batches on the GPU, each copied while it computes the step before."""
    stream = torch.cuda.Stream()

    def copy(place: int) -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            return [part[place].to("cuda", non_blocking=True) for part in parts]

    batch = copy(0)
    for number in itertools.count(1):
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        current, batch = batch, copy(number % len(parts[0]))
        yield current


if __name__ == "__main__":
    modes = {"check": check, "measure": measure, "compete": compete}
    modes[sys.argv[1]](Path(sys.argv[2]))
