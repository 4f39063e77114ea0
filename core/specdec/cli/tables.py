"""Aligned text columns, and JSON, for commands that list things. No colours, so ``NO_COLOR`` is always respected."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["acceptances", "arms_table", "columns", "json_text"]


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


def acceptances(counts: Mapping[str, Any]) -> list[str]:
    """Acceptance at each depth; "-" where no round came to it. counts: has ``acceptance_by_depth`` and ``judged_by_depth``."""
    depths = zip(counts["acceptance_by_depth"], counts["judged_by_depth"], strict=True)
    return [f"{rate:.2f}" if judged else "-" for rate, judged in depths]


def arms_table(arms: Sequence[Mapping[str, Any]]) -> str:
    """The comparison of draft counts as columns; arms: ``Arm.as_data`` of each, in order. No final line break."""
    head = ("", "tokens", "rounds", "tokens/round", "acceptance by depth", "tokens/s", "speed")
    rows = [
        (
            arm["name"],
            arm["tokens"],
            arm["rounds"],
            f"{arm['tokens_per_round']:.2f}",
            " ".join(acceptances(arm)) or "-",
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speed_ratio']:.2f}x",
        )
        for arm in arms
    ]
    return columns([head, *rows])


def json_text(data: Any) -> str:
    """Indented JSON with the letters as they are. No final line break."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
