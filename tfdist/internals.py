"""Names from private modules of Keras and TensorFlow, which no other module imports.

A name that has moved between versions is found by what it is, and only here.
`tests/test_internals.py` fails if a new version removes one or changes its signature. The private
attributes that other modules read of objects they are given are listed in `PRIVATE_ATTRIBUTES`.
"""

import functools
import sys

import keras
import tensorflow as tf

from tfdist.errors import TfdistError

try:
    from keras.src import backend
    from keras.src.backend import compute_output_spec
    from keras.src.backend.common import global_state
    from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
    from keras.src.backend.common.stateless_scope import get_stateless_scope
    from keras.src.backend.common.variables import get_autocast_scope
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.losses import loss as loss_module
    from keras.src.metrics.reduction_metrics import MeanMetricWrapper
    from keras.src.models import functional
    from keras.src.models.functional import Functional
    from keras.src.ops.operation import Operation
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.random import seed_generator as keras_random
    from keras.src.saving import saving_lib
    from keras.src.trainers import data_adapters
    from keras.src.trainers.compile_utils import CompileMetrics, MetricsList
    from keras.src.trainers.data_adapters import (
        array_data_adapter,
        array_slicing,
        data_adapter_utils,
    )
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
    from keras.src.utils import python_utils
    from tensorflow.python.checkpoint.checkpoint import TrackableSaver
    from tensorflow.python.client import device_lib
    from tensorflow.python.data.ops import multi_device_iterator_ops
    from tensorflow.python.distribute import cross_device_ops, merge_call_interim, values_util
    from tensorflow.python.distribute.collective_all_reduce_strategy import (
        CollectiveAllReduceExtended,
    )
    from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
    from tensorflow.python.distribute.cross_device_utils import (
        CollectiveKeys,
        CollectiveReplicaLauncher,
    )
    from tensorflow.python.distribute.distribute_lib import UpdateContext
    from tensorflow.python.distribute.mirrored_run import _MirroredReplicaThread as ReplicaThread
    from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
    from tensorflow.python.distribute.ps_values import AggregatingVariable
    from tensorflow.python.distribute.values import (
        DistributedDelegate,
        DistributedVariable,
        MirroredVariable,
        PerReplica,
        SyncOnReadVariable,
    )
    from tensorflow.python.eager import context, record
    from tensorflow.python.eager.context import global_seed
    from tensorflow.python.eager.polymorphic_function.function_type_utils import (
        canonicalize_function_inputs,
    )
    from tensorflow.python.framework.config import is_op_determinism_enabled
    from tensorflow.python.framework.none_tensor import NoneTensorSpec
    from tensorflow.python.framework.ops import _DefaultGraphStack as GraphStack
    from tensorflow.python.lib.io import file_io
    from tensorflow.python.ops import custom_gradient, gen_summary_ops
    from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops
    from tensorflow.python.ops.tensor_getitem_override import _slice_helper_var as slice_variable
    from tensorflow.python.saved_model import load as model_loading
    from tensorflow.python.saved_model import save as model_saving
    from tensorflow.python.saved_model.load import _WrapperFunction as LoadedFunction
    from tensorflow.python.training import py_checkpoint_reader

    # The class of Keras's models that trains with TensorFlow. Keras 3.16 calls it Trainer.
    TensorFlowTrainer = next(c for c in keras.Model.__mro__ if "make_train_function" in vars(c))
    # What Keras joins the outputs of batches with, in the module of that class.
    potentially_ragged_concat = sys.modules[TensorFlowTrainer.__module__].potentially_ragged_concat
    # Where the layer looks `lstm` up. Keras 3.16 moves it out of the backend's own module.
    lstm_module = backend if hasattr(backend, "lstm") else backend.rnn
    # Whether a layer's `training` in the definition of a functional model wins over that of the
    # model's call. It does from Keras 3.16 on.
    DEFINITION_WINS = not hasattr(functional, "operation_fn")
    # Whether a method for a single batch forgets those before. Keras 3.13 does not.
    RESETS_ON_BATCH = "reset_metrics" in TensorFlowTrainer.train_on_batch.__code__.co_names
    # Whether such a method returns numbers. That of Keras 3.13 returns arrays.
    RETURNS_NUMBERS = "pythonify_logs" in TensorFlowTrainer.train_on_batch.__code__.co_names
    # Whether a step takes its batch itself, so that parts of it run once more when the data have
    # ended. Keras 3.16 looks for a batch first.
    STEP_TAKES_BATCH = any(
        "get_next" in getattr(code, "co_names", ())
        for code in TensorFlowTrainer._make_function.__code__.co_consts
    )
    # The name under which Keras stores its global generator, which Keras 3.12 spells out.
    GLOBAL_SEED_GENERATOR = getattr(keras_random, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
except (ImportError, AttributeError, StopIteration) as error:
    raise TfdistError(
        f"tfdist does not work with Keras {keras.__version__} and TensorFlow {tf.__version__} "
        f"({error or type(error).__name__}). Install versions that it is tested with: "
        "pip install --upgrade --force-reinstall tfdist."
    ) from error

# Whose layers are known to be divisible; others are guarded. Nothing else asks for a version.
TESTED = {"Keras": (keras, (3, 15)), "TensorFlow": (tf, (2, 21))}


def find_untested() -> str:
    """Returns one line about versions other than the tested ones; empty if none is."""
    found = [
        f"{name} {library.__version__}"
        for name, (library, tested) in TESTED.items()
        if tuple(int(number) for number in library.__version__.split(".")[:2]) != tested
    ]
    return (
        f"{' and '.join(found)}: not what tfdist knows best, so every program's first "
        'batch is computed divided and whole, and refused if the results differ (check="on").'
        if found
        else ""
    )


@functools.cache
def adds_up_activities() -> bool:
    """Returns whether the penalty of an activity regularizer is a sum over the examples.

    Keras 3.14 and later divide it by their number.
    """
    with tf.init_scope():
        layer = keras.layers.ActivityRegularization(l2=1.0, name="penalized")
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) > 1


