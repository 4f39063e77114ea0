"""``specdec simulate``: a table, data and an image from the same runs; refusals of one line; never torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command import specdec

RECIPE = "qwen3.8-flash"
LIGHT = ["--recipe", RECIPE, "--requests", "30"]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, "simulate", *LIGHT)
    assert found.code == 0, found
    lines = found.stdout.splitlines()
    assert lines[0].startswith("policy") and [line.split()[0] for line in lines[1:]] == ["plain", "fixed:6", "adaptive"]
    assert "simulated 30 requests of profile qwen3.8-flash" in found.stderr
    # costs that nobody measured must say so
    assert "costs are qualitative" in found.stderr


def test_data_repeat_and_depend_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", *LIGHT, "--policy", "fixed:3", "--policy", "adaptive", "--replicas", "2", "--json"]
    first, second = (specdec(capsys, *command) for _ in range(2))
    assert first.code == 0 and first.stderr == "", first
    assert first.stdout == second.stdout != specdec(capsys, *command, "--seed", 1).stdout
    data = json.loads(first.stdout)
    assert (data["requests"], data["replicas"], data["concurrency"], data["seed"]) == (30, 2, 8, 0)
    fixed, adaptive = data["policies"]
    assert (fixed["policy"], adaptive["policy"]) == ("fixed:3", "adaptive")
    # every policy serves the same requests
    assert fixed["tokens"] == adaptive["tokens"] and fixed["requests"] == adaptive["requests"] == 30
    assert set(fixed["widths"]) <= {"1", "3"}
    assert data["sources"]["eight-row-band"]["kind"] == "qualitative"
    assert data["sources"]["qwen-code"]["source"].startswith("https://")


def test_a_policy_that_is_named_twice_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = specdec(capsys, "simulate", *LIGHT, "--policy", "plain", "--policy", "plain", "--json")
    assert [one["policy"] for one in json.loads(found.stdout)["policies"]] == ["plain"]


def test_every_profile_runs(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(specdec(capsys, "simulate", "--list", "--json").stdout)
    assert len(listed) >= 9
    for entry in listed:
        found = specdec(capsys, "simulate", "--profile", entry["name"], "--requests", "4")
        assert found.code == 0, found


def test_the_list_names_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = specdec(capsys, "simulate", "--list").stdout
    assert "curve domain-code: derived, https://" in text
    assert "curve qwen-small: measured, tests/benchmarks/results/qwen3.8-flash_cpu.json" in text
    assert "costs eight-row-band: qualitative" in text


def test_a_recipe_and_its_profile_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    by_recipe, by_name = (
        specdec(capsys, "simulate", option, "glm-5.3-flash", "--requests", "5", "--json")
        for option in ("--recipe", "--profile")
    )
    assert json.loads(by_recipe.stdout)["profile"] == "glm-5.3-flash"
    assert by_recipe.stdout == by_name.stdout


def test_the_only_recipe_needs_no_name(site: Any) -> None:
    found = site.specdec("simulate", "--requests", "5", "--json", SPECDEC_PLUGINS="qwen38")
    assert found.code == 0, found
    assert json.loads(found.stdout)["profile"] == RECIPE


def test_several_recipes_or_none_need_a_name(
    capsys: pytest.CaptureFixture[str], site: Any, one_line: Callable[[Any], str]
) -> None:
    # in this environment every plugin is installed
    assert "--profile or --recipe; profiles: deepseek-v4.1-flash" in specdec(capsys, "simulate").refusal
    found = site.specdec("simulate", SPECDEC_PLUGINS="")
    assert found.code == 2
    assert "--profile or --recipe; profiles: mixed-domains, eight-drafts, slow-verify" in one_line(found)
    assert site.specdec("simulate", "--profile", "slow-verify", "--requests", "2", SPECDEC_PLUGINS="").code == 0


def test_a_plugin_without_usable_profiles(site: Any, one_line: Callable[[Any], str]) -> None:
    site.healthy("silent", "silent-1")
    site.healthy("broken", "broken-1")
    text = (site.path / "broken.py").read_text()
    site.module("broken", text.replace('summary="a toy"', 'summary="a toy", profiles="broken:none.json"'))
    site.distribution("others", plugins={"silent": "silent", "broken": "broken"})
    site.variables["SPECDEC_PLUGINS"] = "qwen38,silent,broken"
    # one recipe has a profile, so none need be named
    assert site.specdec("simulate", "--requests", "5").code == 0
    silent, broken = (site.specdec("simulate", "--recipe", name) for name in ("silent-1", "broken-1"))
    assert silent.code == 2
    assert f"--recipe 'silent-1' has no profile; recipes with one: {RECIPE}" in one_line(silent)
    assert broken.code == 3
    assert "profiles of recipe 'broken-1' cannot be used: broken:none.json:" in one_line(broken)
    unknown = site.specdec("simulate", "--profile", "broken-1")
    assert "(left out: broken:none.json:" in one_line(unknown)
    listed = site.specdec("simulate", "--list")
    assert listed.code == 0 and listed.stderr.startswith("specdec: left out broken:none.json:")
    assert RECIPE in listed.stdout


def test_recorded_arrivals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    lines: list[dict[str, Any]] = [
        {"time": 0.0, "prompt_tokens": 10, "output_tokens": 3},
        {"time": 100.0, "prompt_tokens": 20, "output_tokens": 4, "category": "qwen-agent"},
        {"time": 200.0, "prompt_tokens": 30, "output_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    command = ["simulate", "--recipe", RECIPE, "--arrivals", path, "--policy", "plain", "--json"]
    [whole] = json.loads(specdec(capsys, *command).stdout)["policies"]
    assert (whole["requests"], whole["tokens"]) == (3, 12) and 200 < whole["seconds"] < 201
    [part] = json.loads(specdec(capsys, *command, "--requests", 2).stdout)["policies"]
    assert (part["requests"], part["tokens"]) == (2, 7)


def test_history_drafts_change_what_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", *LIGHT, "--policy", "fixed:6", "--json"]
    without, with_copies = (json.loads(specdec(capsys, *command, *more).stdout) for more in ([], ["--history-drafts"]))
    assert (without["history_drafts"], with_copies["history_drafts"]) == (False, True)
    [one], [other] = without["policies"], with_copies["policies"]
    assert one["tokens"] == other["tokens"] and one["acceptance"] != other["acceptance"]


def test_the_image_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    found = specdec(capsys, "simulate", *LIGHT, "--plot", path)
    assert found.code == 0, found
    words = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert "specdec simulate: qwen3.8-flash, 1 replica" in words and "adaptive p99" in words


def test_profiles_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    note = {"kind": "qualitative", "source": "here", "note": "a test"}
    profile = {
        "summary": "mine",
        "costs": "c",
        "mix": {"k": 1},
        "widths": [1, 2],
        "concurrency": 2,
        "rate": 0.1,
        "prompt": {"low": 1, "high": 1},
        "output": {"low": 3, "high": 3},
    }
    own = {
        "curves": {"k": {**note, "category": {"conditional": [1.0]}}},
        "costs": {"c": {**note, "model": {"base": 1.0, "bands": [{"row": 0.0}]}}},
        "profiles": {"mine": profile},
    }
    path.write_text(json.dumps(own))
    found = specdec(capsys, "simulate", "--profiles", path, "--requests", 5, "--policy", "fixed:2", "--json")
    assert found.code == 0, found
    [fixed] = json.loads(found.stdout)["policies"]
    # the file's only profile; the first token, and then two in one round
    assert (fixed["tokens"], fixed["tokens_per_round"], fixed["acceptance"]) == (15, 2.0, 1.0)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--profile", "qwen3.8-flesh"], ["--profile 'qwen3.8-flesh'", "did you mean qwen3.8-flash"]),
        (["--profile", "zzz"], ["--profile 'zzz'", "profiles: deepseek-v4.1-flash", "qwen3.8-flash", "slow-verify"]),
        (["--recipe", "qwen3.8-flesh"], ["unknown recipe 'qwen3.8-flesh'", "did you mean qwen3.8-flash"]),
        (["--recipe", "qwen-small"], ["unknown recipe 'qwen-small'"]),
        (
            ["--recipe", RECIPE, "--profile", "slow-verify"],
            ["--profile and --recipe contradict each other; give one of the two"],
        ),
        (["--profiles", "nowhere.json"], ["nowhere.json", "No such file"]),
        (["--policy", "best"], ["--policy is 'best'", "adaptive, plain, fixed:W"]),
        (["--policy", "fixed:"], ["'fixed:'"]),
        (["--policy", "fixed:9"], ["width 9 is not prepared", "1, 2, 3, 4, 5, 6"]),
        (["--rate", "0"], ["--rate is 0.0", "above 0"]),
        (["--rate", "nan"], ["--rate is nan"]),
        (["--rate", "1", "--arrivals", "x"], ["--arrivals and --rate contradict each other"]),
        (["--arrivals", "nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
        (["--requests", "0"], ["--requests is 0", "1 to 1000000"]),
        (["--replicas", "0"], ["--replicas is 0"]),
        (["--concurrency", "5000"], ["--concurrency is 5000"]),
        (["--queue-depth", "3"], ["--queue-depth is 3; allowed: 1, 2"]),
        (["--plot", "nowhere/x.svg"], ["--plot 'nowhere/x.svg'", "a folder that exists"]),
        (["--plot", "."], ["--plot '.'"]),
        (
            ["--history-drafts", "--profile", "eight-drafts"],
            ["--history-drafts", "'eight-drafts' has no copies", "qwen3.8-flash"],
        ),
        (["--polcy", "plain"], ["unknown argument '--polcy'", "did you mean --policy?"]),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [] if {"--profile", "--recipe", "--profiles"}.intersection(options) else ["--recipe", RECIPE]
    found = specdec(capsys, "simulate", *named, *options)
    assert found.code == 2
    assert all(part in found.refusal for part in parts), found
    assert not list(tmp_path.iterdir())


def test_bad_arrivals_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"time": 0, "prompt_tokens": 10, "output_tokens": 3}\n{"time": 0}\n')
    found = specdec(capsys, "simulate", "--recipe", RECIPE, "--arrivals", path)
    assert found.code == 2 and f"{path}, line 2: prompt_tokens is missing" in found.refusal
    path.write_text('{"time": 0, "prompt_tokens": 10000, "output_tokens": 3}\n')
    found = specdec(capsys, "simulate", "--recipe", RECIPE, "--arrivals", path)
    assert found.code == 2 and "fill the context of 8192" in found.refusal


def test_nothing_heavy_is_imported(site: Any) -> None:
    probe = (
        "import sys\nfrom specdec.cli.main import main\n"
        "assert main(['simulate', '--recipe', 'qwen3.8-flash', '--requests', '5']) == 0\n"
        "assert not {'torch', 'numpy', 'safetensors', 'tokenizers'} & set(sys.modules)\n"
    )
    result = site.python("-c", probe)
    assert result.code == 0, result
