import functools
import json
import re

from tfdist.records.recorded_run import read_recorded_run
from tfdist.report.run_page import make_run_page as make_page

make_run_page = functools.partial(make_page, monitor="val_loss", defaults={})
LINE = {"step": 20, "epoch": 2, "loss": 0.5, "val_loss": 0.75, "examples_per_second": 30.0}
SUMMARY = {
    "steps": 40,
    "val_loss": 0.25,
    "replicas": 2,
    "examples_per_second": 32.0,
    "input_fraction": 0.25,
    "host_fraction": 0.05,
    "all_reduce_fraction": 0.1,
    "peak_memory_bytes": 2**20,
    "peak_memory_bytes_per_device": {"worker 0/CPU": 2**20, "worker 1/CPU": 2**19},
}


def read_sections(page):
    """Returns title -> text of each section."""
    parts = re.findall(r"<section>.*?<(?:h2|summary)>(.*?)</(?:h2|summary)>(.*?)</section>", page)
    return {title: " ".join(re.sub("<[^>]*>", " ", body).split()) for title, body in parts}


def test_an_unfinished_run_shows_how_far_it_is(write_run):
    run = read_recorded_run(write_run("my run", lines=[LINE]))
    page = make_run_page(run, [])
    assert "<h1>my run</h1>" in page
    assert "not finished; last seen in epoch 2 of 10, after step 20" in page
    assert "<li>val loss<b>0.7500</b></li>" in page
    sections = read_sections(page)
    assert {"Losses and metrics", "Speed", "Cluster", "All options"} <= sections.keys()
    assert not {"Results", "Memory"} & sections.keys()


def test_a_run_of_which_only_the_options_are_there(write_run):
    assert "no epoch has ended yet" in make_run_page(read_recorded_run(write_run()), [])


def test_a_finished_run_shows_where_the_time_and_the_memory_went(write_run):
    run = read_recorded_run(write_run(lines=[LINE], summary=SUMMARY))
    sections = read_sections(make_run_page(run, []))
    assert "input 25.0% host 5.0% computation 70.0%" in sections["Speed"]
    assert "all-reduce is at most 10.0% of the time" in sections["Speed"]
    assert "worker 1/CPU 0.5" in sections["Memory"]
    assert sections["Results"] == "steps 40 val loss 0.25"
    assert "Goodput" not in sections["Speed"]
    seconds = {"total": 200.0, "progress": 150.0, "training_prep": 20.0, "other": 30.0}
    counted = {**SUMMARY, "goodput": 0.75, "goodput_seconds": seconds}
    run = read_recorded_run(write_run("counted", lines=[LINE], summary=counted))
    sections = read_sections(make_run_page(run, []))
    assert "progress 75.0% training prep 10.0% other 15.0%" in sections["Speed"]
    assert "Goodput 75.0% of 3 min 20 s, over all starts" in sections["Speed"]
    assert sections["Results"] == "steps 40 val loss 0.25"


def test_what_was_trained_is_said_in_words_and_the_rest_is_folded(write_run):
    about = {
        "model_name": "unet",
        "parameters": 12345,
        "trainable_parameters": 12000,
        "dataset": "shapes",
        "examples": {"training": 2000, "validation": 200},
        "command": "python -m tfdist.train --epochs=3",
        "began": "2026-01-02T03:04:05+00:00",
        "last_start": "2026-01-02T03:04:05+00:00",
        "machine": "a processor, 2 cores",
    }
    details = {"gradient_bytes": 30, "weights_sha256": "ab12", "check_s": 1.5}
    path = write_run(about=about, commit="123abc", summary=SUMMARY | details)
    page = make_run_page(read_recorded_run(path), [])
    sections = read_sections(page)
    assert sections["This run"] == (
        "model unet parameters 12,345, of which 12,000 are trained data shapes examples 2,000 "
        "training, 200 validation command python -m tfdist.train --epochs=3 began "
        "2026-01-02T03:04:05+00:00 machine a processor, 2 cores git commit 123abc"
    )
    assert "SHA-256 of the weights ab12" in sections["Details"]
    assert "<summary>Details</summary>" in page
    assert not any(word in page for word in ("gradient_bytes", "guard", "val_loss</th>"))


def test_a_run_of_an_older_version_says_what_it_recorded(write_run):
    path = write_run(versions={"keras": "3.13"}, task={"model": "unet", "dataset": "shapes"})
    sections = read_sections(make_run_page(read_recorded_run(path), []))
    assert sections["This run"] == "model unet data shapes versions keras 3.13"


def test_the_cluster_and_its_failures(write_run):
    failure = {
        "time": "2026-01-02T03:04:05+00:00",
        "task": "worker-1",
        "cause": "was ended by SIGKILL",
        "step": 12,
        "then": "restarted",
        "workers": 2,
    }
    path = write_run(
        restarts=[failure, {"lost_steps": 3}],
        cluster={"worker": ["a:1", "b:1"]},
        summary=SUMMARY | {"restarts": 1, "lost_steps": 3},
    )
    text = read_sections(make_run_page(read_recorded_run(path), []))["Cluster"]
    assert "restarts 1 steps that were repeated 3" in text
    assert "tasks of worker a:1, b:1" in text
    assert "worker-1 was ended by SIGKILL 12 restarted 2" in text


def test_options_that_differ_from_their_defaults(write_run):
    run = read_recorded_run(write_run(task={"depth": 3, "image_size": [64, 64]}))
    defaults = {"depth": 4, "image_size": [96, 96], "epochs": 10}
    sections = read_sections(make_run_page(run, [], defaults=defaults))
    assert sections["Options that differ from their defaults"] == (
        "option value default --image_size 64, 64 96, 96 --depth 3 4"
    )
    assert "epochs 10" in sections["All options"]


def test_a_line_that_a_power_cut_left_incomplete_is_not_read(write_run, path_with_spaces):
    path = write_run(lines=[LINE])
    with open(f"{path}/metrics.jsonl", "a") as file:
        file.write(json.dumps(LINE)[:20])
    assert len(read_recorded_run(path).lines) == 1
