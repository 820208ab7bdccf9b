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


PATCHES = (
    # Losses: Keras divides by what is on one replica, the rule is the global batch.
    Patch(
        "step",
        loss_module,
        "apply_mask reduce_values",
        "training.replicas.division",
        "a loss that masks or weights normalize uses the numbers of the global batch",
    ),
    Patch(
        "step",
        loss_module,
        "scale_loss_for_distribution unscale_loss_for_distribution",
        "training.replicas.division",
        "Keras divides by the number of replicas, as if all had as many examples",
    ),
    Patch(
        "step",
        loss_module,
        "squeeze_or_expand_to_same_rank",
        "training.replicas.division",
        "sample weights are aligned by the batch, not by a dimension that is as long by chance",
    ),
    Patch(
        "step",
        tf.nn,
        "compute_average_loss scale_regularization_loss",
        "training.replicas.division",
        "the tutorials' loops divide by the global batch, which tfdist does already",
    ),
    *(
        Patch(
            "step",
            owner,
            name,
            "training.replicas.example_sums",
            "a sum over examples that the program divides by a constant is scaled",
        )
        for owner, name in (
            (tf, "reduce_sum"),
            (tf.math, "reduce_sum"),
            (keras.ops, "sum"),
            (tf.GradientTape, "gradient"),
        )
    ),
    Patch(
        "step",
        TensorFlowTrainer,
        "_aggregate_additional_loss",
        "training.replicas.added_losses",
        "the losses of layers are each replica's own, in the precision of the loss",
    ),
    Patch(
        "step",
        keras.Model,
        "compute_loss",
        "training.replicas.division",
        "with gathered outputs, a loss sees the examples of all replicas",
    ),
    Patch(
        "step",
        keras.Layer,
        "_losses activity_regularizer",
        "training.replicas.added_losses",
        "the losses of layers are each replica's own; those of a sum are scaled",
    ),
    # Metrics.
    Patch(
        "step",
        keras.metrics.Metric,
        "update_state result",
        "training.replicas.metrics",
        "every example of the global batch is counted once; some metrics need all of them",
    ),
    # Optimizers and gradients.
    Patch(
        "step",
        BaseOptimizer,
        "apply apply_gradients _backend_apply_gradients",
        "training.replicas.optimizers",
        "the outermost optimizer reduces the gradient once; clipping sees the global one",
    ),
    Patch(
        "step",
        TFOptimizer,
        "_all_reduce_sum_gradients",
        "training.replicas.optimizers",
        "Keras sums gradients after it has clipped each replica's own",
    ),
    Patch(
        "step",
        TFOptimizer,
        "_distributed_tf_update_step",
        "training.step.fused_update",
        "one update of all variables instead of one by one; by pieces, if the state is divided",
    ),
    Patch(
        "step",
        BaseOptimizer,
        "iterations",
        "training.step.fused_update",
        "the number of the step is read once",
    ),
    Patch(
        "step",
        TFOptimizer,
        "add_variable_from_reference",
        "placement.shards.divided",
        "the state of a divided weight is divided like it",
    ),
    Patch(
        "step",
        tf.distribute.StrategyExtended,
        "update",
        "placement.variables",
        "a variable is updated on its own device, or in pieces",
    ),
    Patch(
        "step",
        tf.GradientTape,
        "gradient",
        "placement.shards.divided",
        "the gradient of a divided weight is the gradients of its parts",
    ),
    Patch(
        "step",
        keras.Variable,
        "_value",
        "placement.shards.divided",
        "a part or a piece of a variable stands for the whole",
    ),
    Patch(
        "step",
        custom_gradient,
        "_get_dependent_variables",
        "training.replicas.division",
        "TensorFlow searches the graph for each all-reduce, for minutes in deep networks",
    ),
    Patch(
        "step",
        BaseOptimizer,
        "_clip_gradients",
        "training.servers.asynchronous",
        "a worker has clipped the gradient that the servers apply",
    ),
    Patch(
        "step",
        tf.distribute.ReplicaContext,
        "all_reduce",
        "placement.stages.call",
        "a stage that runs again does not reduce again",
    ),
    Patch(
        "step",
        CollectiveReplicaLauncher,
        "_get_ordering_token",
        "strategies.process_sums",
        "a small sum begins as soon as its value is known",
    ),
    Patch(
        "model",
        CollectiveAllReduce,
        "_all_reduce",
        "strategies.process_sums",
        "small sums between processes are gathered and added",
    ),
    # Variables that a step assigns.
    Patch(
        "step",
        DistributedVariable,
        "assign assign_add assign_sub",
        "training.replicas.aggregation",
        "replicas agree on the value of a variable that each of them assigns",
    ),
    Patch(
        "step",
        AggregatingVariable,
        "assign assign_add assign_sub",
        "training.replicas.aggregation",
        "replicas agree on the value of a variable that each of them assigns",
    ),
    # Layers.
    Patch(
        "step",
        keras.layers.BatchNormalization,
        "call _moments",
        "training.replicas.global_norm",
        "the moments are those of the global batch, on the fused kernel where there is one",
    ),
    Patch(
        "step",
        lstm_module,
        "lstm",
        "training.step.fused_layers",
        "Keras has a fast LSTM on GPUs only",
    ),
    Patch(
        "step",
        Functional,
        "call",
        "placement.tracing",
        "a placement computes a model's layers by stages, shards or strips",
    ),
    Patch(
        "step",
        keras.Layer,
        "__call__ _dtype_policy",
        "training.guard.indivisible_part",
        "the guard records what layers compute, and computes them in float64",
    ),
    Patch(
        "step",
        Operation,
        "__call__",
        "training.guard.indivisible_part",
        "the guard records what operations compute",
    ),
    # Random numbers.
    Patch(
        "step",
        random_ops,
        "stateless_random_get_alg stateless_random_get_key_counter stateless_random_normal_v2 "
        "stateless_random_uniform_full_int_v2 stateless_random_uniform_int_v2 "
        "stateless_random_uniform_v2 stateless_truncated_normal_v2",
        "training.replicas.random_layers",
        "a replica draws the numbers that one device would draw for its examples",
    ),
    Patch(
        "step",
        keras.random.SeedGenerator,
        "next",
        "training.replicas.random_layers",
        "the state of a generator is written once, after all layers have drawn",
    ),
    Patch(
        "step",
        keras_random,
        "global_seed_generator",
        "training.replicas.random_layers",
        "Keras keeps a global generator for each thread, and replicas have their own threads",
    ),
    # Models and data.
    Patch(
        "model",
        keras.Model,
        "fit evaluate predict train_on_batch test_on_batch predict_on_batch _assert_compile_called",
        "training.fit.own_methods",
        "a model's own method runs as written; what it calls of Keras runs under the strategy",
    ),
    Patch(
        "model",
        keras.Model,
        "_distribute_strategy _resolve_auto_jit_compile",
        "training.replicas.compilation",
        "whether XLA compiles is decided as on one device",
    ),
    Patch(
        "model",
        TFOptimizer,
        "_overwrite_model_variables_with_average_value",
        "training.fit.averaging",
        "averages of divided weights replace them as a whole",
    ),
    Patch(
        "model",
        multi_device_iterator_ops,
        "_create_device_dataset",
        "training.inputs.data_adapter",
        "the datasets that copy batches to devices get the options of all others",
    ),
    Patch(
        "model",
        CollectiveAllReduceExtended,
        "read_var _get_variable_creator_initial_value",
        "training.workers.alone",
        "a worker saves and creates variables without waiting for the others",
    ),
    Patch(
        "model",
        SyncOnReadVariable,
        "_get_cross_replica",
        "training.workers.alone",
        "a worker reads the values of its own replicas",
    ),
    # A script under `tfdist.run`.
    Patch(
        "script",
        keras.Model,
        "save save_weights load_weights export",
        "run.routing",
        "each worker saves by itself, and only the chief to the real path",
    ),
    *(
        Patch("script", owner, names, "run.routing", "each worker saves by itself")
        for owner, names in (
            (keras.export.ExportArchive, "write_out"),
            (saving_lib, "save_model save_weights_only load_weights_only"),
            (legacy_h5_format, "save_model_to_hdf5 save_weights_to_hdf5_group"),
        )
    ),
    Patch(
        "script",
        GraphStack,
        "reset",
        "run.scope",
        "`clear_session` would throw away the graph that holds the strategy's scope",
    ),
    Patch(
        "script",
        threading.Thread,
        "start",
        "run.scope",
        "a script's threads build their models in the strategy's scope, too",
    ),
    Patch(
        "script",
        loss_module,
        "scale_loss_for_distribution unscale_loss_for_distribution",
        "run.scope",
        "Keras divides a loss by the number of replicas even where none of them computes it",
    ),
    Patch(
        "script",
        tf.nn,
        "compute_average_loss scale_regularization_loss",
        "run.scope",
        "TensorFlow refuses them where no replica computes, and so in a script's own loop",
    ),
    Patch(
        "script",
        BaseOptimizer,
        "apply",
        "run.own_steps",
        "a script that applies gradients by itself is told that replicas have no part in it",
    ),
    Patch(
        "script",
        tf,
        "function",
        "run.own_steps",
        "replicas compute the steps of a script's own loops",
    ),
    Patch(
        "script",
        tf.distribute.Strategy,
        "__init__ __new__",
        "run.scope",
        "a strategy that the script builds is the one of the command",
    ),
    Patch(
        "script",
        tf.distribute,
        "experimental_set_strategy",
        "run.scope",
        "a strategy that the script builds is the one of the command",
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
            (tf.data.Dataset, "cache load save"),
            (tf.io, "read_file write_file"),
            (tf.io.TFRecordWriter, "__init__"),
            (model_saving, "save_and_return_nodes"),
            (model_loading, "load_partial"),
            (gen_summary_ops, "create_summary_file_writer"),
            (TrackableSaver, "restore save"),
            (py_checkpoint_reader, "NewCheckpointReader"),
        )
    ),
    # Variables outside of steps; `tfdist.distributed_variables` says more.
    Patch(
        "always",
        DistributedDelegate,
        "__array__ __complex__ __float__ __index__ __int__",
        "distributed_variables",
        "variables convert to numbers and arrays, as those of one device do",
    ),
    Patch(
        "always",
        DistributedVariable,
        "__bool__ __copy__ __getitem__ __reduce__ _strided_slice_assign batch_scatter_update "
        "count_up_to gather_nd handle scatter_nd_add scatter_nd_max scatter_nd_min scatter_nd_sub "
        "scatter_nd_update sparse_read",
        "distributed_variables",
        "a read sees the variable's value, and a write reaches all copies",
    ),
    Patch("always", AggregatingVariable, "__reduce__", "distributed_variables", "can be pickled"),
    Patch(
        "always",
        MirroredVariable,
        "scatter_max scatter_min scatter_update",
        "distributed_variables",
        "a write reaches all copies",
    ),
    Patch(
        "always",
        SyncOnReadVariable,
        "__init__ _get_cross_replica _update_replica scatter_add scatter_div scatter_max "
        "scatter_min scatter_mul scatter_sub scatter_update",
        "distributed_variables",
        "a sum over replicas keeps the value that a script assigns",
    ),
    Patch(
        "always",
        values_util,
        "get_on_read_restore_ops on_read_assign_add_cross_replica on_read_assign_cross_replica "
        "on_read_assign_sub_cross_replica",
        "distributed_variables",
        "a sum over replicas keeps the value that a script assigns",
    ),
    Patch(
        "always",
        CollectiveAllReduceExtended,
        "_get_variable_creator_initial_value",
        "distributed_variables",
        "a sum begins on each worker without waiting for the others",
    ),
    Patch(
        "always",
        MirroredExtended,
        "_broadcast_to",
        "distributed_variables",
        "a variable that is given is not asked for its truth",
    ),
    Patch(
        "always",
        cross_device_ops,
        "check_destinations",
        "distributed_variables",
        "a variable that is given is not asked for its truth",
    ),
    Patch(
        "always",
        tf.__internal__.distribute.interim,
        "maybe_merge_call",
        "distributed_variables",
        "an optimizer that a script applies updates all copies",
    ),
    Patch(
        "always",
        keras.optimizers.LossScaleOptimizer,
        "_tf_apply",
        "distributed_variables",
        "an optimizer that a script applies updates all copies",
    ),
    Patch(
        "always",
        tf.GradientTape,
        "watched_variables",
        "distributed_variables",
        "a tape returns the variables that it watched, instead of their copies",
    ),
    Patch(
        "always",
        LoadedFunction,
        "_call_flat",
        "distributed_variables",
        "a SavedModel that was loaded in a scope can be called",
    ),
    Patch(
        "always",
        ReplicaThread,
        "start",
        "replacing",
        "the threads of replicas call what the thread that waits for them calls",
    ),
    Patch(
        "always",
        keras.callbacks.SwapEMAWeights,
        "_tf_finalize_ema_values _tf_swap_variables",
        "training.fit.averaging",
        "averages of divided weights replace them as a whole",
    ),
)


_OWNERS: dict[str, list[Any]] = {}
for _patch in PATCHES:
    for _name in _patch.names.split():
        _OWNERS.setdefault(_name, []).append(_patch.owner)


def is_listed(owner: Any, name: str) -> bool:
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
