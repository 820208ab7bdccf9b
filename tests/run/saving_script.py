"""A script for `tfdist.run --workers=2` that writes in every way, and reads what it wrote.

`saving_script.py all DIRECTORY`; with `chief` instead of `all`, the chief saves alone.
"""

import csv
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile

import h5py
import keras
import numpy as np
import tensorflow as tf

mode, out = sys.argv[1:3] if __name__ == "__main__" else ("", "")
worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
x = np.ones((32, 40), "float32")
saves = keras.saving.save_model


class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if mode == "all" or worker == 0:
            saves(self.model, f"{out}/epoch{epoch}.keras")
            self.model.save_weights(f"{out}/epoch{epoch}.weights.h5")


def make_model():
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(1)])
    model.compile("adam", keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


def save_models(model):
    for _ in range(3):
        saves(model, f"{out}/function.keras")
    model.save(f"{out}/method.keras")
    keras.models.save_model(model, f"{out}/function.h5")
    model.save_weights(f"{out}/model.weights.h5")
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, input_signature=[tf.TensorSpec([None, 40])])
    archive.write_out(f"{out}/archive")
    model.export(f"{out}/export", verbose=False)
    for name in ("function.keras", "method.keras", "function.h5"):
        loaded = keras.saving.load_model(f"{out}/{name}")
        loaded.load_weights(f"{out}/model.weights.h5")
        for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def save_checkpoints(model):
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.write(f"{out}/checkpoint/one")
    manager = tf.train.CheckpointManager(checkpoint, f"{out}/manager", max_to_keep=2)
    for _ in range(3):
        assert manager.save().startswith(out)
    checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    checkpoint.read(path)
    assert len(tf.train.list_variables(tf.train.latest_checkpoint(f"{out}/manager"))) > 4


def write_files():
    np.save(f"{out}/array.npy", x)
    assert np.load(f"{out}/array.npy").shape == x.shape
    with open(f"{out}/text.txt", "w") as file:
        file.write(f"worker {worker}")
    with open(f"{out}/text.txt", "a") as file:
        file.write(", twice")
    assert pathlib.Path(out, "text.txt").read_text() == f"worker {worker}, twice"
    with open(f"{out}/table.csv", "w", newline="") as file:
        csv.writer(file).writerow([worker])
    with h5py.File(f"{out}/array.h5", "w") as file:
        file["x"] = x
    with h5py.File(f"{out}/array.h5") as file:
        assert file["x"].shape == x.shape
    with tf.io.TFRecordWriter(f"{out}/records") as file:
        file.write(b"record")
    writer = tf.summary.create_file_writer(f"{out}/summaries")
    with writer.as_default():
        tf.summary.scalar("number", 1, step=1)
    with zipfile.ZipFile(f"{out}/archive.zip", "w") as file:
        file.writestr("name", f"worker {worker}")


def move_files():
    tf.io.gfile.makedirs(f"{out}/deep/er")
    with tf.io.gfile.GFile(f"{out}/deep/er/file", "w") as file:
        file.write(f"worker {worker}")
    assert tf.io.gfile.exists(f"{out}/deep/er/file")
    assert tf.io.gfile.listdir(f"{out}/deep/er") == ["file"]
    assert tf.io.gfile.glob(f"{out}/deep/*/file") == [f"{out}/deep/er/file"]
    shutil.copytree(f"{out}/deep", f"{out}/copied")
    shutil.rmtree(f"{out}/copied")
    os.mkdir(f"{out}/made")
    assert os.listdir(f"{out}/made") == []
    os.rmdir(f"{out}/made")
    shutil.move(f"{out}/table.csv", f"{out}/moved.csv")
    os.replace(f"{out}/records", f"{out}/replaced")
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "file").write_text("text")
        assert os.listdir(directory) == ["file"]


def main():
    keras.utils.set_random_seed(1)
    os.makedirs(out, exist_ok=True)
    model = make_model()
    writing = [
        keras.callbacks.CSVLogger(f"{out}/log.csv"),
        keras.callbacks.TensorBoard(f"{out}/board"),
        keras.callbacks.ModelCheckpoint(f"{out}/best.keras"),
    ]
    callbacks = [Save(), *(writing if mode == "all" else ())]
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    if mode == "all" or worker == 0:
        save_models(model)
        save_checkpoints(model)
    if mode == "all":
        write_files()
        move_files()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
