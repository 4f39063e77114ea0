"""Bars and words of an SVG image, written by hand, for a few rectangles need no library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

__all__ = ["BAR", "COLOURS", "LEFT", "ROW", "SPAN", "bar", "bars", "document", "text"]

#: Height of a row and of its bar, where bars begin, how long the longest is, and the width of an image.
ROW, BAR, LEFT, SPAN, _WIDE = 20, 14, 130, 430, 700
#: Distinct in grey and for colour-blind readers (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000")


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    """Words at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def bar(x: float, y: float, length: float, colour: str) -> str:
    """One bar."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'


def bars(title: str, rows: Sequence[tuple[str, float, str]], y: float, unit: str) -> tuple[list[str], float]:
    """A heading and one bar per (name, value, colour); returns the shapes and where the next chart begins."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    shapes = [text(10, y + BAR, title, weight="bold")]
    for name, value, colour in rows:
        y += ROW
        length = SPAN * value / most
        shapes += [text(LEFT - 8, y + BAR - 3, name, "end"), bar(LEFT, y, length, colour)]
        shapes.append(
            text(LEFT + length + 6, y + BAR - 3, f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}")
        )
    return shapes, y + 2 * ROW


def document(shapes: Iterable[str], high: float) -> str:
    """The whole image, ``high`` units high."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{high:.0f}" viewBox="0 0 {_WIDE} {high:.0f}"'
    )
    style = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {style}", *shapes, "</svg>", ""])
