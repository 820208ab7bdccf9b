"""The notebooks are stored clean, and run from top to bottom as they are."""

import json
import os
import pathlib
import signal
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = "https://colab.research.google.com/github/{}/blob/main/notebooks/{}"
REPOSITORY = "tfdist/tfdist"


def _read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def test_the_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        "cluster",
        "model_parallel",
        "own_model_and_data",
        "quick_start",
        "strategies",
        "tpu",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_has_no_outputs_an_install_cell_and_a_badge(path):
    cells = _read(path)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert cells[0] is code[0]
    assert "%pip install -q tfdist" in "".join(cells[0]["source"])
    assert BADGE.format(REPOSITORY, path.name) in "".join(cells[1]["source"])


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, path_with_spaces, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="comes with the [dev] extra")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # `tensorboard` lies beside this Python.
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    # Where TensorBoard notes what it has started.
    monkeypatch.setenv("TMPDIR", str(path_with_spaces))
    monkeypatch.setattr(tempfile, "tempdir", None)
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path_with_spaces)}}
    try:
        nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
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
    assert path.stem != "tpu" or "Skipped" in printed, printed


def _end_tensorboards() -> None:
    from tensorboard import manager

    for server in manager.get_all():
        os.kill(server.pid, signal.SIGTERM)
