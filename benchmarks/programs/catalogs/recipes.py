"""Keras's demonstrations, recipes and integration tests: small programs of one pattern each."""

from benchmarks.programs.adapters import GUIDES_COMMIT, Program

_RECIPES = "examples/keras_io/tensorflow/keras_recipes"
_FEW = {"50000": "100"}

PROGRAMS = (
    Program(
        name="demo_custom_layer_backend_agnostic",
        path="examples/demo_custom_layer_backend_agnostic.py",
        replace=_FEW,
    ),
    Program(
        name="demo_functional",
        path="examples/demo_functional.py",
        replace=_FEW | {"512": "64"},
    ),
    Program(
        name="demo_mnist_convnet",
        path="examples/demo_mnist_convnet.py",
        constants={"batch_size": 32},
    ),
    Program(name="demo_subclass", path="examples/demo_subclass.py", replace=_FEW),
    Program(
        name="tf_custom_fit_test",
        path="integration_tests/tf_custom_fit_test.py",
        commit=GUIDES_COMMIT,
    ),
    Program(
        name="antirectifier", path=f"{_RECIPES}/antirectifier.py", constants={"batch_size": 32}
    ),
    Program(
        name="endpoint_layer_pattern",
        path=f"{_RECIPES}/endpoint_layer_pattern.py",
        replace={"1000": "70"},
    ),
    Program(
        name="subclassing_conv_layers",
        path=f"{_RECIPES}/subclassing_conv_layers.py",
        # TensorFlow requires capitals.
        replace={'padding="valid"': 'padding="VALID"'},
        constants={"batch_size": 32},
    ),
    Program(
        name="tensorflow_numpy_models",
        path=f"{_RECIPES}/tensorflow_numpy_models.py",
        # The rest repeats the same models with a strategy of its own.
        stop_before="gpus = tf.config",
    ),
    Program(name="trainer_pattern", path=f"{_RECIPES}/trainer_pattern.py"),
)
