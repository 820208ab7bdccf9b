"""uPlot's files are those of its release."""

import hashlib
from importlib import resources

import pytest

ASSETS = resources.files("tfdist.report") / "assets"


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ],
)
def test_uplot_is_unchanged(name, sha256):
    assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == sha256
    assert "MIT" in (ASSETS / "uPlot.LICENSE").read_text()
