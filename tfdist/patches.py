"""Every place where tfdist changes Keras, TensorFlow or Python's library, and why.

This is the whole list: `tfdist.replacing` replaces nothing that is not in it, and no other module
assigns to a class, module or object of another library. A patch is in place only

- while a **step** is traced, in the thread that traces it and in those of its replicas;
- while a **model** is built, trained or saved, likewise;
- while a **script** runs under `tfdist.run`, in all threads;
- or **always**, from the first time that it is needed, where it adds what is missing otherwise.

When a version of Keras or TensorFlow changes, this is the list to go through;
`tests/test_replacing.py` fails if one of the names is gone.
"""

import builtins
import bz2
import io
import os
import shutil
import tarfile
import tempfile
import threading
from typing import Any, Literal, NamedTuple

import h5py
import keras
import tensorflow as tf

from tfdist.internals import (
    AggregatingVariable,
    BaseOptimizer,
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    CollectiveReplicaLauncher,
    DistributedDelegate,
    DistributedVariable,
    Functional,
    GraphStack,
    LoadedFunction,
    MirroredExtended,
    MirroredVariable,
    Operation,
    ReplicaThread,
    SyncOnReadVariable,
    TensorFlowTrainer,
    TFOptimizer,
    TrackableSaver,
    cross_device_ops,
    custom_gradient,
    file_io,
    gen_summary_ops,
    keras_random,
    legacy_h5_format,
    loss_module,
    lstm_module,
    model_loading,
    model_saving,
    multi_device_iterator_ops,
    py_checkpoint_reader,
    python_utils,
    random_ops,
    saving_lib,
    values_util,
)

When = Literal["step", "model", "script", "always"]


class Patch(NamedTuple):
    """Names of a module or class that tfdist replaces, also where its subclasses define them.

    Attributes:
      when: while what they are replaced; see above.
      owner: the module or class; for the attribute of an object, its class.
      names: the names, separated by spaces.
      by: the module of tfdist that has what takes their place.
    """

    when: When
    owner: Any
    names: str
    by: str
    why: str


def _list_patches(when: When, by: str, *rows: tuple[Any, str, str]) -> list[Patch]:
    """Returns the patches of a module: (owner, names, why)."""
    return [Patch(when, owner, names, by, why) for owner, names, why in rows]


