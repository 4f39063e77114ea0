"""Summaries as one SVG image: throughput and latency tails as bars, chosen widths as stacked shares."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.simulation.summary import TAILS, Summary
from specdec.svg import BAR, COLOURS, LEFT, ROW, SPAN, bar, bars, document, text


def svg(summaries: Sequence[Summary], title: str) -> str:
    """An SVG document that compares policies."""
    shapes, y = [text(10, 24, title, weight="bold")], 40.0
    charts = [("tokens per second", "tokens/s", [(one.policy, one.tokens_per_second, COLOURS[0]) for one in summaries])]
    for name, field in (("time to first token", "time_to_first_token"), ("latency", "latency")):
        rows = [
            (f"{one.policy} p{percent}", getattr(one, field)[percent], colour)
            for one in summaries
            for percent, colour in zip(TAILS, COLOURS)
        ]
        charts.append((name, "s", rows))
    for name, unit, rows in charts:
        found, y = bars(name, rows, y, unit)
        shapes += found
    shapes.append(text(10, y + BAR, "rounds by verification width", weight="bold"))
    widths = sorted({width for one in summaries for width in one.widths})
    colours = {width: COLOURS[place % len(COLOURS)] for place, width in enumerate(widths)}
    for one in summaries:
        y, x = y + ROW, float(LEFT)
        shapes.append(text(LEFT - 8, y + BAR - 3, one.policy, "end"))
        for width, share in one.widths.items():
            shapes.append(bar(x, y, SPAN * share, colours[width]))
            x += SPAN * share
    y += 1.5 * ROW
    for place, width in enumerate(widths):
        shapes += [bar(LEFT + 50 * place, y, BAR, colours[width])]
        shapes += [text(LEFT + 50 * place + BAR + 4, y + BAR - 3, str(width))]
    return document(shapes, y + 2 * ROW)
