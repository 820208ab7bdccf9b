"""The directions of the imports, and what importing does not do."""

import ast
import graphlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# A module may import from its own row and the rows above it.
LAYERS = [
    {
        "_lazy",
        "aliases",
        "announcing",
        "cgroups",
        "cli.output",
        "errors",
        "graphs",
        "internals",
        "patches",
        "processor",
    },
    {"reading"},
    {"replacing", "distributed_variables"},
    {"options", "imports", "cli.arguments"},
    {"named_code"},
    {"training.options", "training.optimizers", "training.step_options"},
    {"placement.options"},
    {"cluster", "devices", "memory", "models"},
    {"records"},
    {"stopping"},
    {"cli"},
    {"strategies"},
    {"launch"},
    {"data"},
    {"placement"},
    {"training.inputs"},
    {"training.replicas"},
    {"training.workers"},
    {"training.step"},
    {"training.kinds"},
    {"training.servers", "training.guard", "training.checkpoint"},
    {"training"},
    {"report"},
    {"tasks"},
    {"runs.options", "run.options"},
    {
        "tasks.finished",
        "tasks.finished_files",
        "tasks.command_options",
        "tasks.commands",
        "tasks.exporting",
        "tasks.segmentation.inference",
        "jobs",
        "launch.__main__",
    },
    {"runs.clock", "runs.flops"},
    {"runs"},
    {"predict", "evaluate", "export"},
    {"verify", "benchmark", "run", "serve", "doctor", "report.__main__"},
    {"plan"},
    {"auto"},
    {"train"},
    {"__main__"},
]
NAMES = {name for names in LAYERS for name in names}


def _find_layer(module: str) -> int | None:
    """Returns the row of a module, the one that names it or its package most closely."""
    parts = module.split(".")
    ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    name = next((end for end in ends if end in NAMES), None)
    return next((row for row, names in enumerate(LAYERS) if name in names), None)


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
    own = ".".join(path.relative_to(ROOT / "tfdist").with_suffix("").parts)
    if own == "__init__":
        pytest.skip("re-exports")
    layer = _find_layer(own)
    assert layer is not None, f"{own} has no row"
    for name in _list_imports(path):
        other = name.removeprefix("tfdist.")
        row = _find_layer(other) if other != name else None
        assert row is None or row <= layer, f"{path.name} imports {name}"


def test_no_two_files_import_each_other():
    imports = {}
    for path in (ROOT / "tfdist").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        imports[name] = _list_imports(path) - {name}
    sorter = graphlib.TopologicalSorter(
        {name: others & imports.keys() for name, others in imports.items()}
    )
    sorter.prepare()  # raises CycleError, which names the files


def test_windows_is_refused_in_one_line():
    program = "import sys; sys.platform = 'win32'; import tfdist"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError: tfdist does not run on Windows itself. Use WSL2" in done.stderr


def test_the_picture_is_of_the_imports(request):
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "imports_picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    path = ROOT / "docs" / "images" / "imports.svg"
    drawn = picture.draw()
    if request.config.getoption("--write-docs"):
        path.write_text(drawn)
    # Not the coordinates: texts stand a little lower where no font is installed.
    assert _list_titles(path.read_text()) == _list_titles(drawn)


def _list_titles(svg: str) -> list[str]:
    """Returns the names of a picture's boxes and arrows."""
    titles = sorted(re.findall("<title>(.+?)</title>", svg))
    assert titles
    return titles


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=lambda p: p.name)
def test_models_never_import_tfdist(path):
    tfdist = {name for name in _list_imports(path) if name.startswith("tfdist.")}
    allowed = ("tfdist.models", "tfdist._lazy", "tfdist.internals")
    assert all(name.startswith(allowed) for name in tfdist)


# What belongs to one task. A mask is Keras's word too, a class Python's.
TASK_WORDS = re.compile(
    r"segment(ation|ed)|u-?net\b|\biou\b|pixel|\bimages?\b|image_size|num_classes|ignore_label"
    r"|top[-_]?5|confusion",
    re.IGNORECASE,
)


@pytest.mark.parametrize("package", ["training", "strategies", "cluster", "data", "launch"])
def test_the_core_knows_no_task(package):
    for path in (ROOT / "tfdist" / package).rglob("*.py"):
        found = [line.strip() for line in path.read_text().splitlines() if TASK_WORDS.search(line)]
        assert not found, path
        assert not any(name.startswith("tfdist.tasks") for name in _list_imports(path)), path


