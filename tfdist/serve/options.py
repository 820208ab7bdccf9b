"""The options of `python -m tfdist.serve`; see `tfdist.options`."""

import re
from dataclasses import dataclass

from tfdist.errors import TfdistError
from tfdist.named_code import trust_option
from tfdist.options import CommandOptions, OptionGroup, inherit, option
from tfdist.serve.hosts import check_names
from tfdist.strategies.base import devices_option
from tfdist.strategies.options import StrategyOptions
from tfdist.training.options import RunOptions

_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(OptionGroup):
    """Model."""

    run_dir: str = option("", "serve the model of this finished run; it is exported", metavar="DIR")
    trust_task: bool = trust_option()
    model: str = option(
        "", "serve this SavedModel, or the highest of its versions 1, 2, ...", metavar="DIR"
    )
    name: str = option("model", "the model's name in URLs")
    poll_s: float = option(1.0, "seconds between two looks for a new version", above=0)
    devices: tuple[str, ...] = devices_option()
    virtual_devices: int = inherit(StrategyOptions, "virtual_devices")

    def __post_init__(self) -> None:
        super().__post_init__()
        # The name is also that of Kubernetes objects, which are DNS labels.
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise TfdistError(
                f"`name={self.name}` is not a valid name. Use up to 40 lowercase letters, digits "
                "and hyphens, with a letter first."
            )


@dataclass(frozen=True, kw_only=True)
class BatchingOptions(OptionGroup):
    """Batching, with TensorFlow Serving's names."""

    max_batch_size: int = option(8, "instances in a batch, at most", minimum=1)
    batch_timeout_micros: int = option(
        2000, "microseconds that a batch waits to be filled", minimum=0
    )
    max_enqueued_batches: int = option(
        16, "waiting batches, at most; further requests get status 503", minimum=1
    )
    num_batch_threads: int = option(
        0, "batches that are computed at the same time; 0: one per device", minimum=0
    )
    allowed_batch_sizes: tuple[int, ...] = option(
        (),
        "fill batches up to one of these sizes, to bound the number of shapes; any size by default",
        metavar="1,2,4,8",
        minimum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.allowed_batch_sizes
        if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != self.max_batch_size):
            raise TfdistError(
                f"`allowed_batch_sizes={','.join(map(str, sizes))}` must increase and end with "
                f"`max_batch_size={self.max_batch_size}`."
            )


@dataclass(frozen=True, kw_only=True)
class LimitOptions(OptionGroup):
    """Limits."""

    max_body_mib: int = option(16, "size of a request, in MiB", minimum=1)
    max_pixels: int = option(2**25, "pixels of all images of a request", minimum=1)
    max_instances: int = option(64, "instances of a request", minimum=1)
    max_connections: int = option(128, "open connections; others get status 503", minimum=1)
    receive_timeout_s: float = option(
        30.0, "seconds until a request is received, or an answer is sent", above=0
    )
    request_timeout_s: float = option(30.0, "seconds until a request is answered", above=0)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """Server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = option(8501, "port to listen on; 0 for any free port", minimum=0)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names that requests may use besides localhost and the address, such as model.example.com "
        "or *.example.com; with --host=0.0.0.0 any name by default",
        metavar="NAME,NAME",
    )
    drain_s: float = option(
        1.0, "seconds from SIGTERM during which new requests are still answered", minimum=0
    )
    grace_period_s: float = option(
        25.0, "seconds after these in which accepted requests are finished", above=0
    )
    tune: bool = option(False, "measure batch sizes and timeouts, print a table, and exit")
    tune_request: str = option(
        "",
        "tune with this JSON request instead of a made-up one",
        metavar="FILE",
        must_exist="Name another.",
    )
    quiet: bool = inherit(RunOptions, "quiet")
    verbose_tensorflow: bool = inherit(RunOptions, "verbose_tensorflow")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port > _MAX_PORT:
            raise TfdistError(f"`port={self.port}` is not a port. Give 0 to {_MAX_PORT}.")
        check_names(self.allowed_hosts)


@dataclass(frozen=True, kw_only=True)
class TfServingOptions(OptionGroup):
    """TensorFlow Serving."""

    write_tf_serving: str = option(
        "", "only write TensorFlow Serving's configuration to this directory", metavar="DIR"
    )
    image: str = option("tensorflow/serving:2.21.0", "container image", metavar="IMAGE")
    claim: str = option("models", "Kubernetes: the volume claim that holds the model", metavar="")
    cpus: int = option(4, "Kubernetes: CPU cores per replica", minimum=1)
    memory_gib: int = option(8, "Kubernetes: memory per replica, in GiB", minimum=1)
    max_replicas: int = option(4, "Kubernetes: replicas, at most", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(CommandOptions):
    """The options of `python -m tfdist.serve`."""

    model: ServedModelOptions = ServedModelOptions()
    batching: BatchingOptions = BatchingOptions()
    limits: LimitOptions = LimitOptions()
    run: ServerOptions = ServerOptions()
    tf_serving: TfServingOptions = TfServingOptions()