def renormalizes(layer: keras.layers.Layer) -> bool:
    """Returns whether batch normalization renormalizes, which Keras 3.13 cannot."""
    return bool(getattr(layer, "renorm", False))


# Owner -> the private attributes that are read or set of its instances. The test looks for them in
# the source of the modules of the owner's class and of the classes it derives from.
PRIVATE_ATTRIBUTES = {
    "keras.Model": (
        *("_call_context_args", "_call_has_training_arg", "_clear_losses", "_compile_loss"),
        *("_compile_metrics", "_flatten_layers", "_flatten_metrics_in_order", "_inbound_nodes"),
        *("_initial_epoch", "_loss_tracker", "_make_function", "_non_trainable_variables"),
        *("_post_build", "_seed_generators", "_symbolic_build", "_trainable_variables"),
    ),
    "keras.Sequential": ("_functional",),
    "tfdist.internals.Functional": (
        *("_inputs_struct", "_nodes_by_depth", "_outputs_struct", "_standardize_inputs"),
    ),
    "tfdist.internals.CompileMetrics": (  # and of its neighbor
        *("_flat_losses", "_user_loss", "_user_loss_weights", "_user_metrics"),
        "_user_weighted_metrics",
    ),
    "tfdist.internals.MeanMetricWrapper": ("_fn", "_fn_kwargs"),
    "keras.losses.MeanSquaredError": ("_fn_kwargs",),
    "keras.layers.BatchNormalization": ("_reduction_axes",),
    "keras.Variable": ("_maybe_autocast",),
    "keras.optimizers.Adam": (
        *("_accumulated_gradients", "_apply_weight_decay", "_backend_reset_gradient_accumulators"),
        *("_backend_update_step", "_clip_gradients", "_get_variable_index", "_iterations"),
        *("_distribution_strategy", "_learning_rate", "_model_variables_moving_average"),
        *("_momentums", "_trainable_variables", "_update_model_variables_moving_average"),
        "_velocities",
    ),
    "keras.optimizers.LossScaleOptimizer": ("_common_apply", "_tf_apply"),
    "tfdist.internals.array_data_adapter.ArrayDataAdapter": ("_inputs", "_num_samples"),
    "keras.src.utils.python_utils": ("_is_default",),
    "tensorflow.python.data.ops.dataset_ops": ("_as_serialized_graph", "_inputs"),
    "tensorflow.python.data.ops.from_tensors_op": ("_tensors",),
    "tensorflow.python.data.ops.readers": ("_filenames",),
    "tensorflow.python.data.ops.shuffle_op": ("_seed2",),
    "tensorflow.python.distribute.coordinator.values": ("_status_available_event",),
    "tensorflow.python.distribute.parameter_server_strategy_v2": (
        *("_cluster_resolver", "_num_ps", "_num_workers", "_variable_count"),
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": ("_autograph",),
    "tensorflow.python.framework.ops": ("_get_function",),
    "tensorflow.python.ops.handle_data_util": ("_handle_data",),
    "tfdist.internals.CollectiveAllReduce": ("_launchers",),
    "tfdist.internals.CollectiveAllReduceExtended": (
        *("_communication_options", "_get_variable_creator_initial_value", "_id_in_cluster"),
        *("_in_multi_worker_mode", "_num_workers", "_initialize_local_devices", "_collective_keys"),
        *("_make_input_context", "_num_replicas_in_sync", "_get_replica_id_in_sync_group"),
        *("_get_cross_device_ops", "_get_local_replica_id"),
    ),
    "tfdist.internals.CollectiveReplicaLauncher": (
        *("_all_gather", "_device", "_get_ordering_token", "_group_key", "_group_size"),
        "_options",
    ),
    "tfdist.internals.DistributedVariable": (
        *("_distributed_container", "_get", "_get_cross_replica", "_get_on_device_or_primary"),
        *("_primary", "_shared_name", "_update_replica"),
    ),
    "tfdist.internals.LoadedFunction": ("_call_flat",),
    "tfdist.internals.MirroredExtended": (
        *("_broadcast_to", "_collective_key_base", "_collective_ops", "_cross_device_ops"),
        *("_get_cross_device_ops", "_make_collective_ops_with_fallbacks"),
    ),
    "tfdist.internals.file_io": ("_pywrap_file_io",),
}

__all__ = [
    "DEFINITION_WINS",
    "GLOBAL_SEED_GENERATOR",
    "PRIVATE_ATTRIBUTES",
    "RESETS_ON_BATCH",
    "RETURNS_NUMBERS",
    "STEP_TAKES_BATCH",
    "TESTED",
    "AggregatingVariable",
    "BaseOptimizer",
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveKeys",
    "CollectiveReplicaLauncher",
    "CompileMetrics",
    "DistributedDelegate",
    "DistributedVariable",
    "Functional",
    "GraphStack",
    "LoadedFunction",
    "MeanMetricWrapper",
    "MetricsList",
    "MirroredExtended",
    "MirroredVariable",
    "NoneTensorSpec",
    "Operation",
    "PerReplica",
    "ReplicaThread",
    "SyncOnReadVariable",
    "TFOptimizer",
    "TensorFlowTrainer",
    "TrackableSaver",
    "UpdateContext",
    "adds_up_activities",
    "array_data_adapter",
    "array_slicing",
    "canonicalize_function_inputs",
    "compute_output_spec",
    "context",
    "cross_device_ops",
    "custom_gradient",
    "data_adapter_utils",
    "data_adapters",
    "device_lib",
    "file_io",
    "find_untested",
    "gen_summary_ops",
    "get_autocast_scope",
    "get_keras_mask",
    "get_stateless_scope",
    "global_seed",
    "global_state",
    "is_op_determinism_enabled",
    "keras_random",
    "legacy_h5_format",
    "loss_module",
    "lstm_module",
    "make_class_weight_map_fn",
    "merge_call_interim",
    "model_loading",
    "model_saving",
    "multi_device_iterator_ops",
    "potentially_ragged_concat",
    "py_checkpoint_reader",
    "python_utils",
    "random_ops",
    "record",
    "renormalizes",
    "saving_lib",
    "set_keras_mask",
    "slice_variable",
    "values_util",
]
