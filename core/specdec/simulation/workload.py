"""When which request comes: drawn from a Poisson process, or read from a file of JSON lines.

One object per line: ``time`` (seconds, never decreasing), ``prompt_tokens``, ``output_tokens``, and optionally ``category``,
``max_new_tokens`` (budget that pages are reserved for; default: ``output_tokens``) and ``draft_tokens`` (the request's ceiling).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import frozen

from specdec.errors import UsageError

#: Tokens of one prompt or output in a file of arrivals: far more than any context, and still quickly simulated.
MOST_TOKENS = 1 << 20


@frozen(kw_only=True)
class Arrival:
    """One request to come. index names its luck, so it must not depend on the policy. output_tokens: until it ends by itself."""

    index: int
    time: float
    prompt_tokens: int
    output_tokens: int
    category: str
    max_new_tokens: int
    draft_tokens: int | None = None


@frozen(kw_only=True)
class Lengths:
    """Token counts between ``low`` and ``high``, uniform in their logarithm: most are short, some long."""

    low: int
    high: int

    def __attrs_post_init__(self) -> None:
        if type(self.low) is not int or type(self.high) is not int or not 1 <= self.low <= self.high <= MOST_TOKENS:
            raise UsageError(f"lengths are {self.low!r} to {self.high!r}; 1 or more, increasing, at most {MOST_TOKENS}")

    def draw(self, random: Random) -> int:
        """One of them."""
        return min(self.high, int(self.low * ((self.high + 1) / self.low) ** random.random()))


def poisson(
    requests: int,
    rate: float,
    *,
    seed: int,
    mix: Mapping[str, float],
    prompts: Lengths,
    outputs: Lengths,
) -> list[Arrival]:
    """Arrivals with exponential gaps of mean 1 / ``rate`` seconds. mix: weight of each category.

    A different rate gives the same requests at stretched times.
    Raises UsageError for a number out of range or a mix without weight.
    """
    if requests < 1:
        raise UsageError(f"requests is {requests}; allowed: 1 or more")
    if not 0 < rate < math.inf:
        raise UsageError(f"rate is {rate}; allowed: a number of requests per second above 0")
    if any(not 0 <= weight < math.inf for weight in mix.values()) or not sum(mix.values()) > 0:
        raise UsageError(f"mix is {dict(mix)}; weights are 0 or more, and one of them more")
    random, names, weights = Random(seed), list(mix), list(mix.values())
    clock, found = 0.0, []
    for index in range(requests):
        clock += random.expovariate(1.0)
        category = random.choices(names, weights)[0]
        prompt, output = prompts.draw(random), outputs.draw(random)
        found.append(
            Arrival(
                index=index,
                time=clock / rate,
                prompt_tokens=prompt,
                output_tokens=output,
                category=category,
                max_new_tokens=output,
            )
        )
    return found


_REQUIRED = ("time", "prompt_tokens", "output_tokens")
_OPTIONAL = ("category", "max_new_tokens", "draft_tokens")


def read_arrivals(path: Path, *, categories: Sequence[str], most: int | None = None) -> list[Arrival]:
    """Arrivals from a file. categories: the known ones; a line without gets the first. most: lines that are read.

    Raises UsageError, naming file and line, if one cannot be read, lacks a value, has an unknown one or one out of range.
    """
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; give a readable file of arrivals") from error
    except UnicodeError as error:
        raise UsageError(f"{path}: not UTF-8 text; arrivals are JSON lines") from error
    found: list[Arrival] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (most is None or len(found) < most):
            found.append(_arrival(line, f"{path}, line {number}", found, categories))
    if not found:
        raise UsageError(f"{path}: no arrivals; give a JSON object a line with {', '.join(_REQUIRED)}")
    return found


def _arrival(line: str, where: str, earlier: Sequence[Arrival], categories: Sequence[str]) -> Arrival:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}; give a JSON object a line") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: {entry!r} is no object; give {', '.join(_REQUIRED)}")
    missing = [name for name in _REQUIRED if name not in entry]
    unknown = [name for name in entry if name not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        wrong = f"{missing[0]} is missing" if missing else f"unknown {unknown[0]!r}"
        raise UsageError(f"{where}: {wrong}; allowed: {', '.join(_REQUIRED + _OPTIONAL)}")
    time = entry["time"]
    least = earlier[-1].time if earlier else 0.0
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not least <= time < math.inf:
        raise UsageError(f"{where}: time is {time!r}; a number of seconds from {least:g} on, for arrivals are in order")
    category = entry.get("category", categories[0])
    if category not in categories:
        raise UsageError(f"{where}: category is {category!r}; known: {', '.join(categories)}")
    output = _whole(entry, "output_tokens", where, 1)
    drafts = entry.get("draft_tokens")
    return Arrival(
        index=len(earlier),
        time=float(time),
        prompt_tokens=_whole(entry, "prompt_tokens", where, 1),
        output_tokens=output,
        category=category,
        max_new_tokens=_whole({"max_new_tokens": output, **entry}, "max_new_tokens", where, 1),
        draft_tokens=None if drafts is None else _whole(entry, "draft_tokens", where, 0),
    )


def _whole(entry: Mapping[str, Any], name: str, where: str, least: int) -> int:
    value = entry[name]
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise UsageError(f"{where}: {name} is {value!r}; a whole number from {least} to {MOST_TOKENS}")
    return value
