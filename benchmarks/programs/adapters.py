"""Adapts third-party programs so that they are short enough to run here, without copying them."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The last commit at which Keras had copies of keras.io's examples, converted to Keras 3.
EXAMPLES_COMMIT = "2588a15440a10de8d0cc10b50c21ede333a2bd01"
GUIDES_COMMIT = "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A third-party program, and what replaces its downloads.

    The changes are made in this order. Each must find what it changes, so that an adapter that
    does not match its program fails instead of doing nothing.

    Attributes:
      name: the name in the table.
      path: the path of the file in its repository.
      commit: the commit for which the adapter was written.
      repository: `owner/name` on GitHub.
      replace: text -> replacement, everywhere.
      constants: name -> value that replaces every value that the program assigns to the name
        outside functions.
      instead: piece of text -> statement that replaces each top-level statement that contains the
        piece.
      leave_out: start -> stop: the program is cut from the first top-level statement that contains
        the start until the one that contains the stop.
      stop_before: the program ends before the first top-level statement that contains this text.
      files: writes what the program would download to the working directory.
      names: global names that the program finds, such as a synthetic data set.
      examples: the numbers of training and test examples in Keras's data sets, made synthetically.
      epochs: the most epochs of each call of `fit`.
      floatx: the precision of Keras; float32 if the program itself sets it.
      rounds_to: float32 if an operation, such as resizing, always computes in float32.
      short_networks: whether the networks of `keras.applications` have fewer blocks.
      needs: required modules other than TensorFlow's own.
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
    """An adapter does not match the program's text."""


def adapt_text(text: str, program: Program) -> str:
    """Returns the program's text with the adapter's changes.

    Raises:
      AdapterError: the text has nothing that a change applies to.

    >>> adapt_text("steps = 500\\nplot(steps)\\n", Program(name="", path="", \\
    ...     constants={"steps": 2}, instead={"plot(": ""}))
    'steps = 2\\n\\n'
    """
    for old, new in program.replace.items():
        if old not in text:
            raise AdapterError(f"{program.name}: the program does not contain {old!r}")
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
        raise AdapterError(f"{program.name}: no statement contains {', '.join(sorted(missing))}")
    return _splice(text, places)


def _find_line(text: str, piece: str, program: Program) -> int:
    """Returns how many lines precede the first statement that contains a piece of text."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if piece in (ast.get_source_segment(text, node) or ""):
            return node.lineno - 1
    raise AdapterError(f"{program.name}: no statement contains {piece!r}")


def _splice(text: str, places: list[tuple[Any, str]]) -> str:
    """Replaces nodes with texts, from the last to the first."""
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
