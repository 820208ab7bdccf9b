"""The figures of the documentation can be drawn again."""

import pytest

pytest.importorskip("matplotlib", reason="comes with the [dev] extra")

from benchmarks import figures


@pytest.mark.thorough
def test_all_figures_are_drawn_and_say_what_the_stored_ones_say(
    path_with_spaces, monkeypatch, capsys
):
    stored = figures.IMAGES
    monkeypatch.setattr(figures, "IMAGES", path_with_spaces)
    assert figures.main() == 0
    for name in ("reductions", "failures", "stragglers"):
        drawn, old = (
            _list_texts((path / f"{name}.svg").read_text()) for path in (path_with_spaces, stored)
        )
        assert drawn == old
    assert "| ring | 10.3 " in capsys.readouterr().out


def _list_texts(svg):
    return [line.strip() for line in svg.splitlines() if "<text" in line]
