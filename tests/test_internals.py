"""What is private in Keras and TensorFlow still has the signatures that tfdist relies on."""

import ast
import inspect
import pathlib
import pkgutil
import re
import types

import keras
import pytest
import tensorflow as tf

from tfdist import internals

STEP = ["self", "x", "y", "y_pred", "sample_weight", "training"]
SIGNATURES = [
    (internals.loss_module, "apply_mask", ["sample_weight", "mask", "dtype", "reduction"]),
    (internals.loss_module, "reduce_values", ["values", "sample_weight", "reduction"]),
    (internals.loss_module, "scale_loss_for_distribution", ["value"]),
    (internals.loss_module, "unscale_loss_for_distribution", ["value"]),
    (internals.TensorFlowTrainer, "_aggregate_additional_loss", ["self", "loss"]),
    (internals.TensorFlowTrainer, "train_step", ["self", "data"]),
    (internals.TensorFlowTrainer, "test_step", ["self", "data"]),
    (internals.TensorFlowTrainer, "predict_step", ["self", "data"]),
    (internals.TFOptimizer, "_all_reduce_sum_gradients", ["self", "grads_and_vars"]),
    (
        internals.BaseOptimizer,
        "_backend_apply_gradients",
        ["self", "grads", "trainable_variables"],
    ),
    (internals.BaseOptimizer, "_clip_gradients", ["self", "grads"]),
    (keras.layers.BatchNormalization, "_moments", ["self", "inputs", "mask"]),
    (keras.layers.BatchNormalization, "call", ["self", "inputs", "training", "mask"]),
    (internals.custom_gradient, "_get_dependent_variables", ["input_ops", "output_ops"]),
    (keras.random.SeedGenerator, "next", ["self", "ordered"]),
    (internals.keras_random, "global_seed_generator", []),
    (keras.Model, "_compute_loss", STEP),
    (keras.Model, "compute_loss", STEP),
    (keras.Model, "compute_metrics", STEP[:-1]),
    (keras.Model, "_flatten_layers", ["self", "include_self", "recursive"]),
    (keras.Model, "_flatten_metrics_in_order", ["self", "logs"]),
    (internals, "get_autocast_scope", []),
    (internals, "get_keras_mask", ["x"]),
    (internals, "set_keras_mask", ["x", "mask"]),
    (
        internals.lstm_module,
        "lstm",
        [
            *("inputs", "initial_state_h", "initial_state_c", "mask", "kernel"),
            *("recurrent_kernel", "bias", "activation", "recurrent_activation"),
            *("return_sequences", "go_backwards", "unroll", "time_major"),
        ],
    ),
    (internals.array_slicing, "train_validation_split", ["arrays", "validation_split"]),
    (internals.array_slicing, "convert_to_sliceable", ["arrays", "target_backend"]),
    (internals.data_adapter_utils, "is_scipy_sparse", ["x"]),
    (internals.data_adapter_utils, "scipy_sparse_to_tf_sparse", ["x"]),
    (internals.array_data_adapter, "can_convert_arrays", ["arrays"]),
    (
        internals.data_adapters,
        "get_data_adapter",
        ["x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight"],
    ),
    (internals, "make_class_weight_map_fn", ["class_weight"]),
    (internals, "compute_output_spec", ["fn", "args", "kwargs"]),
    (
        internals.multi_device_iterator_ops,
        "_create_device_dataset",
        ["prototype_ds", "incarnation_id", "prefetch_buffer_size", "experimental_slack"],
    ),
    (internals, "global_seed", []),
    (internals, "is_op_determinism_enabled", []),
    (internals.device_lib, "list_local_devices", ["session_config"]),
    (internals.record, "stop_recording", []),
    (internals.GraphStack, "reset", ["self"]),
    (internals.LoadedFunction, "_call_flat", ["self", "args", "captured_inputs"]),
    (internals.MirroredExtended, "_broadcast_to", ["self", "tensor", "destinations"]),
    (internals.cross_device_ops, "check_destinations", ["destinations"]),
    (internals.merge_call_interim, "maybe_merge_call", ["fn", "strategy", "args", "kwargs"]),
    (internals, "slice_variable", ["var", "slice_spec"]),
    (
        internals.SyncOnReadVariable,
        "_update_replica",
        ["self", "update_fn", "value", "kwargs"],
    ),
    (
        internals.CollectiveAllReduceExtended,
        "_get_variable_creator_initial_value",
        ["self", "replica_id", "device", "primary_var", "kwargs"],
    ),
    (internals.values_util, "on_read_assign_cross_replica", ["var", "value", "read_value"]),
    (internals.values_util, "on_read_assign_add_cross_replica", ["var", "value", "read_value"]),
    (internals.values_util, "on_read_assign_sub_cross_replica", ["var", "value", "read_value"]),
    (internals.values_util, "get_on_read_restore_ops", ["var", "tensor", "aggregation"]),
    (
        keras.optimizers.LossScaleOptimizer,
        "_tf_apply",
        ["self", "grads", "trainable_variables"],
    ),
]


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    SIGNATURES,
    ids=[f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in SIGNATURES],
)
def test_a_function_is_there_with_its_parameters(owner, name, parameters):
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