PATCHES = (
    *_list_patches(
        "step",
        "training.replicas.division",
        (
            loss_module,
            "apply_mask reduce_values",
            "a loss that masks or weights normalize uses the numbers of the global batch",
        ),
        (
            loss_module,
            "scale_loss_for_distribution unscale_loss_for_distribution",
            "Keras divides by the number of replicas, as if all had as many examples",
        ),
        (
            loss_module,
            "squeeze_or_expand_to_same_rank",
            "sample weights are aligned by the batch, not by a dimension that is as long by chance",
        ),
        (
            tf.nn,
            "compute_average_loss scale_regularization_loss",
            "the tutorials' loops divide by the global batch, which tfdist does already",
        ),
        (tf.distribute.Strategy, "num_replicas_in_sync", "a step may divide by it, as tfdist does"),
        (tf.distribute.ReplicaContext, "num_replicas_in_sync", "as for the strategy"),
        (
            keras.Model,
            "compute_loss",
            "with gathered outputs, a loss sees the examples of all replicas",
        ),
        (
            custom_gradient,
            "_get_dependent_variables",
            "TensorFlow searches the graph for each all-reduce, for minutes in deep networks",
        ),
    ),
    *(
        Patch(
            "step",
            owner,
            names,
            "training.replicas.example_sums",
            "a sum over examples that the program divides by a constant is scaled",
        )
        for owner, names in (
            (tf, "reduce_sum"),
            (tf.math, "reduce_sum"),
            (keras.ops, "sum"),
            (tf.GradientTape, "gradient"),
        )
    ),
    *_list_patches(
        "step",
        "training.replicas.added_losses",
        (
            TensorFlowTrainer,
            "_aggregate_additional_loss",
            "the losses of layers are each replica's own, in the precision of the loss",
        ),
        (
            keras.Layer,
            "_losses activity_regularizer",
            "the losses of layers are each replica's own; those of a sum are scaled",
        ),
    ),
    *_list_patches(
        "step",
        "training.replicas.attributes",
        (
            tf.distribute.ReplicaContext,
            "merge_call",
            "while a replica waits in a layer, the others set the same attributes of it",
        ),
    ),
    *_list_patches(
        "step",
        "training.replicas.metrics",
        (
            keras.metrics.Metric,
            "update_state result",
            "every example of the global batch is counted once; some metrics need all of them",
        ),
        (
            python_utils,
            "pythonify_logs",
            "up to Keras 3.13, an eager step returns numbers, which do not say of which metric",
        ),
    ),
    *_list_patches(
        "step",
        "training.replicas.optimizers",
        (
            BaseOptimizer,
            "apply apply_gradients _backend_apply_gradients",
            "the outermost optimizer reduces the gradient once; clipping sees the global one",
        ),
        (
            TFOptimizer,
            "_all_reduce_sum_gradients",
            "Keras sums gradients after it has clipped each replica's own",
        ),
    ),
    *_list_patches(
        "step",
        "training.step.fused_update",
        (
            TFOptimizer,
            "_distributed_tf_update_step",
            "one update of all variables instead of one by one; by pieces, if the state is divided",
        ),
        (BaseOptimizer, "iterations", "the number of the step is read once"),
    ),
    *_list_patches(
        "step",
        "placement.shards.divided",
        (
            TFOptimizer,
            "add_variable_from_reference",
            "the state of a divided weight is divided like it",
        ),
        (
            tf.GradientTape,
            "gradient",
            "the gradient of a divided weight is the gradients of its parts",
        ),
        (keras.Variable, "_value", "a part or a piece of a variable stands for the whole"),
    ),
    *_list_patches(
        "step",
        "placement.variables",
        (
            tf.distribute.StrategyExtended,
            "update",
            "a variable is updated on its own device, or in pieces",
        ),
    ),
    *_list_patches(
        "step",
        "training.servers.asynchronous",
        (
            BaseOptimizer,
            "_clip_gradients",
            "a worker has clipped the gradient that the servers apply",
        ),
    ),
    *_list_patches(
        "step",
        "placement.stages.call",
        (
            tf.distribute.ReplicaContext,
            "all_reduce",
            "a stage that runs again does not reduce again",
        ),
    ),
    *_list_patches(
        "step",
        "training.replicas.branches",
        (
            tf.distribute.ReplicaContext,
            "all_reduce",
            "the guard tells a replica's own numbers from those that all replicas have",
        ),
    ),
    *_list_patches(
        "step",
        "strategies.collectives",
        (
            CollectiveReplicaLauncher,
            "batch_all_reduce",
            "tensors of known shapes need no operations that compute their shapes",
        ),
    ),
    *_list_patches(
        "step",
        "strategies.process_sums",
        (
            CollectiveReplicaLauncher,
            "_get_ordering_token",
            "a small sum begins as soon as its value is known",
        ),
    ),
    *_list_patches(
        "model",
        "strategies.process_sums",
        (CollectiveAllReduce, "_all_reduce", "small sums between processes are gathered and added"),
    ),
    *_list_patches(
        "step",
        "training.replicas.aggregation",
        (
            DistributedVariable,
            "assign assign_add assign_sub",
            "replicas agree on the value of a variable that each of them assigns",
        ),
        (
            AggregatingVariable,
            "assign assign_add assign_sub",
            "replicas agree on the value of a variable that each of them assigns",
        ),
    ),
    *_list_patches(
        "step",
        "training.replicas.global_norm",
        (
            keras.layers.BatchNormalization,
            "call _moments",
            "the moments are those of the global batch, on the fused kernel where there is one",
        ),
    ),
    *_list_patches(
        "step",
        "training.step.fused_layers",
        (lstm_module, "lstm", "Keras has a fast LSTM on GPUs only"),
    ),
    *_list_patches(
        "step",
        "placement.tracing",
        (Functional, "call", "a placement computes a model's layers by stages, shards or strips"),
    ),
    *_list_patches(
        "step",
        "training.guard.indivisible_part",
        (
            keras.Layer,
            "__call__ _dtype_policy",
            "the guard records what layers compute, and computes them in float64",
        ),
        (Operation, "__call__", "the guard records what operations compute"),
    ),
    *_list_patches(
        "step",
        "training.replicas.random_layers",
        (
            random_ops,
            "stateless_random_get_alg stateless_random_get_key_counter stateless_random_normal_v2 "
            "stateless_random_uniform_full_int_v2 stateless_random_uniform_int_v2 "
            "stateless_random_uniform_v2 stateless_truncated_normal_v2",
            "a replica draws the numbers that one device would draw for its examples",
        ),
        (
            keras.random.SeedGenerator,
            "next",
            "the state of a generator is written once, after all layers have drawn",
        ),
        (
            keras_random,
            "global_seed_generator",
            "Keras keeps a global generator for each thread, and replicas have their own threads",
        ),
    ),
    *_list_patches(
        "model",
        "training.fit.own_methods",
        (
            keras.Model,
            "fit evaluate predict train_on_batch test_on_batch predict_on_batch "
            "_assert_compile_called make_train_function",
            "a model's own method runs as written; what it calls of Keras runs under the strategy",
        ),
    ),
    *_list_patches(
        "model",
        "training.replicas.compilation",
        (
            keras.Model,
            "_distribute_strategy _resolve_auto_jit_compile",
            "whether XLA compiles is decided as on one device",
        ),
    ),
    *_list_patches(
        "model",
        "training.fit.averaging",
        (
            TFOptimizer,
            "_overwrite_model_variables_with_average_value",
            "averages of divided weights replace them as a whole",
        ),
    ),
    *_list_patches(
        "model",
        "training.inputs.data_adapter",
        (
            multi_device_iterator_ops,
            "_create_device_dataset",
            "the datasets that copy batches to devices get the options of all others",
        ),
    ),
    *_list_patches(
        "model",
        "training.workers.alone",
        (
            CollectiveAllReduceExtended,
            "read_var _get_variable_creator_initial_value",
            "a worker saves and creates variables without waiting for the others",
        ),
        (SyncOnReadVariable, "_get_cross_replica", "a worker reads the values of its own replicas"),
    ),
    *_list_patches(
        "script",
        "run.routing",
        (
            keras.Model,
            "save save_weights load_weights export",
            "each worker saves by itself, and only the chief to the real path",
        ),
        (keras.export.ExportArchive, "write_out", "each worker saves by itself"),
        (
            saving_lib,
            "save_model save_weights_only load_weights_only",
            "each worker saves by itself",
        ),
        (
            legacy_h5_format,
            "save_model_to_hdf5 save_weights_to_hdf5_group",
            "each worker saves by itself",
        ),
    ),
    *_list_patches(
        "script",
        "run.scope",
        (
            GraphStack,
            "reset",
            "`clear_session` would throw away the graph that holds the strategy's scope",
        ),
        (
            threading.Thread,
            "start",
            "a script's threads build their models in the strategy's scope, too",
        ),
        (
            loss_module,
            "scale_loss_for_distribution unscale_loss_for_distribution",
            "Keras divides a loss by the number of replicas even where none of them computes it",
        ),
        (
            tf.nn,
            "compute_average_loss scale_regularization_loss",
            "TensorFlow refuses them where no replica computes, and so in a script's own loop",
        ),
        (
            tf.distribute.Strategy,
            "__init__ __new__",
            "a strategy that the script builds is the one of the command",
        ),
        (
            tf.distribute,
            "experimental_set_strategy",
            "a strategy that the script builds is the one of the command",
        ),
    ),
    *_list_patches(
        "script",
        "run.own_steps",
        (
            BaseOptimizer,
            "apply",
            "a script that applies gradients by itself is told that replicas have no part in it",
        ),
        (tf, "function", "replicas compute the steps of a script's own loops"),
    ),
    *(
        Patch("script", owner, names, "run.device_settings", "the devices are in use already")
        for owner, names in (
            (tf.config, "set_logical_device_configuration set_visible_devices"),
            (
                tf.config.experimental,
                "set_memory_growth set_virtual_device_configuration set_visible_devices",
            ),
            (
                tf.config.threading,
                "set_inter_op_parallelism_threads set_intra_op_parallelism_threads",
            ),
        )
    ),
    *(
        Patch("script", owner, names, "run.overlay", "other workers than the chief write elsewhere")
        for owner, names in (
            (builtins, "open"),
            (io, "open"),
            (bz2, "_builtin_open"),
            (tarfile, "bltn_open"),
            (tempfile, "_os _io"),
            (shutil, "rmtree"),
            (
                os,
                "access chdir chmod chown getcwd getxattr lchown link listdir listxattr lstat "
                "mkdir mkfifo mknod open pathconf readlink remove removexattr rename replace rmdir "
                "scandir setxattr stat statvfs symlink truncate unlink utime",
            ),
            (file_io, "_pywrap_file_io"),
            (h5py.File, "__init__"),
            (tf.data.Dataset, "cache list_files load save"),
            (tf.io, "matching_files read_file write_file"),
            (tf.io.TFRecordWriter, "__init__"),
            (tf.data.TFRecordDataset, "__init__"),
            (tf.data.TextLineDataset, "__init__"),
            (tf.data.FixedLengthRecordDataset, "__init__"),
            (tf.data.experimental.CsvDataset, "__init__"),
            (model_saving, "save_and_return_nodes"),
            (model_loading, "load_partial"),
            (gen_summary_ops, "create_summary_file_writer"),
            (TrackableSaver, "restore save"),
            (py_checkpoint_reader, "NewCheckpointReader"),
        )
    ),
    # Variables outside of steps; `tfdist.distributed_variables` says more.
    *_list_patches(
        "always",
        "distributed_variables",
        (
            DistributedDelegate,
            "__array__ __complex__ __float__ __index__ __int__",
            "variables convert to numbers and arrays, as those of one device do",
        ),
        (
            DistributedVariable,
            "__bool__ __copy__ __getitem__ __reduce__ _strided_slice_assign batch_scatter_update "
            "count_up_to gather_nd handle scatter_nd_add scatter_nd_max scatter_nd_min "
            "scatter_nd_sub scatter_nd_update sparse_read",
            "a read sees the variable's value, and a write reaches all copies",
        ),
        (AggregatingVariable, "__reduce__", "can be pickled"),
        (MirroredVariable, "scatter_max scatter_min scatter_update", "a write reaches all copies"),
        (
            SyncOnReadVariable,
            "__init__ _get_cross_replica _update_replica scatter_add scatter_div scatter_max "
            "scatter_min scatter_mul scatter_sub scatter_update",
            "a sum over replicas keeps the value that a script assigns",
        ),
        (
            values_util,
            "get_on_read_restore_ops on_read_assign_add_cross_replica on_read_assign_cross_replica "
            "on_read_assign_sub_cross_replica",
            "a sum over replicas keeps the value that a script assigns",
        ),
        (
            CollectiveAllReduceExtended,
            "_get_variable_creator_initial_value",
            "a sum begins on each worker without waiting for the others",
        ),
        (
            MirroredExtended,
            "_broadcast_to",
            "a variable is tested for None, not for its truth value",
        ),
        (
            cross_device_ops,
            "check_destinations",
            "a variable is tested for None, not for its truth value",
        ),
        (
            tf.__internal__.distribute.interim,
            "maybe_merge_call",
            "an optimizer that a script applies updates all copies",
        ),
        (
            keras.optimizers.LossScaleOptimizer,
            "_tf_apply",
            "an optimizer that a script applies updates all copies",
        ),
        (
            tf.GradientTape,
            "watched_variables",
            "a tape returns the variables that it watched, instead of their copies",
        ),
        (LoadedFunction, "_call_flat", "a SavedModel that was loaded in a scope can be called"),
    ),
    *_list_patches(
        "always",
        "replacing",
        (
            ReplicaThread,
            "start",
            "the threads of replicas call what the thread that waits for them calls",
        ),
    ),
    *_list_patches(
        "always",
        "training.fit.averaging",
        (
            keras.callbacks.SwapEMAWeights,
            "_tf_finalize_ema_values _tf_swap_variables",
            "averages of divided weights replace them as a whole",
        ),
    ),
)


_OWNERS: dict[str, list[Any]] = {}
for _patch in PATCHES:
    for _name in _patch.names.split():
        _OWNERS.setdefault(_name, []).append(_patch.owner)


def is_listed(owner: object, name: str) -> bool:
    """Returns whether the list has a name of a module or class, of a subclass or a base class."""
    return any(
        owner is listed
        or (
            isinstance(owner, type)
            and isinstance(listed, type)
            and (issubclass(owner, listed) or issubclass(listed, owner))
        )
        for listed in _OWNERS.get(name, [])
    )
