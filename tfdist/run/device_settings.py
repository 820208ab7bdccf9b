"""Settings of devices in a script that TensorFlow refuses, because they are in use already."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.replacing import find_function, replaced

_SETTINGS = [
    *((tf.config, name) for name in ("set_logical_device_configuration", "set_visible_devices")),
    (tf.config.experimental, "set_memory_growth"),
    (tf.config.experimental, "set_virtual_device_configuration"),
    (tf.config.experimental, "set_visible_devices"),
    (tf.config.threading, "set_inter_op_parallelism_threads"),
    (tf.config.threading, "set_intra_op_parallelism_threads"),
]


@contextlib.contextmanager
def keeping_devices(show: Callable[[str], None]) -> Iterator[None]:
    """Leaves the devices as they are, where a script would change them, and says so once.

    The strategy was built on them before. They decide on the speed, not on the results.
    """
    told: set[str] = set()

    def keep(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setting(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
                return
            except (RuntimeError, ValueError) as error:
                # A ValueError: memory cannot grow on virtual devices.
                late = isinstance(error, RuntimeError) or "virtual devices configured" in str(error)
                if not late:
                    raise
            if name not in told:
                told.add(name)
                show(
                    f"{name} changes nothing: TensorFlow has started its devices for the strategy. "
                    "See --devices, --virtual_devices and CUDA_VISIBLE_DEVICES."
                )

        return setting

    with contextlib.ExitStack() as stack:
        for owner, name in _SETTINGS:
            function = keep(name, find_function(owner, name))
            stack.enter_context(replaced(owner, name, function, in_all_threads=True))
        yield
