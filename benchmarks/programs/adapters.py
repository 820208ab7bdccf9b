"""How a stranger's program is made short enough to run here, without copying it."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Keras kept copies of keras.io's examples, converted to Keras 3, until this commit's successor.
EXAMPLES_COMMIT = "2588a15440a10de8d0cc10b50c21ede333a2bd01"
# The last commit of Keras 2 outside TensorFlow.
KERAS_2_COMMIT = "f295e8ee39d4ba841ac281a9337d69c7bc5e0eb6"
GUIDES_COMMIT = "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that someone else wrote, and what is put in place of its downloads.

    The changes are made in this order, and each must find what it changes, so that an adapter
    that no longer fits its program fails instead of doing nothing.

    Attributes:
      name: in the table.
      path: of the file in its repository.
      commit: of the repository, which the adapter was written for.
      repository: `owner/name` on GitHub.
      replace: texts, and the texts that take their places, everywhere.
      constants: names, and the values assigned to them, in place of every other value that the
        program assigns outside functions.
      instead: pieces of text; each statement at the top level that has one of them in it
        becomes the given statement.
      leave_out: from the first statement at the top level with a text to the one with another,
        which stays.
      stop_before: the program ends before the first statement at the top level with this text.
      files: makes what the program would download, in the working directory.
      names: what the program finds among its own names, such as a made data set.
      examples: of the made data sets that come with Keras, for training and testing.
      epochs: that each call of `fit` trains at most.
      floatx: that Keras computes in; float32 where the program says so itself.
      rounds_to: float32 where an operation computes in it whatever it is given, such as resizing.
      short_networks: whether the networks of `keras.applications` have fewer blocks.
      needs: modules beside TensorFlow's own.
    """

    name: str
    path: str
    commit: str = EXAMPLES_COMMIT
    repository: str = "keras-team/keras"
    replace: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    leave_out: Mapping[str, str] = field(default_factory=dict)
    stop_before: str = ""
    files: Callable[[Path], None] | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[int, int] = (100, 44)
    epochs: int = 2
    floatx: str = "float64"
    rounds_to: str = ""
    short_networks: bool = True
    needs: tuple[str, ...] = ()


class AdapterError(RuntimeError):
    """An adapter does not fit the program's text."""


def adapt_text(text: str, program: Program) -> str:
    """Returns the program's text with the adapter's changes.

    Raises:
      AdapterError: a change finds nothing to change.

    >>> adapt_text("steps = 500\\nplot(steps)\\n", Program(name="", path="", \\
    ...     constants={"steps": 2}, instead={"plot(": ""}))
    'steps = 2\\n\\n'
    """
    for old, new in program.replace.items():
        if old not in text:
            raise AdapterError(f"{program.name}: the program does not say {old!r}")
        text = text.replace(old, new)
    text = _set_constants(text, program)
    text = _replace_statements(text, program)
    for start, stop in program.leave_out.items():
        lines = text.splitlines(keepends=True)
        begin, end = _find_line(text, start, program), _find_line(text, stop, program)
        text = "".join([*lines[:begin], *["\n"] * (end - begin), *lines[end:]])
    if program.stop_before:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[: _find_line(text, program.stop_before, program)])
    return text


def _set_constants(text: str, program: Program) -> str:
    places: list[tuple[ast.expr, str]] = []
    found = set()
    bodies: list[list[ast.stmt]] = [ast.parse(text).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id in program.constants:
                    found.add(target.id)
                    places.append((node.value, repr(program.constants[target.id])))
    if missing := set(program.constants) - found:
        raise AdapterError(f"{program.name}: nothing is assigned to {', '.join(sorted(missing))}")
    return _splice(text, places)


def _replace_statements(text: str, program: Program) -> str:
    places: list[tuple[ast.stmt, str]] = []
    found = set()
    for node in ast.parse(text).body:
        source = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # prose
        for piece, new in program.instead.items():
            if piece in source:
                found.add(piece)
                places.append((node, new))
                break
    if missing := set(program.instead) - found:
        raise AdapterError(f"{program.name}: no statement has {', '.join(sorted(missing))} in it")
    return _splice(text, places)


def _find_line(text: str, piece: str, program: Program) -> int:
    """Returns how many lines come before the first statement that has a piece of text in it."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if piece in (ast.get_source_segment(text, node) or ""):
            return node.lineno - 1
    raise AdapterError(f"{program.name}: no statement has {piece!r} in it")


def _splice(text: str, places: list[tuple[Any, str]]) -> str:
    """Puts texts in the places of nodes, from the last to the first."""
    lines = text.encode().splitlines(keepends=True)  # ast counts bytes
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    data = text.encode()
    for node, new in sorted(places, key=lambda place: -place[0].lineno):
        first = node.decorator_list[0] if getattr(node, "decorator_list", None) else node
        column = 0 if first is not node else node.col_offset
        begin = offsets[first.lineno - 1] + column
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()
