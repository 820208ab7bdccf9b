"""Merges a user's patches into the files of a job: `--patch=FILE`.

The file has the objects' own YAML. On Kubernetes, a document is merged into the objects of its
`kind`; `kind: Pod` is the pods of all of them, and a document without a kind is merged into every
object. On Vertex AI, it is merged into the CustomJobSpec. For scripts, see `SlurmPatch` and
`TpuVmPatch`. Mappings are merged; so are lists of things with a `name`, by their names; another
list replaces the one that was there; null removes.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from tfdist.errors import TfdistError, make_unknown_name_error
from tfdist.reading import read_text

Patch = Mapping[str, Any]


@dataclass(frozen=True)
class SlurmPatch:
    """What is added to an sbatch script.

    Attributes:
      sbatch, srun: further options, as name -> value; true stands for an option without a value.
      setup: lines of the shell before the tasks start, such as `module load cuda`.
      prefix: words before the command of each task, such as `[apptainer, exec, --nv, IMAGE]`.
    """

    sbatch: Mapping[str, Any]
    srun: Mapping[str, Any]
    setup: str
    prefix: Sequence[str]


@dataclass(frozen=True)
class TpuVmPatch:
    """What is added to the script of a TPU VM."""

    create: Mapping[str, Any]
    docker: Sequence[str]


def read_patches(path: str) -> tuple[Patch, ...]:
    """Returns the documents of a file of patches, each a mapping; none without a file."""
    if not path:
        return ()
    try:
        text = read_text(path)
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except OSError as error:
        raise TfdistError(f"Cannot read `patch={path}`: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise TfdistError(f"Cannot read `patch={path}`: it is not YAML: {reason}") from error
    for document in documents:
        if not isinstance(document, dict):
            raise TfdistError(
                f"Cannot use `patch={path}`: {str(document)[:60]!r} is no mapping of names."
            )
    return tuple(documents)


def patch_objects(objects: Sequence[dict[str, Any]], patches: Sequence[Patch]) -> list[Any]:
    """Returns Kubernetes objects with the patches of their kinds."""
    patched: list[Any] = list(objects)
    for patch in patches:
        change = {
            name: value for name, value in patch.items() if name not in ("apiVersion", "kind")
        }
        kind = patch.get("kind")
        for place, each in enumerate(patched):
            if kind == "Pod":
                for template in _list_pods(each):
                    template.update(merge(template, change))
            elif kind in (None, each["kind"]):
                patched[place] = merge(each, change)
    return patched


def check_kinds(kinds: Sequence[str], patches: Sequence[Patch]) -> None:
    """Checks that a job has an object for each patch."""
    for patch in patches:
        kind = patch.get("kind")
        if kind not in (None, "Pod", *kinds):
            raise make_unknown_name_error("kind in --patch", str(kind), {"Pod", *kinds})


def make_script_patch(kind: type, patches: Sequence[Patch]) -> Any:
    """Returns what patches add to a script, by the names and types of a patch's fields."""
    types = {"sbatch": dict, "srun": dict, "create": dict, "setup": str}
    known = {item.name: types.get(item.name, list) for item in fields(kind)}
    found: Any = {name: each() for name, each in known.items()}
    for patch in patches:
        for name, value in patch.items():
            if name not in known:
                raise make_unknown_name_error("name in --patch", str(name), known)
            if not isinstance(value, known[name]):
                form = {dict: "a mapping of options", str: "lines of text", list: "a list of words"}
                raise TfdistError(f"Cannot use {name} in --patch: write {form[known[name]]}.")
            found[name] = {**found[name], **value} if known[name] is dict else value
    return kind(**found)


def format_option(name: str, value: object) -> str:
    """Returns an option of a command, quoted for a shell.

    >>> format_option("exclusive", True), format_option("comment", "a b")
    ('--exclusive', "--comment='a b'")
    """
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def merge(value: Any, change: Any) -> Any:
    """Returns a value with a change.

    A mapping in the place of a list is merged into each of its elements.

    >>> merge({"a": 1, "b": [{"name": "x"}]}, {"a": None, "b": [{"name": "x", "c": 2}]})
    {'b': [{'name': 'x', 'c': 2}]}
    >>> merge([{"a": 1}, {"a": 2}], {"b": 3})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    if isinstance(value, dict) and isinstance(change, dict):
        merged = {name: merge(value.get(name), new) for name, new in change.items()}
        return {name: v for name, v in {**value, **merged}.items() if v is not None}
    if isinstance(value, list) and isinstance(change, dict):
        return [merge(each, change) for each in value]
    if isinstance(value, list) and isinstance(change, list) and _have_names([*value, *change]):
        by_name = {each["name"]: each for each in value}
        for each in change:
            by_name[each["name"]] = merge(by_name.get(each["name"], {}), each)
        return list(by_name.values())
    return change


def _have_names(elements: Sequence[Any]) -> bool:
    return all(isinstance(each, dict) and "name" in each for each in elements)


def _list_pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the templates of pods anywhere in an object."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        for each in value.values():
            yield from _list_pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from _list_pods(each)
