"""HTML pages, and their parts: sections, tables, bars, matrices and pictures."""

import base64
import functools
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

_MOST_CLASSES = 24  # Larger confusion matrices are shown as a list of the most frequent mistakes.
_MOST_BARS = 40
_MOST_BYTES = 150_000  # Larger pictures are shrunk.
_MOST_PIXELS = 900  # the width of a shrunk picture
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
# The browser itself makes sure that the page loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A part of a page; a folded one shows its body only after a click."""

    title: str
    body: str
    is_folded: bool = False

    def to_html(self) -> str:
        """Returns the section as HTML."""
        title = html.escape(self.title)
        if self.is_folded:
            return f"<section><details><summary>{title}</summary>{self.body}</details></section>"
        return f"<section><h2>{title}</h2>{self.body}</section>"


def write_value(value: object) -> str:
    """Returns a value as short text.

    >>> [write_value(x) for x in (None, True, 0.123456, 1e-7, [64, 64], float("nan"))]
    ['-', 'yes', '0.1235', '1e-07', '64, 64', 'nan']
    """
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(write_value, value))
    return str(value)


def make_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    is_sortable: bool = False,
    is_wide: bool = False,
) -> str:
    """Returns a table.

    Args:
      is_sortable: whether a click on a head sorts the rows by that column; its first column
        stays where the table is scrolled.
      is_wide: whether the first column stays, of a table that is not sortable.
    """
    kind = ' class="sortable"' if is_sortable else ' class="kept"' if is_wide else ""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(map(_make_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def make_pairs(pairs: Mapping[str, Any]) -> str:
    """Returns a table of names and values, without heads."""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{_make_cell(value)}</tr>'
        for name, value in pairs.items()
    )
    return f'<div class="wide"><table class="pairs"><tbody>{rows}</tbody></table></div>'


def make_bars(
    values: Mapping[str, float | None], *, colors: Mapping[str, str] | None = None
) -> str:
    """Returns one bar per name for fractions from 0 to 1, the lowest ones if there are too many.

    Args:
      values: name -> fraction, None if it is unknown.
      colors: name -> the color of its bar, as in CSS.
    """
    shown = list(values.items())
    note = ""
    if len(shown) > _MOST_BARS:
        shown = sorted(shown, key=lambda item: math.inf if item[1] is None else item[1])
        note = f"<p>The lowest {_MOST_BARS} of {len(shown)}.</p>"
    bars = "".join(
        f'<div class="bar"><span>{html.escape(name)}</span>'
        f'<span class="track"><i style="width:{100 * min(max(value or 0, 0), 1):.2f}%'
        f'{_set_color(colors, name)}"></i></span>'
        f"<b>{'-' if value is None else f'{value:.1%}'}</b></div>"
        for name, value in shown[:_MOST_BARS]
    )
    return f'<div class="bars">{bars}</div>{note}'


def make_confusion(confusion: Sequence[Sequence[int]], class_names: Sequence[str]) -> str:
    """Returns a confusion [truth, prediction], or the most frequent mistakes of many classes."""
    totals = [sum(row) for row in confusion]
    if len(class_names) > _MOST_CLASSES:
        mistakes = [
            (class_names[i], class_names[j], count, count / totals[i])
            for i, row in enumerate(confusion)
            for j, count in enumerate(row)
            if i != j and count
        ]
        mistakes.sort(key=lambda mistake: -mistake[2])
        heads = ("truth", "prediction", "count", "fraction of the class")
        return make_table(heads, mistakes[:_MOST_CLASSES], is_sortable=True)
    names = [html.escape(name) for name in class_names]
    head = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    rows = []
    for name, row, total in zip(names, confusion, totals, strict=True):
        cells = "".join(
            f'<td style="--part:{count / (total or 1):.3f}" title="{name} predicted as {other}: '
            f'{count} of {total}">{_write_percent(count, total)}</td>'
            for other, count in zip(names, row, strict=True)
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        '<div class="wide"><table class="confusion"><thead><tr>'
        f"<th>truth \\ prediction</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div><p>In percent of the class in the truth: each row adds up to 100.</p>"
    )


def make_legend(colors: Mapping[str, str]) -> str:
    """Returns names with their colors, given as in CSS."""
    items = "".join(
        f'<li><i style="background:{color}"></i>{html.escape(name)}</li>'
        for name, color in colors.items()
    )
    return f'<ul class="legend">{items}</ul>'


def make_pictures(pictures: Iterable[tuple[bytes | None, str]], *, is_row: bool = False) -> str:
    """Returns pictures with captions, side by side; an empty text if there is none.

    Args:
      pictures: (PNG, JPEG, GIF or SVG, caption); None instead of a picture that is missing.
      is_row: whether they stay side by side, and are scrolled.
    """
    figures = "".join(
        f'<figure><img src="{_embed(content)}" alt="{html.escape(caption, quote=True)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for content, caption in pictures
        if content
    )
    kind = "row" if is_row else "pictures"
    return f'<div class="{kind}">{figures}</div>' if figures else ""


def _make_cell(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number" data-value="{value!r}">{write_value(value)}</td>'
    return f"<td>{html.escape(write_value(value))}</td>"


def _set_color(colors: Mapping[str, str] | None, name: str) -> str:
    return f";background:{colors[name]}" if colors and name in colors else ""


def _write_percent(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}" if count else "0"


def _embed(content: bytes) -> str:
    """Returns a picture as a data URL, shrunk if it is large."""
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), "svg+xml")
    if len(content) > _MOST_BYTES and kind in ("png", "jpeg"):
        content, kind = _shrink(content), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _shrink(content: bytes) -> bytes:
    """Returns a picture as a JPEG of at most `_MOST_PIXELS` in width."""
    from PIL import Image

    image = Image.open(io.BytesIO(content)).convert("RGB")
    if image.width > _MOST_PIXELS:
        size = (_MOST_PIXELS, max(1, image.height * _MOST_PIXELS // image.width))
        image = image.resize(size, Image.Resampling.BOX)
    shrunk = io.BytesIO()
    image.save(shrunk, "jpeg", quality=85)
    return shrunk.getvalue()


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
