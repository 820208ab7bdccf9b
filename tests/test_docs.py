"""The pages name strategies and flags that there are; `make docs` checks the rest."""

import pathlib
import re

import pytest

from tfdist.benchmark.options import BenchmarkOptions
from tfdist.doctor.options import DoctorOptions
from tfdist.jobs import JobsOptions
from tfdist.launch.options import LaunchOptions
from tfdist.plan.options import PlanOptions
from tfdist.report.__main__ import ReportOptions
from tfdist.runs.options import TrainOptions
from tfdist.serve.options import ServeOptions
from tfdist.strategies.options import StrategyOptions
from tfdist.tasks import commands
from tfdist.tasks.segmentation.inference.options import EvaluateOptions, PredictOptions
from tfdist.verify.options import VerifyOptions

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# docs/errors.md is made of wrong flags, which tests/test_errors.py checks; docs/programs.md is of
# another command.
OTHERS = {"errors.md", "programs.md"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name not in OTHERS)
COMMANDS = (
    commands.PredictOptions,
    TrainOptions,
    PredictOptions,
    EvaluateOptions,
    commands.ExportOptions,
    VerifyOptions,
    BenchmarkOptions,
    ReportOptions,
    JobsOptions,
    ServeOptions,
    LaunchOptions,
    PlanOptions,
    DoctorOptions,
)
OF_A_TASK_OF_THE_READERS = {"units"}
OF_BENCHMARKS = {"pairs", "write", "batch", "limit_mib"}
OF_OTHER_TOOLS = {
    "tf_xla_auto_jit",
    "build",
    "config",
    "constraint",
    "display",
    "flagfile",
    "force",
    "from",
    "help",
    "no",
    "nv",
    "print_config",
    "logdir",
    "python",
    "signal",
    "wait",
}
STRATEGIES = StrategyOptions.__dataclass_fields__["strategy"].metadata["choices"]


def _list_flags() -> set[str]:
    ours = {
        field
        for options in COMMANDS
        for group in options.list_groups().values()
        for field in group.__dataclass_fields__
    }
    return ours | OF_BENCHMARKS | OF_OTHER_TOOLS | OF_A_TASK_OF_THE_READERS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_names_only_flags_that_there_are(path):
    named = set(re.findall(r"(?<![\w-])--([a-z_]+)", path.read_text()))
    assert named <= _list_flags()


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "auto"])
def test_a_strategy_has_a_page_a_picture_and_a_place_in_the_choice(name):
    page = (DOCS / "strategies" / f"{name}.md").read_text()
    assert f"--strategy={name} " in page
    assert f"(../images/{name}.svg)" in page
    assert (DOCS / "images" / f"{name}.svg").exists()
    assert f"strategies/{name}.md" in (DOCS / "choosing.md").read_text()
