"""Draws which package of tfdist imports which: docs/images/imports.svg.

`pytest --write-docs tests/test_architecture.py` writes it; the same test fails when it is old.
"""

import ast
import pathlib

import pygraphviz

ROOT = pathlib.Path(__file__).parents[1]
# Modules at the top of tfdist that are no package, by what they are drawn as.
_TOGETHER = {
    "base": (
        "_lazy",
        "aliases",
        "announcing",
        "distributed_variables",
        "errors",
        "graphs",
        "options",
        "imports",
        "internals",
        "named_code",
        "patches",
        "reading",
        "replacing",
    ),
    "step options": ("training.options", "training.optimizers", "training.step_options"),
    "machine": ("cgroups", "devices", "memory", "processor", "stopping"),
    "commands": ("__main__", "train", "predict", "evaluate", "export"),
    # What is done with finished runs, and needs their options.
    "use": (
        "tasks.command_options",
        "tasks.commands",
        "tasks.exporting",
        "tasks.finished",
        "tasks.segmentation.inference",
    ),
}
for _room in [
    "inputs",
    "replicas",
    "workers",
    "step",
    "kinds",
    "servers",
    "guard",
    "checkpoint",
    "fit",
]:
    _TOGETHER[_room] = (f"training.{_room}",)
_OF = {module: name for name, modules in _TOGETHER.items() for module in modules}
# No size depends on a text, so it does not matter which fonts a machine has.
_BOX = {"shape": "box", "fixedsize": True, "width": 1, "height": 0.32, "style": "filled,rounded"}
_COLORS = {"fillcolor": "#0072b2", "color": "#0072b2", "fontcolor": "#ffffff"}


def find_imports() -> dict[str, set[str]]:
    """Returns package -> the packages that it imports, by the names of the picture."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tfdist").rglob("*.py")):
        own = _name(".".join(path.relative_to(ROOT / "tfdist").with_suffix("").parts))
        if own is None:
            continue
        names = found.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "tfdist":
                parts = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdist."):
                module = (node.module or "").removeprefix("tfdist.")
                parts = [f"{module}.{alias.name}" for alias in node.names]
            else:
                continue
            names |= {name for part in parts if (name := _name(part)) not in (None, own)}
    return {name: {other for other in found[name] if other in found} for name in found}


def draw() -> str:
    """Returns the SVG: an arrow for each import that no longer way stands for, upwards."""
    imports = {name: sorted(others) for name, others in sorted(find_imports().items())}
    graph = pygraphviz.AGraph(imports, directed=True, rankdir="BT", bgcolor="transparent")
    graph.graph_attr["ranksep"] = 0.35
    graph.node_attr.update(fontname="sans-serif", fontsize=10, **_BOX, **_COLORS)
    graph.edge_attr.update(color="#8a8a8a", arrowsize=0.7)
    graph.tred()
    svg = graph.draw(format="svg", prog="dot").decode()
    return svg[svg.index("<svg") :]  # Without the version of Graphviz.


def _name(module: str) -> str | None:
    """Returns how a module is drawn; None for what is no part of the picture."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (whole := ".".join(parts[:end])) in _OF:
            return _OF[whole]
    if parts[1:2] == ["__main__"]:
        return "commands"
    return parts[0] if (ROOT / "tfdist" / parts[0] / "__init__.py").exists() else None
