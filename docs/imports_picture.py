"""Draws which package of tfdist imports which: docs/images/imports.svg.

`pytest --write-docs tests/test_architecture.py` writes it; the same test fails when it is old.
"""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
# Modules at the top of tfdist that are no package, by what they are drawn as.
_TOGETHER = {
    "base": ("_lazy", "errors", "options", "imports", "internals", "replacing"),
    "machine": ("cgroups", "devices", "memory", "stopping"),
    "commands": ("__main__", "train", "predict", "evaluate", "export"),
    "runs": ("assembly",),
    # What is done with finished runs, and needs their options.
    "use": (
        "tasks.commands",
        "tasks.exporting",
        "tasks.finished",
        "tasks.segmentation.inference",
    ),
}
_OF = {module: name for name, modules in _TOGETHER.items() for module in modules}
_WIDTH, _BOX_WIDTH, _BOX_HEIGHT, _ROW = 760, 92, 30, 74


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
    imports = find_imports()

    @functools.cache
    def level(name: str) -> int:
        return 1 + max(
            (level(other) for other in imports[name] if _is_lower(other, name)), default=-1
        )

    def _is_lower(other: str, name: str) -> bool:
        return name not in _reach(imports, other)

    rows: dict[int, list[str]] = {}
    for name in sorted(imports):
        rows.setdefault(level(name), []).append(name)
    places = {
        name: ((index + 0.5) * _WIDTH / len(names), row * _ROW + 20)
        for row, names in rows.items()
        for index, name in enumerate(names)
    }
    parts = []
    for name, others in sorted(imports.items()):
        for other in sorted(others):
            between = {o for via in others - {other} for o in _reach(imports, via)}
            if other in between:
                continue
            (x, y), (to_x, to_y) = places[name], places[other]
            parts.append(
                f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{to_x:.0f}" y2="{to_y + _BOX_HEIGHT:.0f}" '
                'stroke="currentColor" opacity="0.45" marker-end="url(#to)"/>'
            )
    for name, (x, y) in sorted(places.items()):
        parts.append(
            f'<rect x="{x - _BOX_WIDTH / 2:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="4" fill="#0072b2"/>'
            f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" fill="#ffffff">{name}</text>'
        )
    height = (max(rows) + 1) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13" '
        'fill="currentColor"><defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" '
        'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        f"{''.join(parts)}</svg>\n"
    )


def _name(module: str) -> str | None:
    """Returns how a module is drawn; None for what is no part of the picture."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (whole := ".".join(parts[:end])) in _OF:
            return _OF[whole]
    if parts[1:2] == ["__main__"]:
        return "commands"
    return parts[0] if (ROOT / "tfdist" / parts[0] / "__init__.py").exists() else None


def _reach(imports: dict[str, set[str]], name: str) -> set[str]:
    """Returns what a package imports, directly or by others."""
    seen: set[str] = set()
    left = [name]
    while left:
        for other in imports[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen
