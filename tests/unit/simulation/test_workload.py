"""Arrivals: a Poisson process, and files of JSON lines with every way to be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from specdec.errors import UsageError
from specdec.simulation.workload import Arrival, Lengths, poisson, read_arrivals

SHORT = Lengths(low=1, high=64)


def drawn(count: int = 4000, rate: float = 2.0, seed: int = 1) -> list[Arrival]:
    return poisson(count, rate, seed=seed, mix={"a": 3.0, "b": 1.0}, prompts=SHORT, outputs=Lengths(low=7, high=7))


def test_gaps_are_exponential() -> None:
    found = drawn()
    gaps = [later.time - earlier.time for earlier, later in zip(found, found[1:])]
    mean = sum(gaps) / len(gaps)
    assert abs(mean - 0.5) < 4 * 0.5 / math.sqrt(len(gaps))
    # an exponential exceeds its mean with probability 1/e; an even stream never would, a uniform gap half the time
    beyond = sum(gap > 0.5 for gap in gaps) / len(gaps)
    assert abs(beyond - math.exp(-1)) < 4 * math.sqrt(math.exp(-1) * (1 - math.exp(-1)) / len(gaps))


def test_lengths_and_categories_are_as_asked() -> None:
    found = drawn()
    assert {one.output_tokens for one in found} == {7} and [one.index for one in found] == list(range(4000))
    prompts = [one.prompt_tokens for one in found]
    assert (min(prompts), max(prompts)) == (1, 64)
    # uniform in the logarithm: as many below the geometric mean of the ends as above
    below = sum(prompt < math.sqrt(1 * 65) for prompt in prompts) / len(prompts)
    assert abs(below - 0.5) < 0.04
    share = sum(one.category == "a" for one in found) / len(found)
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / len(found))


def test_a_rate_stretches_the_same_requests() -> None:
    slow, fast = drawn(50, 1.0), drawn(50, 10.0)
    for a, b in zip(slow, fast, strict=True):
        assert a.time == pytest.approx(10 * b.time)
        assert (a.prompt_tokens, a.category) == (b.prompt_tokens, b.category)
    assert drawn(50) == drawn(50) and drawn(50) != drawn(50, seed=2)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": math.nan}, "rate is nan"),
        ({"mix": {}}, "mix is {}"),
        ({"mix": {"a": -1.0, "b": 2.0}}, "mix is"),
    ],
)
def test_wrong_numbers_are_refused(change: dict[str, object], part: str) -> None:
    options: dict[str, object] = {"requests": 5, "rate": 1.0, "mix": {"a": 1.0}, **change}
    count, rate = options.pop("requests"), options.pop("rate")
    with pytest.raises(UsageError, match=part):
        poisson(count, rate, seed=0, prompts=SHORT, outputs=SHORT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5), (1, 1 << 21), (1.5, 3)])
def test_wrong_lengths_are_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match="lengths are"):
        Lengths(low=low, high=high)


GOOD = {"time": 0.5, "prompt_tokens": 10, "output_tokens": 3}


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    second = {
        "time": 2,
        "prompt_tokens": 1,
        "output_tokens": 9,
        "category": "b",
        "max_new_tokens": 30,
        "draft_tokens": 0,
    }
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(second)}\n{json.dumps(second)}\n")
    found = read_arrivals(path, categories=("a", "b"), most=2)
    assert found == [
        Arrival(index=0, time=0.5, prompt_tokens=10, output_tokens=3, category="a", max_new_tokens=3),
        Arrival(index=1, time=2.0, prompt_tokens=1, output_tokens=9, category="b", max_new_tokens=30, draft_tokens=0),
    ]
    assert len(read_arrivals(path, categories=("a", "b"))) == 3


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not JSON"),
        ("[1]", "is no object"),
        ('{"time": 1, "prompt_tokens": 2}', "output_tokens is missing"),
        (json.dumps({**GOOD, "tokens": 3}), "unknown 'tokens'"),
        (json.dumps({**GOOD, "time": 0.25}), "time is 0.25; a number of seconds from 0.5 on"),
        (json.dumps({**GOOD, "time": True}), "time is True"),
        (json.dumps({**GOOD, "time": "1"}), "time is '1'"),
        ('{"time": NaN, "prompt_tokens": 2, "output_tokens": 1}', "time is nan"),
        ('{"time": Infinity, "prompt_tokens": 2, "output_tokens": 1}', "time is inf"),
        (json.dumps({**GOOD, "prompt_tokens": 0}), "prompt_tokens is 0"),
        (json.dumps({**GOOD, "prompt_tokens": 2.0}), "prompt_tokens is 2.0"),
        (json.dumps({**GOOD, "output_tokens": 1 << 21}), "output_tokens is 2097152"),
        (json.dumps({**GOOD, "max_new_tokens": 0}), "max_new_tokens is 0"),
        (json.dumps({**GOOD, "draft_tokens": -1}), "draft_tokens is -1"),
        (json.dumps({**GOOD, "category": "c"}), "category is 'c'; known: a, b"),
        (json.dumps({**GOOD, "category": ["a"]}), r"category is \['a'\]"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, part: str) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(UsageError, match=part) as caught:
        read_arrivals(path, categories=("a", "b"))
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    with pytest.raises(UsageError, match="No such file"):
        read_arrivals(path, categories=("a",))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_arrivals(path, categories=("a",))
    path.write_text("\n\n")
    with pytest.raises(UsageError, match="no arrivals"):
        read_arrivals(path, categories=("a",))
