"""Runs one program once, in this process.

    python benchmarks/programs/child.py --program=NAME --column=keras --text=FILE --out=FILE
    python -m tfdist.run FLAGS benchmarks/programs/child.py --column=mirrored2 ...

The column `keras` is Keras's own `fit` on one device; `moved1` to `moved3` do the same after they
perturb the weights by their rounding, each in another way. In the other columns, this is the script
that `tfdist.run` runs. Writes the results of training to `OUT.npz`, and how it ended to `OUT.json`.
In a cluster, every worker runs the program in the same directory. The chief writes the files;
another worker does so only if it fails before the chief has written them.
"""

import argparse
import contextlib
import gc
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.programs import catalog, columns, made
from benchmarks.programs.adapters import Program
from benchmarks.programs.record import Recorder
from benchmarks.programs.stubs import install_stubs
from tfdist.cluster import resolve_cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--column", required=True)
    parser.add_argument("--text", required=True, help="the adapted text")
    parser.add_argument("--out", required=True)
    parser.add_argument("--floatx", default="float64")
    parser.add_argument("--key", default="", help="written with the result")
    flags = parser.parse_args()
    program = catalog.PROGRAMS.get(flags.program) or Program(name=flags.program, path="")
    began = time.monotonic()
    out, text = Path(flags.out).absolute(), Path(flags.text).read_text(encoding="utf-8")
    recorder = Recorder()
    end: dict[str, Any] = {"status": "ended", "message": "", "trace": ""}
    cluster = resolve_cluster()
    is_chief = cluster is None or cluster.is_chief
    try:
        run_program(
            program,
            text,
            column=flags.column,
            floatx=flags.floatx,
            recorder=recorder,
            is_chief=is_chief,
        )
    except Exception as error:
        end = _describe(error)
    # The failure of another task comes first: it is the reason why the chief fails, too.
    if (not is_chief and end["status"] == "ended") or (end["status"] != "ended" and out.exists()):
        return
    if end["status"] == "ended" and not any(call["call"] == "fit" for call in recorder.calls):
        end = {"status": "error", "message": "the program never called fit", "trace": ""}
    recorder.save(out.with_suffix(".npz"))
    end |= {"key": flags.key, "calls": recorder.calls, "seconds": time.monotonic() - began}
    end["check_s"] = _find_check_s()
    out.with_suffix(".json").write_text(json.dumps(end, indent=1))


def _find_check_s() -> float:
    """Returns the seconds spent checking that replicas can divide the steps."""
    from tfdist.training.fit.engine import Engine

    return sum(found.check_s for found in gc.get_objects() if type(found) is Engine)


def run_program(
    program: Program,
    text: str,
    *,
    column: str,
    floatx: str,
    recorder: Recorder,
    is_chief: bool = True,
) -> None:
    """Executes a program's text in the working directory, to which it may write.

    Args:
      program: the program, which says what is made for it.
      text: the adapted text.
      column: a name in `columns`.
      floatx: the precision of Keras.
      recorder: collects the results of training.
      is_chief: whether this process makes the files that the program reads.
    """
    _start_tensorflow(floatx)
    install_stubs()
    directory = Path.cwd()
    _replace_downloads(program, directory)
    if program.short_networks:
        _shorten_networks()
    script = directory / "program.py"
    if is_chief:
        script.write_text(text, encoding="utf-8")  # AutoGraph reads it
        if program.files:
            program.files(directory)
    _wait_for_all()  # until the chief has made the files
    mover = (
        _make_mover(program.rounds_to or floatx, columns.MOVED.index(column))
        if column in columns.MOVED
        else None
    )
    _replace_training(program, recorder, routed=column in columns.STRATEGIES, mover=mover)
    sys.path[0] = str(directory)  # as of a script there, which may import what is beside it
    names = {"__name__": "__main__", "__file__": str(script), **program.names}
    exec(compile(text, script, "exec"), names)


def _wait_for_all() -> None:
    import tensorflow as tf

    from tfdist.training.workers.communication import Workers

    Workers(tf.distribute.get_strategy()).wait_for_all()


def _start_tensorflow(floatx: str) -> None:
    import keras
    import tensorflow as tf

    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    in_top_k = keras.src.backend.math.in_top_k

    def in_top_k_of_float32(targets: Any, predictions: Any, k: int) -> Any:
        return in_top_k(targets, tf.cast(predictions, tf.float32), k)

    keras.src.backend.math.in_top_k = in_top_k_of_float32  # TensorFlow accepts only float32


