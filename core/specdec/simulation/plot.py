"""Summaries as one SVG image: throughput and latency tails as bars, chosen widths as stacked shares. Written by hand, for a few
rectangles need no library."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from specdec.simulation.summary import TAILS, Summary

_ROW, _BAR, _LEFT, _SPAN, _WIDE = 20, 14, 130, 430, 700
#: Distinct in grey and for colour-blind readers (Okabe and Ito 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000")


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _bar(x: float, y: float, length: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>'


def _bars(title: str, rows: Sequence[tuple[str, float, str]], y: float, unit: str) -> tuple[list[str], float]:
    """A heading and one bar per (name, value, colour); returns the shapes and where the next chart begins."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    shapes = [_text(10, y + _BAR, title, weight="bold")]
    for name, value, colour in rows:
        y += _ROW
        length = _SPAN * value / most
        shapes += [_text(_LEFT - 8, y + _BAR - 3, name, "end"), _bar(_LEFT, y, length, colour)]
        shapes.append(
            _text(_LEFT + length + 6, y + _BAR - 3, f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}")
        )
    return shapes, y + 2 * _ROW


def svg(summaries: Sequence[Summary], title: str) -> str:
    """An SVG document that compares policies."""
    shapes, y = [_text(10, 24, title, weight="bold")], 40.0
    charts = [
        ("tokens per second", "tokens/s", [(one.policy, one.tokens_per_second, _COLOURS[0]) for one in summaries])
    ]
    for name, field in (("time to first token", "time_to_first_token"), ("latency", "latency")):
        rows = [
            (f"{one.policy} p{percent}", getattr(one, field)[percent], colour)
            for one in summaries
            for percent, colour in zip(TAILS, _COLOURS)
        ]
        charts.append((name, "s", rows))
    for name, unit, rows in charts:
        found, y = _bars(name, rows, y, unit)
        shapes += found
    shapes.append(_text(10, y + _BAR, "rounds by verification width", weight="bold"))
    widths = sorted({width for one in summaries for width in one.widths})
    colours = {width: _COLOURS[place % len(_COLOURS)] for place, width in enumerate(widths)}
    for one in summaries:
        y, x = y + _ROW, float(_LEFT)
        shapes.append(_text(_LEFT - 8, y + _BAR - 3, one.policy, "end"))
        for width, share in one.widths.items():
            shapes.append(_bar(x, y, _SPAN * share, colours[width]))
            x += _SPAN * share
    y += 1.5 * _ROW
    for place, width in enumerate(widths):
        shapes += [_bar(_LEFT + 50 * place, y, _BAR, colours[width])]
        shapes += [_text(_LEFT + 50 * place + _BAR + 4, y + _BAR - 3, str(width))]
    high = y + 2 * _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{high:.0f}" viewBox="0 0 {_WIDE} {high:.0f}"'
    )
    style = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {style}", *shapes, "</svg>", ""])
