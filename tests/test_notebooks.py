"""The notebooks are stored with small outputs, and run from top to bottom as they are.

`pytest --write-docs tests/test_notebooks.py` runs them and stores what they show.
"""

import json
import os
import pathlib
import re
import signal
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = "https://colab.research.google.com/github/{}/blob/main/notebooks/{}"
REPOSITORY = re.search("url = https://github.com/(.+)", (ROOT / "setup.cfg").read_text())[1]
# Notebook -> what the test replaces in its code, so that the same calls train and plan less.
SMALLER = {
    "cluster": {
        "--image_size=32,32 --base_filters=8 --depth=2": (
            "--image_size=16,16 --base_filters=4 --depth=1"
        ),
        "--train_examples=512": "--train_examples=64",
        "--epochs=3": "--epochs=2",
    },
    "own_model_and_data": {
        "make_spirals(3000, seed=0)": "make_spirals(600, seed=0)",
        "epochs=6": "epochs=2",
        '("train", 160)': '("train", 48)',
        "--base_filters=8 --depth=2 --epochs=4": "--base_filters=4 --depth=1 --epochs=1",
        "base_filters=8, depth=2": "base_filters=4, depth=1",
    },
    "plan": {
        "--dataset=shapes --train_examples=100000 --image_size=256,256": (
            "--depth=1 --dataset=shapes --train_examples=100000 --image_size=64,64"
        ),
        "--dataset=shapes --image_size=256,256": "--depth=1 --dataset=shapes --image_size=64,64",
        # tests/plan/test_plan.py calibrates, in sixteen processes.
        "--calibrate=here.toml": "--hardware=cpu",
        "--hardware=here.toml": "--hardware=cpu",
        "workers=1..64": "workers=1..8",
    },
    "strategies": {
        "--image_size=32,32 --base_filters=4 --depth=2": (
            "--image_size=16,16 --base_filters=4 --depth=1"
        )
    },
    "quick_start": {
        "--base_filters=16 --depth=3 --train_examples=1200 --epochs=4": (
            "--base_filters=4 --depth=1 --train_examples=160 --epochs=1"
        )
    },
}


def _read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def test_the_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        "cluster",
        "model_parallel",
        "own_loop",
        "own_model_and_data",
        "plan",
        "quick_start",
        "strategies",
        "tpu",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_small_and_has_an_install_cell_and_a_badge(path):
    cells = _read(path)["cells"]
    assert path.stat().st_size < 300_000
    assert "\\b" not in path.read_text().replace("\\\\", "")  # of a progress bar
    assert cells[0]["cell_type"] == "code"
    assert cells[0]["source"] == _read(NOTEBOOKS[0])["cells"][0]["source"]
    assert BADGE.format(REPOSITORY, path.name) in "".join(cells[1]["source"])


@pytest.mark.parametrize(
    ("place", "there", "installed"),
    [
        ("clone/notebooks", ["clone/tfdist/train.py"], "clone"),
        ("content", ["content/tfdist/tfdist/train.py"], "content/tfdist"),
        (
            "content",
            ["content/tfdist-0.1.0-py3-none-any.whl", "content/tfdist-0.2.0-py3-none-any.whl"],
            "content/tfdist-0.2.0-py3-none-any.whl",
        ),
        ("content", [], None),
    ],
)
def test_the_first_cell_installs_the_clone_or_the_wheel_that_is_there(
    place, there, installed, path_with_spaces, monkeypatch
):
    for name in (*there, f"{place}/train.ipynb"):
        (path_with_spaces / name).parent.mkdir(parents=True, exist_ok=True)
        (path_with_spaces / name).touch()
    monkeypatch.chdir(path_with_spaces / place)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cell = "".join(_read(NOTEBOOKS[0])["cells"][0]["source"])
    assert '%pip install -q "{found[-1]}"' in cell
    before, _, _ = cell.partition("    %pip")
    names = {}
    if installed is None:
        with pytest.raises(SystemExit, match="Clone tfdist here, or upload its wheel"):
            exec(before, names)
    else:
        exec(before, names)
        assert names["found"][-1] == (path_with_spaces / installed).resolve()


@pytest.mark.cluster
@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, path_with_spaces, monkeypatch, request):
    nbclient = pytest.importorskip("nbclient", reason="comes with the [dev] extra")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # `tensorboard` lies beside this Python.
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    # Where TensorBoard notes what it has started.
    monkeypatch.setenv("TMPDIR", str(path_with_spaces))
    monkeypatch.setattr(tempfile, "tempdir", None)
    notebook = nbformat.read(path, as_version=4)
    if not request.config.getoption("--write-docs"):
        _make_smaller(notebook, SMALLER.get(path.stem, {}))
    resources = {"metadata": {"path": str(path_with_spaces)}}
    try:
        nbclient.NotebookClient(notebook, timeout=1000, resources=resources).execute()
    finally:
        _end_tensorboards()
    shown = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    pictures = {"image/png", "image/svg+xml"}
    assert path.stem == "tpu" or any(pictures & set(output.get("data", ())) for output in shown)
    printed = "".join(
        output.get("text", "") + str(output.get("data", {}).get("text/plain")) for output in shown
    )
    assert "Traceback" not in printed, printed
    assert "ERROR" not in printed, printed
    assert "\b" not in printed, printed
    assert path.stem != "tpu" or "Skipped" in printed, printed
    if request.config.getoption("--write-docs"):
        text = nbformat.writes(_clean(notebook), indent=1)
        path.write_text(text.replace(str(path_with_spaces), ".") + "\n")


def _make_smaller(notebook, replaced):
    for text, smaller in replaced.items():
        cells = [cell for cell in notebook.cells if text in cell.source]
        assert cells, f"the notebook no longer has {text!r}"
        for cell in cells:
            cell.source = cell.source.replace(text, smaller)


def _clean(notebook):
    """Returns a notebook without what belongs to the moment and the machine it was run on."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _join_lines(cell.outputs)
        # Viewers show neither of them: a server that has ended, and a page in a page.
        if "%tensorboard" in cell.source or "IFrame(" in cell.source:
            cell.outputs = []
    notebook.metadata.pop("widgets", None)
    return notebook


def _join_lines(outputs):
    """Returns outputs in which lines that follow one another are one output."""
    joined = []
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
            continue
        output.text = output.text.replace("\r\n", "\n")
        if joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _end_tensorboards() -> None:
    from tensorboard import manager

    for server in manager.get_all():
        os.kill(server.pid, signal.SIGTERM)
