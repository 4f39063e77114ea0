"""``specdec bench rounds``: refusals of one line, and a small run whose figures follow from its observations."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median
from typing import Any
from xml.etree import ElementTree

import pytest
from command import Outcome, specdec

from specdec.round.phases import PHASES

RECIPE = "qwen3.8-flash"
#: Three requests at once: batch capacity 4 has a dead lane.
SMALL = ["--rounds", 3, "--passes", 2, "--concurrency", 3, "--mtp-draft-tokens", 2]
SHAPES = [(batch, width) for batch in (1, 2, 4) for width in (1, 2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Outcome:
    """One run for all tests that look at what it says."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from specdec.cli.main import main

    words = [
        "bench",
        "rounds",
        RECIPE,
        *map(str, SMALL),
        "--out",
        str(folder / "x.json"),
        "--plot",
        str(folder / "x.svg"),
    ]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return Outcome(arguments=tuple(words), code=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.fixture(scope="module")
def data(measured: Outcome, folder: Path) -> dict[str, Any]:
    assert measured.code == 0, measured
    return json.loads((folder / "x.json").read_text())


def test_every_shape_is_there(data: dict[str, Any]) -> None:
    assert [(one["batch"], one["width"]) for one in data["shapes"]] == SHAPES
    assert [one["target_rows"] for one in data["shapes"]] == [batch * width for batch, width in SHAPES]
    assert [one["lanes"] for one in data["shapes"]] == [min(batch, 3) for batch, _ in SHAPES]
    assert [one["batch"] for one in data["adaptive"]] == [1, 2, 4]
    assert (data["captured"], data["dtype"], data["queue_depth"]) == (False, "float32", 2)
    assert data["sampler"] == "reference" and set(data["operators"].values()) == {"reference (cpu device)"}


def test_figures_follow_from_the_observations(data: dict[str, Any]) -> None:
    for one in data["shapes"]:
        raw = one["raw"]
        assert len(raw["floors"]) == 2 and len(raw["engine"]) == 2 and len(raw["phases"]) == 3
        assert all(found["widths"] == [one["width"]] * 3 for found in raw["engine"])
        assert one["floor"] == pytest.approx(median(raw["floors"]))
        engine = [mean(found["seconds"]) for found in raw["engine"]]
        assert one["engine"] == pytest.approx(median(engine))
        assert one["ratio"] == pytest.approx(median(engine) / median(raw["floors"]))
        assert one["ratio_by_pass"] == pytest.approx([a / b for a, b in zip(engine, raw["floors"], strict=True)])
        assert list(one["phases"]) == list(PHASES)
        assert all(seconds > 0 for found in raw["phases"] for seconds in found.values())


def test_adaptive_rounds_are_compared_with_replays_of_what_ran(data: dict[str, Any]) -> None:
    floors = {(one["batch"], one["width"]): one["floor"] for one in data["shapes"]}
    for one in data["adaptive"]:
        least = [sum(floors[one["batch"], width] for width in found["widths"]) for found in one["raw"]["engine"]]
        taken = [sum(found["seconds"]) for found in one["raw"]["engine"]]
        assert one["ratio_by_pass"] == pytest.approx([a / b for a, b in zip(taken, least, strict=True)])
        assert one["floor"] == pytest.approx(sum(least) / 6) and one["engine"] == pytest.approx(sum(taken) / 6)
        assert sum(one["rounds_by_width"].values()) == 6


def test_the_table_is_for_people(measured: Outcome, data: dict[str, Any]) -> None:
    shapes, adaptive = (part.splitlines() for part in measured.stdout.strip().split("\n\n"))
    assert [tuple(map(int, line.split()[:2])) for line in shapes[1:]] == SHAPES
    assert float(shapes[1].split()[3]) == pytest.approx(1000 * data["shapes"][0]["floor"], abs=1e-3)
    assert len(adaptive) == 4 and adaptive[0].startswith("adaptive batch")
    assert "9 shapes, 2 passes of 3 eager rounds" in measured.stderr


def test_the_plot_has_every_shape(data: dict[str, Any], folder: Path) -> None:
    root = ElementTree.parse(folder / "x.svg").getroot()
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"4 x 3 replay", "4 x 3 engine", "4 adaptive engine", "4 x 3", *PHASES} <= words
    # one bar for replay and engine of each shape and batch, then the phases and their legend
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("height") == "14"]
    assert len(bars) == 2 * (9 + 3) + 4 * 9 + 4


def test_data_instead_of_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """One request without drafts has no widths to choose among."""
    found = specdec(
        capsys,
        "bench",
        "rounds",
        RECIPE,
        "--rounds",
        1,
        "--passes",
        1,
        "--concurrency",
        1,
        "--mtp-draft-tokens",
        0,
        "--json",
    )
    assert found.code == 0, found
    data = json.loads(found.stdout)
    assert [(one["batch"], one["width"]) for one in data["shapes"]] == [(1, 1)] and data["adaptive"] == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([], ["BENCHMARK is missing; see 'specdec bench --help'"]),
        (["laps"], ["BENCHMARK is 'laps'; allowed: "]),
        (["rounds"], ["RECIPE is missing; see 'specdec bench rounds --help'"]),
        (["rounds", "qwen3.8-fash"], ["unknown recipe 'qwen3.8-fash'"]),
        (
            ["rounds", RECIPE, "--pases", "2"],
            ["unknown argument '--pases'", "--passes?", "specdec bench rounds --help"],
        ),
        (["rounds", RECIPE, "--rounds", "0"], ["--rounds is 0", "1 to 100000"]),
        (["rounds", RECIPE, "--passes", "0"], ["--passes is 0", "1 to 1000"]),
        (["rounds", RECIPE, "--concurrency", "0"], ["--concurrency is 0", "1 or more"]),
        (["rounds", RECIPE, "--mtp-draft-tokens", "9"], ["--mtp-draft-tokens 9", "between 0 and 7"]),
        (["rounds", RECIPE, "--threads", "0"], ["--threads is 0"]),
        (["rounds", RECIPE, "--out", "nowhere/x.json"], ["--out 'nowhere/x.json'", "does not exist"]),
        (["rounds", RECIPE, "--plot", "."], ["--plot '.'", "is a directory"]),
        (["rounds", RECIPE, "--context", "100"], ["--rounds 64 with 4 requests", "--context is 100", "lower --rounds"]),
        (["rounds", RECIPE, "--rounds", "5000"], ["--rounds 5000", "the checkpoint has 4096", "lower --rounds"]),
        (["rounds", RECIPE, "--device", "tpu"], ["--device 'tpu'", "allowed: cpu"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = specdec(capsys, "bench", *options)
    assert found.code == 2
    assert all(part in found.refusal for part in parts), found
    assert not list(tmp_path.iterdir())


def test_a_recipe_without_a_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = specdec(capsys, "bench", "rounds", RECIPE, "--checkpoint", tmp_path / "nothing")
    assert found.code == 4 and "nothing" in found.refusal
