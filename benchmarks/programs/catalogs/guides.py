"""The guides in Keras's documentation that train."""

from benchmarks.programs.adapters import GUIDES_COMMIT, Program
from benchmarks.programs.made import MadeTfds

_SIZES = {"60000": "100", "10000, 784": "44, 784", "-10000": "-20"}
_BUILT_IN = "guides/training_with_built_in_methods.py"
_NO_TORCH = {
    "ExampleTorchDataset(torch": "",
    "_torch_dataset = ": "",
    "train_dataloader": "",
    "val_dataloader": "",
}


def _train_with_built_in_methods(name: str, *, start: str, stop: str) -> Program:
    """Returns a part of the guide: what all parts need, then the text from `start` to `stop`."""
    return Program(
        name=f"training_with_built_in_methods, {name}",
        path=_BUILT_IN,
        commit=GUIDES_COMMIT,
        replace=_SIZES,
        instead=_NO_TORCH,
        leave_out=_leave_out_until(start),
        stop_before=stop,
    )


def _leave_out_until(start: str) -> dict[str, str]:
    if not start:
        return {}
    first = {'print("Fit model on training data")': "def get_uncompiled_model"}
    begin = "def custom_mean_squared_error"
    return first if start == begin else first | {begin: start}


PROGRAMS = (
    Program(
        name="custom_train_step_in_tensorflow",
        path="guides/custom_train_step_in_tensorflow.py",
        commit=GUIDES_COMMIT,
        floatx="float32",
    ),
    Program(
        name="functional_api",
        path="guides/functional_api.py",
        commit=GUIDES_COMMIT,
        replace={
            "60000": "100",
            "(10000, 784)": "(44, 784)",
            "1280": "70",
            "num_words = 10000": "num_words = 100",
        },
        # The network has downloaded weights and is not trained.
        instead={"vgg19": "", "extracted_features = ": ""},
    ),
    Program(
        name="making_new_layers_and_models_via_subclassing",
        path="guides/making_new_layers_and_models_via_subclassing.py",
        commit=GUIDES_COMMIT,
        replace={"60000": "100"},
    ),
    Program(
        name="transfer_learning",
        path="guides/transfer_learning.py",
        commit=GUIDES_COMMIT,
        replace={
            'weights="imagenet"': "weights=None",
            "150": "71",
            "batch_size = 64": "batch_size = 8",
        },
        names={"tfds": MadeTfds((80, 80, 3), 2, [18, 10])},
        floatx="float32",
        epochs=1,
    ),
    Program(
        name="writing_your_own_callbacks",
        path="guides/writing_your_own_callbacks.py",
        commit=GUIDES_COMMIT,
        epochs=5,
    ),
    _train_with_built_in_methods("first", start="", stop="def get_uncompiled_model"),
    _train_with_built_in_methods(
        "losses and metrics",
        start="def custom_mean_squared_error",
        stop="class ActivityRegularizationLayer",
    ),
    _train_with_built_in_methods(
        "add_loss", start="class ActivityRegularizationLayer", stop="validation_split=0.2"
    ),
    _train_with_built_in_methods(
        "data sets", start="validation_split=0.2", stop="class ExamplePyDataset"
    ),
    _train_with_built_in_methods(
        "PyDataset", start="class ExamplePyDataset", stop="class_weight = {"
    ),
    _train_with_built_in_methods("weights", start="class_weight = {", stop="image_input = "),
    _train_with_built_in_methods(
        "inputs and outputs", start="image_input = ", stop="keras.callbacks.EarlyStopping("
    ),
    _train_with_built_in_methods(
        "callbacks", start="keras.callbacks.EarlyStopping(", stop="if not os.path.exists"
    ),
)
