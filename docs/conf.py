"""How Sphinx builds the documentation: `make docs`."""

import dataclasses
import importlib
import pathlib
import pkgutil
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import diagrams
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import tfdist
from tfdist import models
from tfdist.cli.quiet import start_tensorflow_quietly

project = "tfdist"
author = "the tfdist authors"
version = release = tfdist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"tfdist {release}"

# Markdown as GitHub shows it; a heading can be linked to.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings hold single backticks, as in Markdown.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style"), ("Call arguments", "params_style")]

_logger = logging.getLogger(__name__)


class OptionsDirective(SphinxDirective):
    """`{options} module:Class`: what a command takes, a table a group."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].partition(":")
        options = getattr(importlib.import_module(module), name)
        lines = []
        for group in options.list_groups().values():
            lines += [f"**{group.describe()}**", "", "| flag | default | |", "|---|---|---|"]
            for item in dataclasses.fields(group):
                default = item.default
                if isinstance(default, tuple):
                    default = ",".join(map(str, default))
                choices = ", ".join(f"`{choice}`" for choice in item.metadata.get("choices", ()))
                text = item.metadata["help"] + (f": {choices}" if choices else "")
                shown = "" if default in (None, "") else f"`{default}`"
                lines.append(f"| `--{item.name}` | {shown} | {text.replace('|', chr(92) + '|')} |")
            lines.append("")
        return self.parse_text_to_nodes(StringList(lines, self.get_location()))


def demand_docstring(app, kind, name, obj, options, lines) -> None:
    """Fails the build on a public name without a docstring."""
    if not any(lines):
        _logger.warning("%s %s is public and has no docstring", kind, name)


def prepare_docstring(app, kind, name, obj, options, lines) -> None:
    """Mends what napoleon would take for something else."""
    if kind in ("property", "attribute", "data") and lines:
        # It would take a text up to its first colon for a type.
        lines[0] = lines[0].replace(": ", ", that is, ")
    # An example is code, not text that is indented.
    lines[:] = ["Example::" if line == "Example:" else line for line in lines]


def demand_every_export(app, env) -> None:
    """Fails the build where a package exports a name that the reference leaves out."""
    documented = {name.rpartition(".")[2] for name in env.get_domain("py").objects}
    for package in (tfdist, models):
        packages = [
            info.name
            for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
            if info.ispkg
        ]
        for name in (package.__name__, *packages):
            for export in getattr(importlib.import_module(name), "__all__", ()):
                if export not in documented and f"{name}.{export}" not in packages:
                    _logger.warning("%s.%s is public and not in docs/reference.md", name, export)


def setup(app) -> None:
    """Draws the pictures and connects the checks; called by Sphinx."""
    start_tensorflow_quietly()
    diagrams.write_diagrams(ROOT / "docs" / "images")
    app.add_directive("options", OptionsDirective)
    app.connect("autodoc-process-docstring", demand_docstring)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("env-check-consistency", demand_every_export)