@pytest.mark.parametrize("owner", internals.PRIVATE_ATTRIBUTES)
def test_private_attributes_are_there(owner):
    """A version without one of them breaks the modules that read it; `git grep` finds them."""
    found = pkgutil.resolve_name(owner)
    modules = [found] if inspect.ismodule(found) else map(inspect.getmodule, found.__mro__[:-1])
    text = "".join(map(inspect.getsource, modules))
    missing = [n for n in internals.PRIVATE_ATTRIBUTES[owner] if not re.search(rf"\b{n}\b", text)]
    assert not missing


def list_public_names():
    """Returns the names of Keras and TensorFlow that the modules of tfdist use, such as tf.data."""
    found = set()
    for path in pathlib.Path(internals.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"(tf|keras)\.", ast.unparse(node)):
                found.add(ast.unparse(node))
    return {name for name in found if re.fullmatch(r"[\w.]+", name)}


def test_public_names_that_are_used_are_there():
    names = list_public_names()
    assert len(names) > 300
    missing = []
    for name in sorted(names):
        owner = {"tf": tf, "keras": keras}[name.partition(".")[0]]
        for part in name.split(".")[1:]:
            if not isinstance(owner, types.ModuleType | type):
                break
            if not hasattr(owner, part):
                missing.append(name)
                break
            owner = getattr(owner, part)
    assert not missing


def test_a_compiled_model_keeps_what_it_was_compiled_with():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    assert model._call_has_training_arg in (True, False)
    assert model._compile_loss._user_loss == "mse"
    assert isinstance(model._compile_metrics, internals.CompileMetrics)
    assert isinstance(model._loss_tracker, keras.metrics.Mean)
    assert model.layers[0]._losses == []
    assert model.layers[0]._seed_generators == []
    assert isinstance(model.optimizer, internals.TFOptimizer)


def test_other_versions_than_the_tested_ones_are_named(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.15.9")
    monkeypatch.setattr(tf, "__version__", "2.21.0")
    assert internals.find_untested() == ""
    monkeypatch.setattr(keras, "__version__", "3.13.2")
    assert internals.find_untested().startswith("Keras 3.13.2: not what ")
    monkeypatch.setattr(keras, "__version__", "3.16.0.dev2026102704")
    assert internals.find_untested().startswith("Keras 3.16.0.dev2026102704: not what ")
    monkeypatch.setattr(tf, "__version__", "2.100.0-rc0")
    assert internals.find_untested().startswith("Keras 3.16.0.dev2026102704 and TensorFlow 2.100")
