"""TPUStrategy: synchronous data parallelism over the cores of a TPU."""

import tensorflow as tf

from tfdist.errors import TfdistError


def make_tpu(*, tpu: str = "") -> tf.distribute.TPUStrategy:
    """Connects to a TPU, initialises it and builds a TPUStrategy.

    Args:
      tpu: `local` on a TPU VM; a Cloud TPU's name or `grpc://` address; empty to look where
        Colab and Cloud TPU leave it.

    Returns:
      A `tf.distribute.TPUStrategy`.

    Raises:
      TfdistError: no TPU was found.

    Source:
      https://www.tensorflow.org/guide/tpu
    """
    where = (
        f"--tpu={tpu}"
        if tpu
        else "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME and the TPU configuration"
    )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
        if tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    # TensorFlow raises ValueError, NotFoundError, UnavailableError, InvalidArgumentError or a
    # plain googleapiclient or urllib error, according to where the search ends.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TfdistError(
            f"Cannot build TPUStrategy: no TPU found (looked at {where}: {reason[:120]}). "
            "Run on a TPU machine with --tpu=local, name one with --tpu=NAME, or take "
            "--strategy=auto."
        ) from error
    return tf.distribute.TPUStrategy(resolver)