def _replace_downloads(program: Program, directory: Path) -> None:
    import keras
    import tensorflow as tf

    train, test = program.examples
    for name, shape, classes in (
        ("mnist", (28, 28), 10),
        ("fashion_mnist", (28, 28), 10),
        ("cifar10", (32, 32, 3), 10),
        ("cifar100", (32, 32, 3), 100),
    ):
        _replace(f"keras.datasets.{name}.load_data", _make_images_loader(shape, classes, program))
    _replace("keras.datasets.imdb.load_data", _make_imdb_loader(train, test))
    _replace("keras.datasets.boston_housing.load_data", _make_housing_loader(train, test))
    _replace("keras.utils.get_file", lambda *args, **kwargs: _find_file(directory, args, kwargs))
    _replace("keras.utils.plot_model", lambda *_, **__: None)
    _replace("keras.backend.shape", keras.ops.shape)
    # The real function ends the session in which the strategy's scope is open.
    _replace("keras.backend.clear_session", lambda **_: None)
    _replace("keras.utils.clear_session", lambda **_: None)
    os.system = lambda command: 0  # type: ignore[assignment]
    _open_addresses_as_files(directory)
    shuffle = tf.data.Dataset.shuffle

    def shuffle_alike(self: Any, buffer_size: Any, seed: Any = None, **options: Any) -> Any:
        return shuffle(self, buffer_size, seed or 1, **options)

    tf.data.Dataset.shuffle = shuffle_alike
    if isinstance(tfds := program.names.get("tfds"), made.MadeTfds):
        import tensorflow_datasets

        tensorflow_datasets.load = tfds.load


