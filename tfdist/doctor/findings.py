"""What a check finds."""

import dataclasses
from collections.abc import Iterable

SEVERITIES = ("wrong", "slow", "ok")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found, in one line.

    Attributes:
      severity: `wrong` if training fails or its result is at risk, `slow` if training is slower
        than it could be, `ok` if nothing is wrong.
    """

    severity: str
    text: str
    check: str = ""


def wrong(text: str) -> Finding:
    """Returns a finding without which training may fail."""
    return Finding("wrong", text)


def slow(text: str) -> Finding:
    """Returns a finding that makes training slower."""
    return Finding("slow", text)


def ok(text: str) -> Finding:
    """Returns what a check has seen, where nothing is wrong."""
    return Finding("ok", text)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings, the severest first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def format_findings(findings: Iterable[Finding]) -> str:
    """Returns one line for each finding, the severest first."""
    found = sort_findings(findings)
    width = max((len(finding.check) for finding in found), default=0)
    return "\n".join(
        f"{finding.severity.upper() if finding.severity != 'ok' else 'ok':<6}"
        f"{finding.check:<{width}}  {' '.join(finding.text.split())}"
        for finding in found
    )
