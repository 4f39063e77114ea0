"""Aligned text columns, and JSON, for commands that list things. No colours, so ``NO_COLOR`` is always respected."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["columns", "json_text"]


def columns(rows: Iterable[Sequence[object]], *, indent: str = "", gap: str = "  ") -> str:
    """Lines of columns as wide as their widest cell, without a final line break.

    A column whose cells below the first row are all numbers is aligned to the right, any other to the left.
    """
    table = [[str(cell) for cell in row] for row in rows]
    if not table:
        return ""
    count = len(table[0])
    widths = [max(len(row[index]) for row in table) for index in range(count)]
    numeric = [len(table) > 1 and all(row[index].isdecimal() for row in table[1:]) for index in range(count)]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append((indent + gap.join(cells)).rstrip())
    return "\n".join(lines)


def json_text(data: Any) -> str:
    """Indented JSON with the letters as they are. No final line break."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
