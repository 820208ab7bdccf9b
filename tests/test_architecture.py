"""The directions of the imports, and what importing does not do."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# A module may import from its own row and the rows above it.
LAYERS = [
    {"_lazy", "errors"},
    {"options", "presets", "command_line"},
    {"cluster", "devices", "flags", "memory"},
    {"strategies"},
    {"train_options"},
    {"launching", "probe", "stopping"},
    {"data"},
    {"curves", "pictures"},
    {"training", "placement"},
    {"inference"},
    {"assembly", "command", "job_files"},
    {
        "batch_size",
        "dry_run",
        "launch",
        "train",
        "utilization",
        "predict",
        "evaluate",
        "export",
        "jobs",
    },
    {"verification", "benchmarking"},
    {"verify", "benchmark"},
]


def _find_layer(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def _list_imports(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tfdist").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_tfdist_imports_downwards(path):
    parts = path.relative_to(ROOT / "tfdist").with_suffix("").parts
    if parts == ("__init__",):
        pytest.skip("re-exports")
    layer = _find_layer(parts[0])
    for name in _list_imports(path):
        package, _, rest = name.partition(".")
        module = rest.partition(".")[0]
        if package == "tfdist" and module and any(module in names for names in LAYERS):
            assert _find_layer(module) <= layer, f"{path.name} imports {name}"
        if package == "models" and module != "stages":
            assert parts[0] in ("assembly", "benchmarking"), "models are joined in by the commands"


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=lambda p: p.name)
def test_models_never_import_tfdist(path):
    assert not any(name.partition(".")[0] == "tfdist" for name in _list_imports(path))


def test_one_module_touches_the_environment_and_one_reads_flags():
    for path in (ROOT / "tfdist").rglob("*.py"):
        source = path.read_text()
        if "os.environ" in source or "os.getenv" in source:
            assert path.name == "cluster.py", path
        if "absl import flags" in source:
            assert path.name == "flags.py", path


@pytest.mark.parametrize(
    "module",
    [
        "tfdist",
        "tfdist.train",
        "tfdist.predict",
        "tfdist.evaluate",
        "tfdist.export",
        "tfdist.launch",
        "tfdist.jobs",
        "tfdist.verify",
        "models",
    ],
)
def test_importing_does_not_load_tensorflow(module):
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
