"""A real run of `--strategy=auto`: its trials, its cache, and its result."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tfdist.auto.candidates import list_candidates
from tfdist.auto.trials import run_trials
from tfdist.cli.flags import parse_flags
from tfdist.runs.options import TrainOptions
from tfdist.tasks.data import to_sources

ROOT = pathlib.Path(__file__).parents[2]
MLP = [f"--task={ROOT}/benchmarks/mlp_task.py:Mlp", "--global_batch_size=16"]
FLAGS = [
    *MLP,
    "--virtual_devices=2",
    "--max_steps=100",
    "--notensorboard",
]


@pytest.mark.thorough
def test_trials_choose_once_and_change_no_bit(path_with_spaces):
    def train(name, *flags):
        done = subprocess.run(
            [sys.executable, "-m", "tfdist.train", *FLAGS, f"--run_dir={name}", *flags],
            cwd=path_with_spaces,
            env={**os.environ, "HOME": str(path_with_spaces), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=1000,
        )
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stdout.splitlines() if line.startswith("--strategy=auto")]
        options = json.loads((path_with_spaces / name / "options.json").read_text())
        summary = json.loads((path_with_spaces / name / "summary.json").read_text())
        return said, options["strategy"], summary["weights_sha256"]

    said, chosen, weights = train("first")
    assert said[0].startswith("--strategy=auto: trying one_device, mirrored on 2 devices, central")
    name = chosen["strategy"]
    assert said[1].startswith(f"--strategy=auto: {name}")
    assert said[1].endswith("; cached.")
    assert len(said) == 2
    (cache,) = (path_with_spaces / ".cache" / "tfdist" / "auto").iterdir()
    assert len(json.loads(cache.read_text())["found"]["rates"]) == 3

    said, again, same_weights = train("second")
    assert len(said) == 1
    assert said[0].endswith(f"; from the trials in {cache}.")
    assert (again, same_weights) == (chosen, weights)

    flags = [f"--strategy={name}", f"--devices={','.join(chosen['devices'])}"]
    assert train("named", *flags) == ([], chosen, weights)


@pytest.mark.thorough
def test_what_is_refused_is_not_chosen():
    flags = ["--strategy=one_device", "--norm=batch", "--micro_batches=2", "--image_size=32,32"]
    two = ["--virtual_devices=2", "--devices=CPU:0,CPU:1"]
    options = parse_flags(TrainOptions, [*flags, *two])
    data = to_sources(options.task.select().make_data(seed=0, quiet=True))
    candidates = list_candidates(options)
    found = run_trials(options, candidates, data=data, together=True, say=lambda text: None)
    assert found.rates == {}
    assert list(found.problems) == list(candidates)
    for problem in found.problems.values():
        assert problem.startswith("refused: ")


@pytest.mark.thorough
def test_each_candidate_can_have_its_own_process():
    flags = [*MLP, "--strategy=one_device", "--virtual_devices=2", "--devices=CPU:0,CPU:1"]
    options = parse_flags(TrainOptions, flags)
    candidates = list_candidates(options)
    candidates.pop("central_storage on 2 devices")
    data = to_sources(options.task.select().make_data(seed=0, quiet=True))
    said = []
    found = run_trials(options, candidates, data=data, together=False, say=said.append)
    assert found.problems == {}
    assert list(found.rates) == ["one_device", "mirrored on 2 devices"]
    assert min(found.rates.values()) > 0
    assert said == ["trying one_device ...", "trying mirrored on 2 devices ..."]
