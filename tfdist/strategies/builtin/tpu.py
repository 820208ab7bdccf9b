"""TPUStrategy: synchronous data parallelism over the cores of a TPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.errors import TfdistError
from tfdist.options import option
from tfdist.strategies.base import Strategy, Traits

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True, kw_only=True)
class Tpu(Strategy):
    """The options of a TPUStrategy.

    Source:
      https://www.tensorflow.org/guide/tpu
    """

    name: ClassVar[str] = "tpu"
    summary: ClassVar[str] = "the cores of a TPU"
    builds: ClassVar[str] = "TPUStrategy"
    traits: ClassVar[Traits] = Traits(copies_variables=True, fixes_shapes=True, is_remote=True)

    tpu: str = option(
        "",
        "local on a TPU VM, a TPU's name, or empty to look for one",
        metavar="NAME",
        result=False,
    )

    def build(self, *, must_match: Mapping[str, str] | None = None) -> "tf.distribute.TPUStrategy":
        import tensorflow as tf

        where = (
            f"`tpu={self.tpu}`"
            if self.tpu
            else "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME and the TPU configuration"
        )
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=self.tpu)
            if self.tpu != "local":
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        # TensorFlow raises ValueError, NotFoundError, UnavailableError, InvalidArgumentError or a
        # plain googleapiclient or urllib error, depending on where the search ends.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TfdistError(
                f"Cannot build TPUStrategy: no TPU found (looked at {where}: {reason[:120]}). "
                "Run on a TPU machine with `tpu=local`, name one with `tpu=NAME`, or use "
                "`strategy=auto`."
            ) from error
        return tf.distribute.TPUStrategy(resolver)


def make_tpu(**options: Any) -> "tf.distribute.TPUStrategy":
    """Connects to a TPU, initializes it and builds a TPUStrategy from the options of `Tpu`.

    Raises:
      TfdistError: no TPU was found.
    """
    return Tpu(**options).build()