def _shorten_networks() -> None:
    """Shrinks the large networks of `keras.applications` to one or two blocks per stage."""
    from keras.src.applications import densenet, efficientnet, resnet

    def shorten(build: Callable[..., Any], *, narrower: int) -> Callable[..., Any]:
        def build_short(x: Any, *args: Any, **kwargs: Any) -> Any:
            *filters, blocks = args
            filters = [count // narrower for count in filters]
            return build(x, *filters, min(blocks, 2), **kwargs)

        return build_short

    for name in ("stack_residual_blocks_v1", "stack_residual_blocks_v2"):
        setattr(resnet, name, shorten(getattr(resnet, name), narrower=4))
    densenet.dense_block = shorten(densenet.dense_block, narrower=1)
    for block in efficientnet.DEFAULT_BLOCKS_ARGS:
        block["repeats"] = 1


def _replace(path: str, value: Any) -> None:
    """Replaces an object of Keras, in both `keras` and `tf.keras`."""
    import keras
    import tensorflow as tf

    _, *parts, last = path.split(".")
    for owner in (keras, tf.keras):
        with contextlib.suppress(AttributeError):
            for part in parts:
                owner = getattr(owner, part)
            setattr(owner, last, value)


def _make_images_loader(shape: tuple, classes: int, program: Program) -> Callable[..., Any]:
    def load_data(*_: Any, **__: Any) -> Any:
        train, test = program.examples
        images, labels = made.make_images(train + test, shape, min(classes, 10), seed=0)
        if len(shape) == 3:
            labels = labels[:, None]
        return (images[:train], labels[:train]), (images[train:], labels[train:])

    return load_data


def _make_imdb_loader(train: int, test: int) -> Callable[..., Any]:
    def load_data(*_: Any, num_words: int = 1000, **__: Any) -> Any:
        import numpy as np

        rng = np.random.default_rng(0)
        x = np.empty(train + test, dtype=object)
        y = rng.integers(0, 2, train + test)
        for index, label in enumerate(y):
            x[index] = list(rng.integers(1 + 3 * label, num_words, rng.integers(10, 120)).tolist())
        return (x[:train], y[:train]), (x[train:], y[train:])

    return load_data


def _make_housing_loader(train: int, test: int) -> Callable[..., Any]:
    def load_data(*_: Any, **__: Any) -> Any:
        import numpy as np

        rng = np.random.default_rng(0)
        x = rng.normal(size=(train + test, 13))
        y = x @ rng.normal(size=13) + 20
        return (x[:train], y[:train]), (x[train:], y[train:])

    return load_data


def _find_file(directory: Path, args: tuple, kwargs: dict) -> str:
    name = kwargs.get("fname") or (args[0] if args else None) or kwargs["origin"]
    return str(directory / str(name).rpartition("/")[2])


def _open_addresses_as_files(directory: Path) -> None:
    """Reads tables from the file of the same name if their URL is given."""
    import numpy as np

    def localize(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_file(source: Any, *args: Any, **kwargs: Any) -> Any:
            if str(source).startswith(("http://", "https://")):
                source = directory / str(source).rpartition("/")[2]
            return read(source, *args, **kwargs)

        return read_file

    np.loadtxt = localize(np.loadtxt)
    with contextlib.suppress(ImportError):
        import pandas

        pandas.read_csv = localize(pandas.read_csv)
        pandas.DataFrame.plot = lambda *_, **__: None


def _make_mover(dtype: str, seed: int) -> Any:
    """Returns a callback that once perturbs every weight by its rounding, up or down."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.training.guard.guard import move_weights

    class Mover(keras.callbacks.Callback):
        is_done = False

        def on_train_begin(self, logs: Any = None) -> None:
            self._move()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._move()

        def _move(self) -> None:
            if self.is_done or not self.model.trainable_variables:
                return
            self.is_done = True
            share = float(np.finfo(dtype).eps)
            move_weights(self.model, tf.distribute.get_strategy(), share, seed)

    return Mover()


def _replace_training(
    program: Program, recorder: Recorder, *, routed: bool, mover: Any = None
) -> None:
    """Wraps Keras's methods, to shorten them and to record their results.

    Args:
      program: the program that runs.
      recorder: collects the results of training.
      routed: whether the methods are those of a trainer.
      mover: a callback for every `fit`.
    """
    import keras
    import tensorflow as tf

    model_class = keras.Model
    own = {name: getattr(model_class, name) for name in ("fit", "evaluate", "predict")}
    depth = 0

    def call(name: str, model: Any, bound: dict[str, Any]) -> Any:
        nonlocal depth
        depth += 1
        try:
            return own[name](model, **bound)
        finally:
            depth -= 1

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _bind(own["fit"], self, args, kwargs) | {"verbose": 0}
        bound["epochs"] = min(bound.get("epochs", 1), program.epochs)
        if not isinstance(bound.get("x"), tf.data.Dataset):
            bound["shuffle"] = False
        if mover is not None:
            callbacks = bound.get("callbacks") or []
            many = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            bound["callbacks"] = [mover, *many]
        history = call("fit", self, bound)
        recorder.add_fit(self, history.history)
        return history

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if depth and not routed:  # called by Keras's fit, with its own arguments
            return own["evaluate"](self, *args, **kwargs)
        results = call(
            "evaluate", self, _bind(own["evaluate"], self, args, kwargs) | {"verbose": 0}
        )
        if not depth:
            recorder.add_evaluate(results)
        return results

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call("predict", self, _bind(own["predict"], self, args, kwargs) | {"verbose": 0})
        if not depth:
            recorder.add_predict(outputs)
        return outputs

    model_class.fit, model_class.evaluate, model_class.predict = fit, evaluate, predict


def _bind(method: Callable[..., Any], model: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Returns all arguments by name."""
    parameters = [name for name in inspect.signature(method).parameters if name != "self"]
    return dict(zip(parameters, args, strict=False)) | kwargs


def _describe(error: Exception) -> dict[str, str]:
    from tfdist.errors import TfdistError

    parts: list[BaseException] = [error]
    while (cause := parts[-1].__cause__ or parts[-1].__context__) is not None:
        parts.append(cause)
    refusals = [part for part in parts if isinstance(part, TfdistError)]
    chosen = refusals[0] if refusals else error
    lines = [line for line in str(chosen).splitlines() if line.strip()] or [""]
    name = "" if refusals else f"{type(chosen).__name__}: "
    return {
        "status": "refused" if refusals else "error",
        "message": name + _plain(" ".join(lines[:2]))[:300],
        "trace": "".join(traceback.format_exception(error))[-6000:],
    }


def _plain(text: str) -> str:
    """Returns a text without terminal codes and paths."""
    text = re.sub("\x1b\\[[0-9]*m", "", text)
    return re.sub(r"/\S*/", "", text)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    if "tfdist.run.routing" not in sys.modules:
        os._exit(0)  # do not wait for threads