def test_one_module_touches_the_environment_and_one_reads_flags():
    for path in (ROOT / "tfdist").rglob("*.py"):
        source = path.read_text()
        if "os.environ" in source or "os.getenv" in source:
            assert path.name == "environment.py", path
        if "absl import flags" in source:
            assert path.name == "flags.py", path


# What users call with keyword arguments may take many.
PUBLIC = {"fit", "make_folder", "make_source", "run_local_cluster", "unet", "make_backbone_unet"}


@pytest.mark.parametrize("package", ["tfdist", "models"])
def test_files_and_functions_are_short(package):
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 80, f"{path}: {node.name} has {lines} lines"
                taken = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                assert taken <= 10 or node.name in PUBLIC, f"{path}: {node.name} takes {taken}"


def _find_root(target: ast.expr) -> str | None:
    """Returns the name at the beginning of `name.attribute`; None for anything else."""
    if not isinstance(target, ast.Attribute):
        return None
    while isinstance(target, ast.Attribute):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def test_one_module_assigns_to_classes_of_others():
    for path in (ROOT / "tfdist").rglob("*.py"):
        tree = ast.parse(path.read_text())
        foreign: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                foreign |= {a.asname or a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                is_ours = (node.module or "").startswith("tfdist")
                if not is_ours or node.module == "tfdist.internals":
                    foreign |= {a.asname or a.name for a in node.names}
        for node in ast.walk(tree):
            targets = getattr(node, "targets", []) if isinstance(node, ast.Assign) else []
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"
            names = {_find_root(target) for target in targets}
            if called and node.args and path.name != "replacing.py":
                names.add(_find_root(ast.Attribute(node.args[0], "x")))
            found = names & foreign - {"sys"}  # `sys.argv` of a script
            assert not found, f"{path}: {found}; use tfdist.replacing"


def test_one_module_imports_what_is_private():
    for path in (ROOT / "tfdist").rglob("*.py"):
        private = [
            n for n in _list_imports(path) if n.startswith(("keras.src", "tensorflow.python"))
        ]
        assert not private or path.name == "internals.py", path


# Of Python itself, and of tfdist under a name that it computes.
NOT_FOREIGN = {"_exit", "_fields", "_getframe", "_target", "_tfdist_global_generator"}


def _list_attributes(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Returns the private attributes that a module reads, and all names that it defines."""
    read, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            (defined if is_own and isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called, name = getattr(node.func, "id", getattr(node.func, "attr", "")), node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                if called in ("getattr", "hasattr", "setattr"):
                    read.add(name.value)
                elif called == "__setattr__":
                    defined.add(name.value)
    return {n for n in read if n.startswith("_") and not n.startswith("__")}, defined


def test_private_attributes_of_others_are_listed():
    from tfdist.internals import PRIVATE_ATTRIBUTES

    paths = [path for package in ("tfdist", "models") for path in (ROOT / package).rglob("*.py")]
    pairs = [_list_attributes(ast.parse(p.read_text())) for p in paths if p.stem != "internals"]
    read, defined = (set().union(*found) for found in zip(*pairs, strict=True))
    listed = {name for names in PRIVATE_ATTRIBUTES.values() for name in names}
    # To list one is to say where it comes from: the test of the list fails where it is gone.
    assert read - defined - NOT_FOREIGN == listed - defined


@pytest.mark.parametrize(
    "module",
    [
        "tfdist",
        "tfdist.train",
        "tfdist.predict",
        "tfdist.evaluate",
        "tfdist.export",
        "tfdist.launch.__main__",
        "tfdist.jobs.__main__",
        "tfdist.doctor.__main__",
        "tfdist.verify.__main__",
        "tfdist.report.__main__",
        "tfdist.plan.__main__",
        "tfdist.run.__main__",
        "tfdist.serve.__main__",
        "tfdist.models",
    ],
)
def test_importing_does_not_load_tensorflow(module):
    code = f"import sys, {module}; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=1000)


def test_tensorflow_datasets_is_loaded_on_first_use():
    for path in (ROOT / "tfdist").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "tensorflow_datasets" not in ast.unparse(node), path
