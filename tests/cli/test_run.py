"""``specdec run`` on a small random checkpoint: text, numbers, where the prompt comes from, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import PROMPT, RECIPE, Outcome, RunCommand, specdec
from small_checkpoint import altered_checkpoint, byte_tokenizer, reshaped, write_small_checkpoint

from specdec.checkpoint.tokenizer import Tokenizer
from specdec.round.arena import Arena
from specdec.round.completion import METADATA_FIELDS, Field


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    return RunCommand(capsys=capsys, checkpoint=checkpoint)


def data_of(outcome: Outcome) -> dict[str, Any]:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    return json.loads(outcome.stdout)


# --- text and numbers ------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_summary_to_stderr(run: RunCommand, checkpoint: Path) -> None:
    text, data = run("--seed", 0), data_of(run("--json", "--seed", 0))
    assert text.code == 0, text
    decoded = Tokenizer.load(checkpoint).decode(data["tokens"])
    assert text.stdout == decoded + "\n"
    assert data["text"] == decoded
    summary = dict(line.split("  ", 1) for line in text.stderr.splitlines())
    assert list(summary) == ["tokens", "rounds", "tokens per round", "acceptance by depth", "speed", "finished by"]
    counts = data["summary"]
    assert summary["tokens"].strip() == f"{counts['tokens']} after a prompt of {counts['prompt_tokens']}"
    assert summary["rounds"].strip() == f"{counts['rounds']} with up to 5 drafts each"
    assert summary["tokens per round"].strip() == f"{counts['tokens_per_round']:.2f}"
    depths = zip(counts["acceptance_by_depth"], counts["judged_by_depth"], strict=True)
    assert summary["acceptance by depth"].split() == [f"{rate:.2f}" if judged else "-" for rate, judged in depths]
    assert summary["finished by"].strip() == counts["finish"]


def test_text_is_streamed(run: RunCommand, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a round is held up, the text of all rounds before it gets written, as far as its characters are whole."""
    stream, expected, written = Tokenizer.load(checkpoint).stream(), [""], list[str]()
    read = Arena.read_frame

    def reading(arena: Arena, frame: int, slots: list[int]) -> list[list[int]]:
        # another thread writes; it needs no further round for that, but may need a moment
        until = time.monotonic() + 20
        while sys.stdout.getvalue() != expected[-1] and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.001)
        written.append(sys.stdout.getvalue())  # type: ignore[attr-defined]
        records = read(arena, frame, slots)
        emitted = records[0][METADATA_FIELDS : METADATA_FIELDS + records[0][Field.EMITTED]]
        expected.append(expected[-1] + stream.push(emitted))
        return records

    monkeypatch.setattr(Arena, "read_frame", reading)
    assert run().code == 0
    assert written == expected[:-1]
    assert len(set(written)) > 10


