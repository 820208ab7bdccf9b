"""One HTML file with everything in it: styles, scripts, data and pictures."""

import functools
import html
from collections.abc import Iterable, Mapping
from importlib import resources

from tfdist.report.elements import Section

# The browser itself makes sure that the page loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def make_html(
    title: str,
    sections: Iterable[Section],
    *,
    subtitle: str = "",
    cards: Mapping[str, str] | None = None,
) -> str:
    """Returns a page as HTML.

    Args:
      subtitle: a line below the heading, as text.
      cards: the most important values: name -> value, as texts.
    """
    items = "".join(
        f"<li>{html.escape(name)}<b>{html.escape(value)}</b></li>"
        for name, value in (cards or {}).items()
    )
    body = "\n".join(section.to_html() for section in sections if section.body)
    styles = "".join(f"<style>{_read(name)}</style>" for name in ("uPlot.min.css", "page.css"))
    scripts = "".join(
        f"<script>{_read(name)}</script>\n" for name in ("uPlot.iife.min.js", "page.js")
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>\n'
        f"{styles}</head>\n<body><header><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(subtitle)}</p></header>\n"
        f'<ul class="cards">{items}</ul>\n'
        f"<main>{body}</main>\n{scripts}</body></html>\n"
    )


@functools.cache
def _read(name: str) -> str:
    return (resources.files("tfdist.report") / "assets" / name).read_text(encoding="utf-8")
