"""Writes objects as YAML."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_LOOKS_LIKE_ANOTHER_TYPE = re.compile(r"[-+.]?\d|[-+]?\.(inf|nan)$|[yn]$", re.IGNORECASE)


def dump_documents(comment: str, documents: Sequence[dict[str, Any]]) -> str:
    """Returns the documents as one YAML text, under a comment that is given without "#"."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=len(documents) > 1, width=1000
    )


class _Dumper(yaml.SafeDumper):
    """Writes repeated objects in full instead of as references to the first."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Readers other than PyYAML take 1e-3 for a number and y for a Boolean.
        style = '"' if _LOOKS_LIKE_ANOTHER_TYPE.match(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
