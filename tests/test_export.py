"""A servable answers as the trainer does, in a process that has TensorFlow and nothing else."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorflow.core.framework import tensor_pb2

import tfdist
from tfdist.cli.command import run_command
from tfdist.tasks.commands import ExportOptions
from tfdist.tasks.segmentation.folder import resize_image
from tfdist.tasks.segmentation.inference.commands import EXPORT
from tfdist.tasks.segmentation.masks import decode_mask

SERVE = """
import sys

sys.modules.update(dict.fromkeys(["keras", "tf_keras", "tfdist", "models"]))  # cannot be imported
import numpy as np
import tensorflow as tf

path, answers, *images = sys.argv[1:]
data = [open(image, "rb").read() for image in images]
servable = tf.saved_model.load(path)
answer = servable.signatures["serving_default"](image_bytes=tf.constant(data))
images = tf.stack([tf.io.decode_png(data[1])])
tensors = servable.signatures["tensors"](images=tf.cast(images, tf.float32))
names = open(servable.class_names.asset_path.numpy()).read().split()
np.savez(
    answers,
    names=names,
    **{key: value.numpy() for key, value in answer.items()},
    **{f"tensors_{key}": value.numpy() for key, value in tensors.items()},
)
"""


def export(*flags):
    return run_command("tfdist.export", EXPORT.run, flags, options_class=ExportOptions)


@pytest.fixture(scope="module")
def servable(run_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("a servable")
    assert export(f"--run_dir={run_dir}", f"--output={path}", "--quiet") == 0
    return path


def test_answers_as_the_trainer_does_without_keras(run_dir, servable, tmp_path):
    images = [
        np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)
        for i, size in enumerate([(16, 16), (50, 33)])
    ]
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(tf.io.encode_png(image).numpy())
    answers = tmp_path / "answers.npz"
    code = [sys.executable, "-c", SERVE, f"{servable}/1", str(answers), *map(str, paths)]
    subprocess.run(code, check=True, timeout=1000)
    found = np.load(answers, allow_pickle=True)

    run = tfdist.load_run(run_dir)
    run.model.compile("sgd", "mse")
    trainer = tfdist.Trainer(lambda: run.model)
    predictor = tfdist.Predictor(run.model, window=(16, 16), zoom=None)
    for index, image in enumerate(images):
        mask = decode_mask(found["mask_png"][index])
        expected = predictor.predict_mask(image)
        assert mask.shape == image.shape[:2]
        assert (mask == expected).mean() > 0.999  # where two classes are equally probable
    assert (found["tensors_original_mask"][0] == mask).all()
    batch = np.stack([resize_image(image, (16, 16)) for image in images]).astype(np.float32)
    logits = trainer.predict(batch)
    np.testing.assert_allclose(found["probabilities"], tf.nn.softmax(logits), atol=1e-5)
    assert (found["mask"] == logits.argmax(-1)).all()
    np.testing.assert_allclose(found["tensors_probabilities"], tf.nn.softmax(logits[1:]), atol=1e-5)
    assert tuple(found["names"]) == run.class_names


def test_each_export_is_the_next_version(run_dir, servable, capfd):
    (servable / "9").mkdir()
    assert export(f"--run_dir={run_dir}", f"--output={servable}") == 0
    assert capfd.readouterr().out.startswith(f"{servable}/10: signatures serving_default")
    assert sorted(path.name for path in servable.iterdir()) == ["1", "10", "9"]


def test_warm_up_requests_are_what_the_server_reads(servable):
    """Read with the messages of tensorflow_serving/apis, as far as the requests fill them."""
    path = f"{servable}/1/assets.extra/tf_serving_warmup_requests"
    records = [record.numpy() for record in tf.data.TFRecordDataset(path)]
    requests = [_make_prediction_log().FromString(r).predict_log.request for r in records]
    signatures = tf.saved_model.load(f"{servable}/1").signatures
    for request in requests:
        inputs = {name: tf.make_ndarray(_to_tensor(t)) for name, t in request.inputs.items()}
        answer = signatures[request.model_spec.signature_name](
            **{name: tf.constant(value) for name, value in inputs.items()}
        )
        assert answer["mask"].shape == (1, 16, 16)
    assert [r.model_spec.signature_name for r in requests] == ["serving_default", "tensors"]


def test_an_export_of_nothing_costs_one_line(run_dir, tmp_path, capfd):
    assert export("--run_dir=/nowhere", f"--output={tmp_path}/a") == 2
    assert "it has no options.json" in capfd.readouterr().err
    assert export(f"--run_dir={run_dir}") == 2
    assert "Cannot export without --output" in capfd.readouterr().err
    for name in ("e[1]", "e\\1"):  # TensorFlow could not load it
        assert export(f"--run_dir={run_dir}", f"--output={tmp_path}/{name}") == 2
        assert f"--output={tmp_path}/{name}: TensorFlow cannot load" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    assert export(f"--run_dir={run_dir}", "--output=/proc/a") == 1
    assert "Cannot write to --output=/proc/a" in capfd.readouterr().err


def _make_prediction_log():
    """Returns the class of tensorflow.serving.PredictionLog, cut down to what is asked for."""
    message, string = "TYPE_MESSAGE", "TYPE_STRING"
    messages = {
        "ModelSpec": [("name", 1, string, ""), ("signature_name", 3, string, "")],
        "PredictRequest": [
            ("model_spec", 1, message, "ModelSpec"),
            ("inputs", 2, message, "PredictRequest.InputsEntry"),
        ],
        "PredictLog": [("request", 1, message, "PredictRequest")],
        "PredictionLog": [("predict_log", 6, message, "PredictLog")],
    }
    file = descriptor_pb2.FileDescriptorProto(name="log.proto", package="s", syntax="proto3")
    for name, fields in messages.items():
        _add_message(file.message_type, name, fields)
    inputs = file.message_type[1]
    entry = [("key", 1, string, ""), ("value", 2, "TYPE_BYTES", "")]
    _add_message(inputs.nested_type, "InputsEntry", entry).options.map_entry = True
    inputs.field[1].label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("s.PredictionLog"))


def _add_message(where, name, fields):
    added = where.add(name=name)
    for field, number, kind, type_name in fields:
        entry = added.field.add(name=field, number=number, type=kind, label="LABEL_OPTIONAL")
        if type_name:
            entry.type_name = f".s.{type_name}"
    return added


def _to_tensor(data):
    # A message and bytes look the same on the wire.
    return tensor_pb2.TensorProto.FromString(data)