def test_characters_that_the_terminal_lacks_are_replaced(
    run: RunCommand, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = data_of(run("--json", "--seed", 0))["text"]
    assert not text.isascii()
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run("--seed", 0).code == 0
    assert written.getvalue().decode() == text.encode("ascii", "replace").decode() + "\n"


def test_summary_equals_a_recount_from_the_records(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = []
    read = Arena.read_frame

    def recording(arena: Arena, frame: int, slots: list[int]) -> list[list[int]]:
        records = read(arena, frame, slots)
        rows.extend(records)
        return records

    monkeypatch.setattr(Arena, "read_frame", recording)
    # a high temperature makes both laws flat, so that drafts are accepted
    options = ("--temperature", 30, "--top-k", 0, "--top-p", 1, "--max-new-tokens", 60, "--mtp-draft-tokens", 4)
    options += ("--no-mtp-adaptive-verification",)  # so that every round has all of them
    data = data_of(run("--json", *options))
    summary, (first, *rounds) = data["summary"], rows
    written = [[token for token in row[METADATA_FIELDS:] if token >= 0] for row in rows]
    assert data["tokens"] == [token for tokens in written for token in tokens]
    assert first[Field.OFFERED] == 0
    assert summary["recipe"] == RECIPE
    assert summary["draft_tokens"] == 4
    assert summary["prompt_tokens"] == first[Field.CONSUMED]
    assert summary["tokens"] == len(data["tokens"])
    assert summary["rounds"] == len(rounds)
    assert summary["tokens_per_round"] == (len(data["tokens"]) - 1) / len(rounds)
    assert summary["offered"] == sum(row[Field.OFFERED] for row in rounds)
    assert summary["accepted"] == sum(row[Field.ACCEPTED] for row in rounds) > 10
    judged = [sum(row[Field.OFFERED] > d and row[Field.ACCEPTED] >= d for row in rounds) for d in range(4)]
    accepted = [sum(row[Field.ACCEPTED] > d for row in rounds) for d in range(4)]
    assert (summary["judged_by_depth"], summary["accepted_by_depth"]) == (judged, accepted)
    assert summary["acceptance_by_depth"] == [a / j if j else 0 for a, j in zip(accepted, judged, strict=True)]
    assert summary["tokens_per_second"] == pytest.approx((len(data["tokens"]) - 1) / summary["seconds"])
    assert summary["prompt_seconds"] > 0
    assert summary["finish"] == ("stop" if data["tokens"][-1] == 500 else "length")


def test_defaults_are_five_drafts_and_the_recipe_sampling(run: RunCommand) -> None:
    plain, spelled = (
        run("--json", "--no-mtp-adaptive-verification"),
        run(
            "--json",
            "--mtp-draft-tokens",
            5,
            "--temperature",
            1,
            "--top-k",
            20,
            "--top-p",
            0.95,
            "--min-p",
            0,
            "--seed",
            0,
        ),
    )
    assert data_of(plain)["tokens"] == data_of(spelled)["tokens"]
    assert data_of(plain)["summary"]["draft_tokens"] == 5


def test_drafts_of_a_round_are_chosen_unless_a_seed_or_an_option_fixes_them(run: RunCommand, tmp_path: Path) -> None:
    """A seed stands for a text that repeats, and measured times must not decide it."""
    for options, adaptive in (
        ((), True),
        (("--seed", 0), False),
        (("--seed", 0, "--mtp-adaptive-verification"), True),
        (("--no-mtp-adaptive-verification",), False),
        (("--no-mtp",), False),
    ):
        assert data_of(run("--json", *options))["summary"]["adaptive"] is adaptive
    file = tmp_path / "trace.jsonl"
    assert run("--trace", file, "--max-new-tokens", 60).code == 0
    rounds = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({one["width"] for one in rounds}) > 1
    assert all(one["reason"] for one in rounds[:-1])


def test_grammar_decides_the_text(run: RunCommand, tmp_path: Path) -> None:
    assert data_of(run("--json", "--regex", "(yes|no)", "--seed", 1))["text"] in ("yes", "no")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["left", "right"]}', encoding="utf-8")
    assert json.loads(data_of(run("--json", "--json-schema", schema))["text"]) in ("left", "right")
    rules = tmp_path / "rules.gbnf"
    rules.write_text('root ::= "a" | "b"', encoding="utf-8")
    found = data_of(run("--json", "--ebnf", rules))
    assert found["text"] in ("a", "b") and found["summary"]["draft_tokens"] == 0


def test_copied_drafts_change_no_greedy_text(run: RunCommand) -> None:
    options = ("--json", "--greedy", "--dtype", "float64", "--max-new-tokens", 60)
    assert data_of(run(*options, "--history-drafts"))["tokens"] == data_of(run(*options, "--no-mtp"))["tokens"]


def test_generation_config_sets_the_defaults(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    first = data_of(run("--json", "--greedy"))["tokens"][0]
    generation = {"temperature": None, "top_k": 1, "eos_token_id": [first, 500], "do_sample": True}
    folder = altered_checkpoint(
        checkpoint, tmp_path / "changed", files={"generation_config.json": json.dumps(generation)}
    )
    found = data_of(run("--json", folder=folder))
    assert found["tokens"] == [first]
    assert found["summary"]["finish"] == "stop"
    # an option on the command line wins over the file
    assert data_of(run("--json", "--top-k", 0, "--temperature", 30, "--seed", 3, folder=folder))["tokens"] != [first]


def test_seed_makes_output_repeatable(run: RunCommand) -> None:
    first, again, other = (data_of(run("--json", "--seed", seed))["tokens"] for seed in (7, 7, 8))
    assert first == again != other


def test_greedy_equals_plain_greedy_in_float64(run: RunCommand) -> None:
    options = ("--json", "--greedy", "--dtype", "float64", "--max-new-tokens", 40)
    plain = data_of(run(*options, "--no-mtp"))["tokens"]
    for drafts in (1, 4, 7):
        assert data_of(run(*options, "--mtp-draft-tokens", drafts))["tokens"] == plain
    assert data_of(run(*options, "--seed", 99))["tokens"] == plain


def test_bfloat16_runs(run: RunCommand) -> None:
    assert len(data_of(run("--json", "--dtype", "bfloat16", "--max-new-tokens", 6))["tokens"]) == 6


def without_drafter(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_without_drafts_the_drafter_is_not_loaded(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint without any drafter weights serves plain decoding, and only that."""
    folder = altered_checkpoint(checkpoint, tmp_path / "plain", tensors=without_drafter)
    by_option, by_count = (
        data_of(run("--json", *options, folder=folder)) for options in (["--no-mtp"], ["--mtp-draft-tokens", 0])
    )
    assert by_option["tokens"] == by_count["tokens"]
    assert by_option["summary"]["draft_tokens"] == 0
    assert by_option["summary"]["rounds"] == len(by_option["tokens"]) - 1
    assert by_option["summary"]["acceptance_by_depth"] == []
    assert data_of(run("--json", "--no-mtp", "--mtp-draft-tokens", 0, folder=folder))["tokens"] == by_count["tokens"]
    assert "rounds               23 without drafts" in run("--no-mtp", folder=folder).stderr
    refused = run(folder=folder)
    assert refused.code == 4 and "no tensor mtp." in refused.refusal


def test_one_token_has_no_rounds(run: RunCommand) -> None:
    data = data_of(run("--json", "--max-new-tokens", 1))
    assert (len(data["tokens"]), data["summary"]["rounds"], data["summary"]["tokens_per_round"]) == (1, 0, 0)
    outcome = run("--max-new-tokens", 1)
    assert outcome.code == 0 and "acceptance by depth  no drafts" in outcome.stderr, outcome


def test_context_cuts_the_output(run: RunCommand) -> None:
    data = data_of(run("--json", "--prompt", "@!@!", "--context", 9))
    assert data["summary"]["prompt_tokens"] + len(data["tokens"]) == 9
    assert data["summary"]["finish"] == "context"


# --- where the prompt comes from ---------------------------------------------------------------------------------------


def test_prompt_sources_agree(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve — 数\r\nline\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))
    found = [
        data_of(run("--json", "--seed", 0, *options))
        for options in (["--prompt", text], ["--prompt-file", file], ["--prompt", "-"])
    ]
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]
    prompt_tokens = len(byte_tokenizer().encode(text).ids)
    assert [data["summary"]["prompt_tokens"] for data in found] == [prompt_tokens] * 3


def test_long_prompt_shows_progress(run: RunCommand, checkpoint: Path) -> None:
    prompt = "word " * 200
    total = len(Tokenizer.load(checkpoint).encode(prompt))
    outcome = run("--prompt", prompt, "--max-new-tokens", 2)
    lines = [
        line for line in outcome.stderr.splitlines() if "prompt" in line and "/" in line and "tokens/s" not in line
    ]
    steps = [*range(128, total, 128), total]
    assert lines == [f"specdec: prompt {step}/{total} tokens" for step in steps]
    assert len(steps) > 2
    assert "prompt 1" not in run("--max-new-tokens", 2).stderr


def test_progress_on_a_terminal_rewrites_one_line(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    outcome = run("--prompt", "word " * 200, "--max-new-tokens", 2)
    progress, _, summary = outcome.stderr.rpartition("\r\x1b[K")
    assert progress.startswith("prompt 128/") and "\n" not in progress, outcome
    assert summary.startswith("tokens "), outcome


# --- broken plugins ------------------------------------------------------------------------------------------------------


def propose(drafter: Any, lanes: Any, draft_tokens: int, proposer: Any) -> Any:
    return proposer.put(lanes)


def test_a_plugins_own_error_is_one_line_with_its_place(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_qwen38.drafter.MtpDrafter.propose", propose)
    where = f"{__file__}:{propose.__code__.co_firstlineno + 1} in propose"
    outcome = run()
    assert outcome.code == 1 and "Traceback" not in outcome.stderr, outcome
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("specdec: error: AttributeError: ") and "has no attribute 'put'" in last, outcome
    assert last.endswith(f" ({where}); the output ends after 1 token"), outcome
    monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
    outcome = run()
    assert outcome.code == 1 and outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    assert "    return proposer.put(lanes)" in outcome.stderr and last in outcome.stderr


# --- broken numbers ------------------------------------------------------------------------------------------------------


def all_nan(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return reshaped(name, lambda tensor: torch.full_like(tensor, torch.nan))


def test_logits_that_are_no_distribution_end_with_a_line_and_exit_code_1(
    run: RunCommand, checkpoint: Path, tmp_path: Path
) -> None:
    folder = altered_checkpoint(checkpoint, tmp_path / "nan", tensors=all_nan("lm_head.weight"))
    outcome = run(folder=folder)
    assert (outcome.code, outcome.stdout) == (1, "\n"), outcome
    *summary, last = outcome.stderr.splitlines()
    assert last.startswith("specdec: error: the model's logits were not a distribution (NaN or infinite)"), outcome
    assert last.endswith("the output ends after 0 tokens"), outcome
    assert "finished by          fault" in summary, outcome
    outcome = run("--json", folder=folder)
    data = json.loads(outcome.stdout)
    assert (outcome.code, data["tokens"], data["summary"]["finish"]) == (1, [], "fault")
    assert outcome.stderr.count("\n") == 1


def test_broken_drafter_costs_speed_and_not_text(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    folder = altered_checkpoint(checkpoint, tmp_path / "nan", tensors=all_nan("mtp.fc_embedding.weight"))
    options = ("--json", "--greedy", "--dtype", "float64")
    speculative, plain = data_of(run(*options, folder=folder)), data_of(run(*options, "--no-mtp"))
    assert speculative["tokens"] == plain["tokens"]
    assert speculative["summary"]["accepted"] == 0


# --- a process of its own --------------------------------------------------------------------------------------------------


def start(
    checkpoint: Path, *options: str, python: tuple[str, ...] = ("-m", "specdec.cli.main")
) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}
    command = [sys.executable, *python, "run", RECIPE, "--checkpoint", str(checkpoint), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_interrupt_gives_130_and_no_traceback(checkpoint: Path) -> None:
    process = start(checkpoint, "--prompt", PROMPT, "--max-new-tokens", "3000", "--seed", "1")
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.decode()) == (130, "specdec: interrupted\n")
    # on a terminal the message would otherwise continue the text
    assert stdout.endswith(b"\n")


def test_closed_pipe_is_quiet(checkpoint: Path) -> None:
    process = start(checkpoint, "--prompt", PROMPT, "--max-new-tokens", "3000", "--seed", "1")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    stderr = process.stderr.read()
    assert (process.wait(timeout=60), stderr.decode()) == (0, "")


def test_help_states_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = specdec(capsys, "run", "--help")
    assert outcome.code == 0
    text = " ".join(outcome.stdout.split())
    for words in (
        "output budget (default: 256)",
        "checkpoint folder (default: the small one the plugin ships)",
        "(default and maximum: 'specdec recipes'); 0 runs ordinary decoding",
        "torch device (default: cpu)",
        "CPU threads of one operator (default: 1)",
        "key of the random stream (default: 0)",
        "What is not given comes from the checkpoint's generation_config.json",
    ):
        assert words in text


def test_an_environment_without_numpy_is_not_complained_about(checkpoint: Path) -> None:
    """torch warns of it when it is imported; nothing here needs it."""
    arguments = [
        "run",
        RECIPE,
        "--checkpoint",
        str(checkpoint),
        "--prompt",
        "def f(",
        "--max-new-tokens",
        "4",
        "--json",
    ]
    body = f"import sys; sys.modules['numpy'] = None; {{}}; from specdec.cli.main import main; sys.exit(main({arguments!r}))"
    ours, control = (
        subprocess.run(
            [sys.executable, "-c", body.format(first)], capture_output=True, text=True, timeout=120, check=False
        )
        for first in ("pass", "import torch; torch.empty(1)")
    )
    assert (ours.returncode, ours.stderr) == (0, ""), ours
    assert "Failed to initialize NumPy" in control.stderr
