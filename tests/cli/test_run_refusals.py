"""What ``specdec run`` refuses: one line on stderr, the documented exit code, nothing on stdout, no traceback."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import RECIPE, RunCommand
from small_checkpoint import altered_checkpoint, byte_tokenizer, reshaped, write_small_checkpoint

from specdec.checkpoint.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    return RunCommand(capsys=capsys, checkpoint=checkpoint)


# --- options and prompts ---------------------------------------------------------------------------------------------

REFUSED_OPTIONS = [
    (
        ["--mtp-draft-tokens", "8"],
        ["--mtp-draft-tokens 8", "between 0 and 7", f"recipe '{RECIPE}'", "source: gated delta"],
    ),
    (["--mtp-draft-tokens", "-1"], ["--mtp-draft-tokens -1", "between 0 and 7"]),
    (["--mtp-draft-tokens", "two"], ["--mtp-draft-tokens is 'two'; give a whole number"]),
    (["--no-mtp", "--mtp-draft-tokens", "2"], ["--no-mtp and --mtp-draft-tokens 2", "drop one"]),
    (["--prompt", ""], ["--prompt: the prompt is empty"]),
    (["--prompt", "\udcff"], ["--prompt: not UTF-8 text"]),
    (["--prompt-file", "nowhere.txt"], ["--prompt-file 'nowhere.txt': No such file"]),
    (["--prompt-file", "."], ["--prompt-file '.': Is a directory"]),
    (["--prompt-file", "top_k"], ["--prompt-file 'top_k': No such file"]),
    (
        ["--prompt", "a", "--prompt-file", "b"],
        ["--prompt-file and --prompt contradict each other; give one of the two"],
    ),
    (["--temperature", "0"], ["--temperature is 0, but", "must be above 0", "use --greedy"]),
    (["--temperature", "nan"], ["--temperature", "nan"]),
    (["--temperature", "-0.5"], ["--temperature", "-0.5", "above 0"]),
    (["--temperature", "inf"], ["--temperature", "inf"]),
    (["--temperature", "warm"], ["--temperature is 'warm'; give a number"]),
    (["--top-p", "0"], ["--top-p is 0.0", "above 0 and at most 1"]),
    (["--top-p", "2"], ["--top-p", "2.0", "above 0 and at most 1"]),
    (["--top-p", "nan"], ["--top-p", "nan"]),
    (["--top-k", "-1"], ["--top-k", "-1", "from 0"]),
    (["--top-k", "1.5"], ["--top-k is '1.5'; give a whole number"]),
    (["--min-p", "1.5"], ["--min-p", "1.5", "from 0 (off) to 1"]),
    (["--seed", "-1"], ["--seed is -1", "from 0 to 2^63 - 1"]),
    (["--seed", str(2**63)], ["--seed", str(2**63)]),
    (["--seed", "x"], ["--seed is 'x'; give a whole number"]),
    (["--greedy", "--temperature", "0.7"], ["--greedy", "--temperature 0.7 would have no effect"]),
    (["--greedy", "--top-k", "3", "--top-p", "0.5"], ["--greedy", "--top-k 3, --top-p 0.5"]),
    (["--max-new-tokens", "0"], ["--max-new-tokens is 0; allowed: 1 or more"]),
    (["--max-new-tokens", "-5"], ["--max-new-tokens is -5"]),
    (["--threads", "0"], ["--threads is 0; allowed: 1 to 1024"]),
    (["--threads", "100000"], ["--threads is 100000"]),
    (["--device", "nonsense"], ["--device 'nonsense' is not supported; allowed: cpu, cuda"]),
    (["--device", "meta"], ["--device 'meta' is not supported"]),
    (["--device", "cpu:x"], ["--device 'cpu:x' is not usable here"]),
    (["--device", "cuda:99"], ["--device 'cuda:99' is not usable here"]),
    (["--dtype", "int4"], ["--dtype is 'int4'; allowed: float32, float64, bfloat16"]),
    (["--context", "0"], ["--context is 0; allowed: 2 or more"]),
    (["--context", "5"], ["--context 5 leaves room for at most 4", "raise --context"]),
    (["--context", "4097"], ["--context is 4097", "max_position_embeddings is 4096"]),
    (
        ["--speculative-token-capacity", "3"],
        ["--speculative-token-capacity 3", "at least 6", "widest round has 6 rows"],
    ),
    (["--history-drafts", "--no-mtp"], ["--history-drafts has no effect: nothing is drafted"]),
    (["--json-schema", "nowhere.json"], ["--json-schema 'nowhere.json': No such file or directory"]),
    (["--ebnf", "."], ["--ebnf '.': Is a directory"]),
    (["--regex", "("], ["regex is not valid: unclosed group"]),
    (["--trace", "nowhere/file"], ["--trace 'nowhere/file': the folder 'nowhere' does not exist"]),
    (["--temprature", "1"], ["unknown argument '--temprature'; did you mean --temperature?"]),
]


@pytest.mark.parametrize(
    ("options", "words"), REFUSED_OPTIONS, ids=[" ".join(options)[:40] for options, _ in REFUSED_OPTIONS]
)
def test_refused_options(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*options)
    assert outcome.code == 2, outcome
    line = outcome.refusal
    for word in words:
        assert word in line, outcome
    # the option is named as it was typed, and once, unless the cure names it again
    option = options[0].partition("=")[0]
    assert len(re.findall(rf"{option}(?![\w-])", line.replace(f"raise {option}", ""))) == 1, outcome
    field = option.removeprefix("--").replace("-", "_")
    assert "_" not in field or field not in line, outcome


def test_unknown_recipe_offers_a_close_match(run: RunCommand) -> None:
    outcome = run(recipe="qwen3.8-flsh")
    assert outcome.code == 2
    assert "unknown recipe 'qwen3.8-flsh'; did you mean qwen3.8-flash?" in outcome.refusal


def test_prompt_that_is_no_text(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("naïve".encode("latin-1"))
    outcome = run("--prompt-file", file)
    assert outcome.code == 2 and f"--prompt-file {str(file)!r}: not UTF-8 text" in outcome.refusal
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert f"--prompt-file {str(empty)!r}: the prompt is empty" in run("--prompt-file", empty).refusal
    for content, words in ((b"\xff", "--prompt -: not UTF-8 text"), (b"", "--prompt -: the prompt is empty")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        outcome = run("--prompt", "-")
        assert outcome.code == 2 and words in outcome.refusal


def test_prompt_longer_than_the_checkpoint_context(run: RunCommand, checkpoint: Path) -> None:
    prompt = "@" * 5000
    tokens = len(Tokenizer.load(checkpoint).encode(prompt))
    assert tokens > 4096
    outcome = run("--prompt", prompt)
    assert outcome.code == 2
    assert (
        f"the prompt has {tokens} tokens; the checkpoint's context of 4096 leaves room for at most 4095"
        in outcome.refusal
    )


# --- checkpoints ---------------------------------------------------------------------------------------------------------

LAYER = "model.language_model.layers.0."
WRONG_SHAPES = [
    ("lm_head.weight", "[511, 128]", "[512, 128]"),
    ("model.language_model.embed_tokens.weight", "[511, 128]", "[512, 128]"),
    (LAYER + "linear_attn.A_log", "[5]", "[6]"),
    (LAYER + "mlp.gate.weight", "[15, 128]", "[16, 128]"),
    ("model.language_model.layers.3.self_attn.indexer.index_qk_proj.weight", "[79, 128]", "[80, 128]"),
    ("mtp.fc_hidden.weight", "[127, 128]", "[128, 128]"),
    ("mtp.layers.0.self_attn.q_norm.weight", "[31]", "[32]"),
]


@pytest.mark.parametrize(("name", "found", "expected"), WRONG_SHAPES)
def test_wrong_shape(run: RunCommand, checkpoint: Path, tmp_path: Path, name: str, found: str, expected: str) -> None:
    folder = altered_checkpoint(checkpoint, tmp_path / "bad", tensors=reshaped(name, lambda tensor: tensor[:-1]))
    outcome = run(folder=folder)
    assert outcome.code == 4, outcome
    for word in (str(folder), name, found, expected):
        assert word in outcome.refusal


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        (LAYER + "mlp.experts.down_proj", "[16, 128, 31]", "[16, 128, 32]"),
        (LAYER + "mlp.experts.gate_up_proj", "[16, 32, 127]", "[16, 32, 128]"),
        ("mtp.layers.0.mlp.experts.down_proj", "[16, 128, 31]", "[16, 128, 32]"),
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight", "15]", "16]"),
    ],
)
def test_wrong_inner_width_of_experts_and_table(
    run: RunCommand, checkpoint: Path, tmp_path: Path, name: str, found: str, expected: str
) -> None:
    """Experts are stored together and the table in parts; the width of each is compared with the configuration all the same."""
    folder = altered_checkpoint(checkpoint, tmp_path / "bad", tensors=reshaped(name, lambda tensor: tensor[..., :-1]))
    outcome = run(folder=folder)
    assert outcome.code == 4, outcome
    for word in (str(folder), name.removesuffix(".down_proj").removesuffix(".gate_up_proj"), found, expected):
        assert word in outcome.refusal


def test_missing_drafter_tensor(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    name = "mtp.layers.0.self_attn.o_proj.weight"
    folder = altered_checkpoint(checkpoint, tmp_path / "bad", tensors=lambda tensors: tensors.pop(name))
    outcome = run(folder=folder)
    assert outcome.code == 4 and f"no tensor {name}" in outcome.refusal


def test_missing_and_truncated_weights(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    outcome = run(folder=nowhere)
    assert (
        outcome.code == 4
        and f"{nowhere}: no such checkpoint directory; name a folder with config.json and safetensors"
        in outcome.refusal
    )
    content = (checkpoint / "model.safetensors").read_bytes()
    for number, (files, words) in enumerate(
        [
            ({"model.safetensors": None}, ["neither model.safetensors nor model.safetensors.index.json found"]),
            ({"model.safetensors": content[:-1000]}, ["model.safetensors: truncated inside tensor", "the file has"]),
            ({"model.safetensors": content[:100]}, ["model.safetensors", "cut off inside its header"]),
            ({"model.safetensors": b""}, ["model.safetensors", "0 bytes"]),
            (
                {"config.json": None},
                ["config.json: cannot be read: No such file", "; name a folder with config.json and safetensors"],
            ),
            ({"config.json": "{"}, ["config.json: not valid JSON"]),
            ({"config.json": "{}"}, ["model_type is None", "accepts qwen4_exp"]),
            ({"tokenizer.json": None}, ["tokenizer.json: no such file"]),
            ({"tokenizer.json": '{"model": 3}'}, ["tokenizer.json: not a usable tokenizer"]),
            ({"generation_config.json": "{"}, ["generation_config.json: not valid JSON"]),
            ({"generation_config.json": "[1]"}, ["generation_config.json: holds a JSON list, needs an object"]),
            ({"generation_config.json": '{"top_p": "much"}'}, ["generation_config.json: top_p is 'much'"]),
            ({"generation_config.json": '{"temperature": 0}'}, ["generation_config.json: temperature is 0"]),
            ({"generation_config.json": '{"eos_token_id": "x"}'}, ["generation_config.json: eos_token_id is ['x']"]),
        ]
    ):
        outcome = run(folder=altered_checkpoint(checkpoint, tmp_path / f"bad{number}", files=files))
        assert outcome.code == 4, outcome
        for word in words:
            assert word in outcome.refusal, outcome


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, ["model_type is 'llama'", f"recipe '{RECIPE}' accepts qwen4_exp"]),
        ({"text_config": 3}, ["text_config is 3"]),
        ({"text_config": {"max_position_embeddings": "long"}}, ["max_position_embeddings is 'long'"]),
        ({"text_config": {}}, ["config.json: missing vocab_size"]),
    ],
)
def test_configuration_of_something_else(
    run: RunCommand, checkpoint: Path, tmp_path: Path, config: dict[str, Any], words: list[str]
) -> None:
    outcome = run(folder=altered_checkpoint(checkpoint, tmp_path / "bad", config=config))
    assert outcome.code == 4, outcome
    for word in words:
        assert word in outcome.refusal


def test_tokenizer_of_another_model(run: RunCommand, checkpoint: Path, tmp_path: Path) -> None:
    """Ids that the model has no embedding for are named before anything runs."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["zebra"])
    folder = altered_checkpoint(checkpoint, tmp_path / "bad", files={"tokenizer.json": tokenizer.to_str()})
    outcome = run("--prompt", "a zebra", folder=folder)
    assert outcome.code == 2 and "prompt token 512 is outside the vocabulary of 512" in outcome.refusal


def test_wrong_options_are_refused_without_loading_torch(checkpoint: Path) -> None:
    script = (
        "import sys; from specdec.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    for options in (
        ["--prompt", "x", "--mtp-draft-tokens", "9"],
        ["--prompt", "x", "--temperature", "0"],
        ["--prompt-file", "/nowhere"],
    ):
        command = [sys.executable, "-c", script, "run", RECIPE, "--checkpoint", str(checkpoint), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "False\n"), done
