"""A frozen encoder keeps its weights and statistics, under every strategy and when continued."""

import json

import keras
import numpy as np
import pytest

import tfdist
from tests import zoo
from tfdist.cli.command import run_command
from tfdist.errors import TfdistError
from tfdist.models import make_model
from tfdist.models.stages import freeze_encoder
from tfdist.runs.options import TrainOptions
from tfdist.tasks.segmentation.task import Segmentation
from tfdist.train import run_training

RNG = np.random.default_rng(0)
X = RNG.uniform(0, 255, (12, 16, 16, 3)).astype("float32")
Y = RNG.integers(0, 3, (12, 16, 16))


def build():
    model = make_model("unet", image_size=(16, 16), num_classes=3, base_filters=4, depth=2)
    freeze_encoder(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    return model


def train_with_keras():
    model = build()
    model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    return model


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", zoo.REPLICAS_FIRST)
def test_every_strategy_trains_only_the_decoder(name):
    start, expected = build(), train_with_keras()
    trainer = tfdist.Trainer(build, strategy=zoo.STRATEGIES[name]())
    trainer.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    for weight, before, after in zip(
        trainer.model.weights, start.weights, expected.weights, strict=True
    ):
        if weight.path.startswith("encoder_"):
            np.testing.assert_array_equal(weight.numpy(), before.numpy(), err_msg=weight.path)
        else:
            np.testing.assert_allclose(
                weight.numpy(), after.numpy(), atol=2e-4, err_msg=weight.path
            )
    decoder = len(trainer.model.trainable_variables)
    assert len(trainer.model.optimizer.variables) == 2 + 2 * decoder


def train(path, *flags):
    common = [
        "--strategy=one_device",
        "--image_size=16,16",
        "--train_examples=16",
        "--val_examples=4",
        "--base_filters=4",
        "--depth=2",
        "--global_batch_size=4",
        "--schedule=constant",
        "--warmup_steps=0",
        "--notensorboard",
        "--deterministic",
        "--quiet",
    ]
    flags = [*common, *flags, f"--run_dir={path}"]
    assert run_command("tfdist.train", run_training, flags, options_class=TrainOptions) == 0
    return json.loads((path / "summary.json").read_text())["weights_sha256"]


@pytest.mark.thorough
@pytest.mark.thorough
def test_a_continued_run_equals_one_in_one_piece_and_the_second_phase_begins_with_it(
    path_with_spaces,
):
    whole = train(path_with_spaces / "whole", "--freeze_encoder", "--max_steps=6")
    parts = path_with_spaces / "parts"
    train(parts, "--freeze_encoder", "--max_steps=3")
    assert train(parts, "--freeze_encoder", "--max_steps=6") == whole
    second = path_with_spaces / "second"
    train(second, f"--init_from={parts}", "--max_steps=1", "--learning_rate=1e-9")
    first, then = (
        keras.saving.load_model(p / "model.keras", compile=False) for p in (parts, second)
    )
    assert len(then.trainable_variables) > len(first.trainable_variables)
    kernels = [[w for w in model.weights if w.path.endswith("kernel")] for model in (first, then)]
    for one, other in zip(*kernels, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)


def test_a_model_without_an_encoder_is_refused():
    task = Segmentation(model="tests.models.test_freezing:build_plain", freeze_encoder=True)
    with pytest.raises(TfdistError, match=r"^Cannot freeze the encoder of 'plain': no layer has"):
        task.build_model({"class_names": ["a", "b"], "ignore_label": None}, seed=0)


def build_plain(image_size, num_classes):
    image = keras.Input((*image_size, 3))
    return keras.Model(image, keras.layers.Conv2D(num_classes, 1)(image), name="plain")
