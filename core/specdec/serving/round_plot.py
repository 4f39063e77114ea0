"""What rounds cost as one SVG image: floor and engine as bars, device time of the phases stacked. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.svg import BAR, COLOURS, LEFT, ROW, SPAN, bar, bars, document, text

__all__ = ["svg"]

_FLOOR, _ENGINE = COLOURS[:2]


def svg(data: Mapping[str, Any], title: str) -> str:
    """An SVG document. data: a result of ``specdec bench rounds``."""
    shapes = [text(10, 24, title, weight="bold")]
    rows = []
    for one in data["shapes"]:
        name = f"{one['batch']} x {one['width']}"
        rows += [(f"{name} replay", 1000 * one["floor"], _FLOOR), (f"{name} engine", 1000 * one["engine"], _ENGINE)]
    for one in data["adaptive"]:
        name = f"{one['batch']} adaptive"
        rows += [(f"{name} replay", 1000 * one["floor"], _FLOOR), (f"{name} engine", 1000 * one["engine"], _ENGINE)]
    found, y = bars("time per round, lanes x width", rows, 40.0, "ms")
    shapes += found
    shapes.append(text(10, y + BAR, "phases, lanes x width", weight="bold"))
    names = list(data["shapes"][0]["phases"])
    colours = dict(zip(names, COLOURS))
    most = max(sum(one["phases"].values()) for one in data["shapes"]) or 1.0
    for one in data["shapes"]:
        y, x = y + ROW, float(LEFT)
        shapes.append(text(LEFT - 8, y + BAR - 3, f"{one['batch']} x {one['width']}", "end"))
        for name, seconds in one["phases"].items():
            length = SPAN * seconds / most
            shapes.append(bar(x, y, length, colours[name]))
            x += length
        shapes.append(text(x + 6, y + BAR - 3, f"{1000 * sum(one['phases'].values()):.4g} ms"))
    y += 1.5 * ROW
    for place, name in enumerate(names):
        shapes.append(bar(LEFT + 90 * place, y, BAR, colours[name]))
        shapes.append(text(LEFT + 90 * place + BAR + 4, y + BAR - 3, name))
    return document(shapes, y + 2 * ROW)
