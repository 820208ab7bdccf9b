"""Data that Python reads: their hooks and their batches are those that Keras sees."""

import itertools
import warnings

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tests.training.programs import X, Y, dense
from tfdist.training.step.model_variables import hash_weights


class Pages(keras.utils.PyDataset):
    """Batches whose order changes after each epoch, and which notes the calls of its hooks."""

    def __init__(self, name, log, num_batches=4, *, changes=True, **options):
        super().__init__(**options)
        self._name, self._log, self._num_batches = name, log, num_batches
        self._changes = changes
        self._order = list(range(num_batches or 4))

    @property
    def num_batches(self):
        return self._num_batches

    def __getitem__(self, index):
        row = self._order[index % len(self._order)] * 8
        return X[row : row + 8], Y[row : row + 8]

    def on_epoch_begin(self):
        self._log.append(f"{self._name} begins")

    def on_epoch_end(self):
        self._log.append(f"{self._name} ends")
        if self._changes:
            self._order = [*self._order[1::-1], *self._order[:1:-1]]


class Note(keras.callbacks.Callback):
    def __init__(self, log, stop_at=None):
        super().__init__()
        for event in ("train", "epoch", "test", "predict"):
            for end in ("begin", "end"):
                name = f"on_{event}_{end}"
                setattr(self, name, lambda *_, logs=None, name=name: log.append(name))
        for event in ("train", "test", "predict"):
            name = f"on_{event}_batch_end"
            setattr(self, name, lambda *_, logs=None, name=name: log.append(name))
        if stop_at is not None:
            self.on_train_batch_end = lambda batch, logs=None: setattr(
                self.model, "stop_training", batch == stop_at
            )


OPTIONS = {"threads": {"workers": 2}, "no threads": {}}
CALLS = {
    "fit": lambda model, training, validation, **options: (
        model.fit(training, validation_data=validation, epochs=3, shuffle=False, **options).history
    ),
    "fit with steps": lambda model, training, validation, **options: (
        model.fit(
            training,
            validation_data=validation,
            epochs=3,
            steps_per_epoch=2,
            validation_steps=2,
            shuffle=False,
            **options,
        ).epoch
    ),
    "evaluate": lambda model, training, validation, **options: model.evaluate(
        validation, **options
    ),
    "evaluate some": lambda model, training, validation, **options: model.evaluate(
        validation, steps=2, **options
    ),
    "predict": lambda model, training, validation, **options: model.predict(validation, **options),
}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(
    ("name", "workers", "strategy_name"),
    [
        (name, *way)
        for name, way in zoo.take_turns(
            CALLS, itertools.product(OPTIONS, ["mirrored-2", "one_device"])
        )
    ],
)
def test_hooks_are_called_when_keras_calls_them(name, workers, strategy_name):
    logs, results = [], []
    for model in (
        zoo.trace_once(dense()),
        tfdist.Trainer(dense, strategy=zoo.STRATEGIES[strategy_name]()),
    ):
        log = []
        training = Pages("training", log, **OPTIONS[workers])
        validation = Pages("validation", log, 3, **OPTIONS[workers])
        options = {"callbacks": [Note(log)], "verbose": 0}
        results.append(CALLS[name](model, training, validation, **options))
        logs.append(log)
    assert logs[1] == logs[0]
    keras.tree.map_structure(
        lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6),
        results[1],
        results[0],
    )


def test_a_fit_that_a_callback_ends_leaves_the_epoch_open():
    logs = []
    for model in (dense(), tfdist.Trainer(dense)):
        log = []
        model.fit(Pages("training", log), epochs=2, callbacks=[Note(log, stop_at=1)], verbose=0)
        logs.append(log)
    assert logs[1] == logs[0]


def test_processes_read_the_batches():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python: a process with threads forks
        data = [Pages("training", [], workers=1, use_multiprocessing=True) for _ in range(2)]
        options = {"epochs": 2, "verbose": 0, "shuffle": False}
        trainer = tfdist.Trainer(dense)
        history = trainer.fit(data[0], validation_data=data[1], **options).history
    expected = dense().fit(Pages("training", []), validation_data=Pages("", []), **options)
    assert history == expected.history


class Numbers(keras.utils.PyDataset):
    """Batches of their own index, which notes what is read."""

    num_batches = 6

    def __init__(self, read, **options):
        super().__init__(**options)
        self._read = read

    def __getitem__(self, index):
        self._read.append(index)
        return X[:8] * 0 + index, Y[:8]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("workers", OPTIONS)
def test_batches_are_shuffled_by_the_seed(workers):
    def read(seed, shuffle=True):
        read, seen = [], []

        class Note(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(logs["loss"])

        trainer = tfdist.Trainer(dense, seed=seed)
        data = Numbers(read, **OPTIONS[workers])
        trainer.fit(
            data, epochs=3, shuffle=shuffle, validation_data=Numbers([]), callbacks=[Note()],
            verbose=0,
        )  # fmt: skip
        return read, seen

    order, losses = read(1)
    if workers == "no threads":
        epochs = [order[-18:-12], order[-12:-6], order[-6:]]  # Keras reads one before
        assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in [range(6), *epochs]}) == 4
    assert read(1)[1] == losses
    assert read(2)[1] != losses
    assert read(1, shuffle=False)[1] == read(2, shuffle=False)[1] != losses


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("workers", OPTIONS)
def test_pages_without_an_end_have_steps(workers):
    history = tfdist.Trainer(dense).fit(
        Pages("training", [], None, **OPTIONS[workers]), steps_per_epoch=3, epochs=3, verbose=0
    )
    assert len(history.history["loss"]) == 3


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("stop_after", "options"), zoo.take_turns([4, 3, 6], [{}, {"steps_per_epoch": 2}])
)
def test_a_run_on_pages_continues(tmp_path, stop_after, options):
    def fit(directory, stop=None):
        trainer = tfdist.Trainer(dense, checkpoint_dir=str(tmp_path / directory))
        stopping = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: trainer.step == stop and trainer.request_stop()
        )
        # Batches are read ahead, so an order that changes within a pass is one of chance.
        pages = Pages("training", [], changes=not options)
        trainer.fit(pages, epochs=4, callbacks=[stopping], verbose=0, **options)
        return trainer

    whole = fit("whole")
    assert fit("parts", stop_after).step == stop_after
    parts = fit("parts")
    assert parts.progress.resumed_from_step == stop_after
    assert hash_weights(parts.model) == hash_weights(whole.model)
    assert parts.history.history == whole.history.history
