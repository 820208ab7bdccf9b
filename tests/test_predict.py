"""The commands that use a finished run on images: `tfdist.predict` and `tfdist.evaluate`."""

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.cli.command import run_command
from tfdist.tasks.segmentation.inference.commands import run_evaluation, run_prediction
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.tasks.segmentation.masks import decode_mask


def predict(*flags):
    return run_command("tfdist.predict", run_prediction, flags, options_class=PredictOptions)


def evaluate(*flags):
    return run_command("tfdist.evaluate", run_evaluation, flags, options_class=EvaluateOptions)


@pytest.fixture
def flags(run_dir, labelled_images, path_with_spaces):
    return [
        f"--run_dir={run_dir}",
        f"--images={labelled_images}/val/images",
        f"--output={path_with_spaces}/predicted",
        "--quiet",
    ]


def test_leaves_masks_overlays_and_statistics(
    flags, run_dir, labelled_images, path_with_spaces, capfd
):
    assert predict(*flags[:-1]) == 0
    out, err = capfd.readouterr()
    assert "3 of 3 images are in" in out.splitlines()[-1]
    assert not err
    output = path_with_spaces / "predicted"
    image = tf.io.decode_png((labelled_images / "val" / "images" / "a.png").read_bytes()).numpy()
    run = tfdist.load_run(run_dir)
    mask = tfdist.Predictor(run.model, window=run.image_size).predict_mask(image)
    data = (output / "masks" / "a.png").read_bytes()
    assert (decode_mask(data) == mask).all()
    assert data[25] == 3  # indexed
    overlay = tf.io.decode_png((output / "overlays" / "a.png").read_bytes()).numpy()
    colored = tf.io.decode_png(data, channels=3).numpy()
    assert len(overlay) > 40, "a legend"
    np.testing.assert_allclose(overlay[:40, :28], (image / 2 + colored / 2), atol=1)
    rows = list(csv.DictReader((output / "classes.csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == ["a", "b", "c", "(all)"]
    assert int(rows[0]["pixels"]) == mask.size
    assert float(rows[0]["circle"]) == pytest.approx((mask == 1).mean(), abs=1e-6)
    assert int(rows[-1]["pixels"]) == 40 * 28 + 16 * 16 + 9 * 21


def test_scores_as_evaluate_does(flags, run_dir, labelled_images, path_with_spaces, capfd):
    masks = labelled_images / "val" / "masks"
    assert predict(*flags, f"--masks={masks}", "--tta") == 0
    path = path_with_spaces / "metrics.json"
    own = [f"--run_dir={run_dir}", "--dataset=folder", f"--data_dir={labelled_images}"]
    assert evaluate(*own, "--full_size", "--tta", f"--output={path}") == 0
    predicted = json.loads((path_with_spaces / "predicted" / "metrics.json").read_text())
    evaluated = json.loads(path.read_text())
    assert evaluated.pop("options")["windows"]["tta"] is True
    assert predicted == evaluated
    assert np.sum(predicted["confusion"]) == 40 * 28 + 16 * 16 + 9 * 21
    truth = np.concatenate([decode_mask(p.read_bytes()).ravel() for p in masks.iterdir()])
    assert (np.sum(predicted["confusion"], 1) == np.bincount(truth, minlength=4)).all()
    table = path_with_spaces / "predicted" / "metrics.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["image"] for row in rows] == ["a", "b", "c"]
    assert f"{predicted['mean_iou']:.4f}" in capfd.readouterr().out


def test_label_maps_are_applied_to_the_truth(flags, run_dir, labelled_images, path_with_spaces):
    data = path_with_spaces / "data"
    shutil.copytree(labelled_images, data)
    for path in (data / "val" / "masks").iterdir():
        stored = 255 - decode_mask(path.read_bytes())
        path.write_bytes(tf.io.encode_png(stored[..., None]).numpy())
    label_map = "--label_map=255:0,254:1,253:2,252:3"
    found = []
    for directory, more in ((labelled_images, []), (data, [label_map])):
        output = path_with_spaces / f"predicted{len(found)}"
        truth = [f"--masks={directory}/val/masks", f"--output={output}"]
        assert predict(*flags, *truth, *more) == 0
        found.append(json.loads((output / "metrics.json").read_text()))
        own = [f"--run_dir={run_dir}", "--dataset=folder", f"--data_dir={directory}", "--quiet"]
        assert evaluate(*own, "--full_size", f"--output={output}/evaluation.json", *more) == 0
        evaluated = json.loads((output / "evaluation.json").read_text())
        found[-1]["evaluated"] = evaluated["confusion"]
    assert found[0] == found[1]


def test_evaluates_the_runs_own_data_as_the_training_did(run_dir):
    assert evaluate(f"--run_dir={run_dir}", "--quiet") == 0
    run = pathlib.Path(run_dir)
    summary = json.loads((run / "summary.json").read_text())
    found = json.loads((run / "evaluation" / "val.json").read_text())
    assert found["images"] == 10
    assert found["mean_iou"] == pytest.approx(summary["val_mean_iou"], rel=1e-3)
    assert found["pixel_accuracy"] == pytest.approx(summary["val_pixel_accuracy"], rel=1e-3)


def test_leaves_alone_what_is_there_and_adds_what_is_missing(flags, path_with_spaces):
    assert predict(*flags) == 0
    output = path_with_spaces / "predicted"
    whole = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    (output / "masks" / "b.png").unlink()
    kept = output / "masks" / "a.png"
    before = kept.stat().st_mtime_ns
    assert predict(*flags) == 0
    assert kept.stat().st_mtime_ns == before
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == whole


def test_refuses_the_directory_of_another_command(flags, capfd):
    assert predict(*flags) == 0
    assert predict(*flags, "--tta") == 2
    check_one_line(capfd, "another command: tta is True (there: False)")
    assert predict(*flags, "--global_batch_size=3", "--strategy=mirrored") == 0


def test_reports_and_leaves_out_what_cannot_be_read(
    flags, labelled_images, path_with_spaces, capfd
):
    data = path_with_spaces / "data"
    shutil.copytree(labelled_images, data)
    (data / "val" / "images" / "b.png").write_bytes(b"no image")
    shutil.copy(data / "val" / "masks" / "a.png", data / "val" / "masks" / "c.png")
    flags = [*flags, f"--images={data}/val/images", f"--masks={data}/val/masks"]
    assert predict(*flags) == 1
    err = capfd.readouterr().err.strip().splitlines()
    assert len(err) == 2
    assert err[0].startswith("tfdist: Cannot decode the image ")
    assert "b.png" in err[0]
    assert "c.png': the mask is 40x28 and its image is 9x21" in err[1]
    output = path_with_spaces / "predicted"
    assert sorted(path.name for path in (output / "masks").iterdir()) == ["a.png", "c.png"]
    assert json.loads((output / "metrics.json").read_text())["images"] == 1
    assert predict(*flags) == 1, "what is still broken is still said"


def test_works_on_any_file_system(run_dir, labelled_images):
    for name in ("options.json", "summary.json", "model.keras"):
        tf.io.gfile.makedirs("ram://run")
        tf.io.gfile.copy(f"{run_dir}/{name}", f"ram://run/{name}", overwrite=True)
    images = "ram://photos"
    tf.io.gfile.makedirs(images)
    tf.io.gfile.copy(f"{labelled_images}/val/images/c.png", f"{images}/c.png", overwrite=True)
    assert (
        predict(f"--images={images}/*.png", "--run_dir=ram://run", "--output=ram://out", "--quiet")
        == 0
    )
    with tf.io.gfile.GFile("ram://out/masks/c.png", "rb") as file:
        assert decode_mask(file.read()).shape == (9, 21)


def check_one_line(capfd, *messages):
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("tfdist: ")
    for message in messages:
        assert message in err


def test_zooms_as_the_training_images_were_resized(
    flags, run_dir, labelled_images, path_with_spaces, caplog
):
    """The run's images were 16x16; others are made of it by a change of its summary."""
    run = path_with_spaces / "run"
    shutil.copytree(run_dir, run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["info"]["original_size"] == [16, 16]
    same_as = {
        (32, 32): "--zoom=0.5",
        (16, 16): "--zoom=1",
        "": "--zoom=1",  # a run of an earlier version
    }
    truth = f"--masks={labelled_images}/val/masks"
    for size, zoom in same_as.items():
        summary["info"].pop("original_size", None)
        if size:
            summary["info"]["original_size"] = size
        (run / "summary.json").write_text(json.dumps(summary))
        found = []
        for more in ("--zoom=auto", zoom):
            output = path_with_spaces / f"{size} {more}"
            assert predict(*flags, f"--run_dir={run}", truth, f"--output={output}", more) == 0
            found.append(json.loads((output / "metrics.json").read_text()))
        assert found[0] == found[1]
        assert ("does not say how large its training images were" in caplog.text) == (not size)
        caplog.clear()


def test_zooms_only_images_of_their_original_size(run_dir, labelled_images, path_with_spaces):
    own = [f"--run_dir={run_dir}", "--dataset=folder", f"--data_dir={labelled_images}", "--quiet"]
    found = []
    for zoom in ("auto", "1"):
        path = path_with_spaces / f"{zoom}.json"
        assert evaluate(*own, f"--zoom={zoom}", f"--output={path}") == 0
        found.append(json.loads(path.read_text())["confusion"])
    assert found[0] == found[1]
