"""``specdec run --chat``: turns, templates, what is read again, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import RECIPE, Outcome, specdec
from small_checkpoint import altered_checkpoint, byte_tokenizer, write_small_checkpoint
from terminal import Session

from specdec.sampling.params import SamplingParams
from specdec.serving.device import ModelDevice
from specdec.serving.engine import Engine
from specdec.serving.request import Request

#: ChatML with two of the small tokenizer's special tokens as its marks.
BEGIN, END = "<|reserved_0|>", "<|reserved_1|>"
CHATML = (
    "{% for message in messages %}"
    f"{{{{ '{BEGIN}' + message.role + '\\n' + message.content + '{END}' + '\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{BEGIN}assistant\\n' }}}}{{% endif %}}"
)
TOKENIZER = byte_tokenizer()
END_ID = TOKENIZER.token_to_id(END)
GREEDY = ("--greedy", "--dtype", "float64", "--max-new-tokens", "12")


def tokenizer_config(template: Any = CHATML) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps({"chat_template": template, "eos_token": {"content": END}})}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a template."""
    return write_small_checkpoint(tmp_path_factory.mktemp("chat") / "plain")


@pytest.fixture(scope="module")
def templated(plain: Path) -> Path:
    return altered_checkpoint(plain, plain.parent / "templated", files=tokenizer_config())


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a chat with these bytes at standard input."""
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)

    def run(folder: Path, turns: str | bytes, *options: object) -> Outcome:
        data = turns.encode() if isinstance(turns, str) else turns
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        return specdec(capsys, "run", RECIPE, "--checkpoint", folder, "--chat", *options)

    return run


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    return [json.loads(line) for line in outcome.stdout.splitlines()]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Prompts of the requests that an engine gets."""
    found: list[tuple[int, ...]] = []
    submit = Engine.submit

    def submitting(engine: Engine, request: Request) -> Any:
        found.append(request.prompt)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", submitting)
    return found


def ids(text: str) -> tuple[int, ...]:
    """By the tokenizers library alone; special tokens of the text are tokens."""
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


# --- what a turn reads and answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", [(), ("--no-mtp",), ("--mtp-draft-tokens", "3")], ids=" ".join)
def test_every_answer_is_that_of_the_whole_chat_read_at_once(
    chat: Any, templated: Path, prompts: list[tuple[int, ...]], drafting: tuple[str, ...]
) -> None:
    turns = ["def f(x):", "class A:", "import"]
    found = lines(chat(templated, "\n".join(turns), "--json", "--system", "Python", *GREEDY, *drafting))
    expected = ids(f"{BEGIN}system\nPython{END}\n{BEGIN}user\n{turns[0]}{END}\n{BEGIN}assistant\n")
    asked = list(prompts)
    with Engine.load(RECIPE, templated, dtype="float64", context=400, speculative=False, concurrency=1) as engine:
        for number, turn in enumerate(found):
            assert asked[number] == expected
            answer = engine.submit(
                Request(
                    prompt=expected, sampling=SamplingParams(greedy=True), max_new_tokens=12, stop_ids=(500, END_ID)
                )
            ).result()
            assert (turn["tokens"], turn["text"]) == (list(answer.tokens), answer.text)
            assert (turn["turn"], turn["prompt"]) == (number + 1, turns[number])
            ended = answer.tokens[-1] == END_ID
            if number + 1 < len(turns):
                text = f"{'' if ended else END}\n{BEGIN}user\n{turns[number + 1]}{END}\n{BEGIN}assistant\n"
                expected = (*expected, *answer.tokens, *ids(text))


def test_no_turn_reads_the_chat_again(chat: Any, templated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn reads its own tokens and the one that was drawn last, however long the chat is; more than a page here."""
    read: list[int] = []
    prefill = ModelDevice.prefill

    def reading(device: ModelDevice, resident: Any, end: int) -> Any:
        read.append(end - resident.consumed)
        return prefill(device, resident, end)

    monkeypatch.setattr(ModelDevice, "prefill", reading)
    turns = ["def f(x): " * 20, *["class A: " * 4] * 7]
    found = lines(chat(templated, "\n".join(turns), "--json", "--max-new-tokens", 20, "--seed", 3))
    first = len(ids(f"{BEGIN}user\n{turns[0]}{END}\n{BEGIN}assistant\n"))
    later = len(ids(f"\n{BEGIN}user\n{turns[1]}{END}\n{BEGIN}assistant\n"))
    ends = [turn["tokens"][-1] == END_ID for turn in found]
    # the mark that the model did not write itself is read too
    expected = [first, *(1 + later + (not ended) for ended in ends[:-1])]
    assert sum(read) == sum(expected)
    assert [turn["summary"]["prompt_tokens"] - turn["summary"]["reused_tokens"] for turn in found] == expected
    assert found[-1]["summary"]["prompt_tokens"] > 300


def test_what_was_read_stays_until_the_context_is_full(chat: Any, plain: Path) -> None:
    turn = "class A: def f(x): return x + 1 # comment " * 3
    outcome = chat(plain, "\n".join([turn] * 30), "--json", "--max-new-tokens", 12, "--context", 900)
    assert outcome.code == 5
    summaries = [json.loads(line)["summary"] for line in outcome.stdout.splitlines()]
    assert summaries[-1]["prompt_tokens"] > 700
    read = [one["prompt_tokens"] - one["reused_tokens"] for one in summaries]
    assert read[0] == len(ids(turn)) and set(read[1:]) <= {len(ids(turn)), len(ids(turn)) + 1}


def test_a_mark_that_ends_an_answer_is_not_doubled(chat: Any, templated: Path, prompts: list[tuple[int, ...]]) -> None:
    """The template's end mark stops an answer, is no text of it, and is in the next prompt once."""
    options = ("--greedy", "--logit-bias", f"{END_ID}:100")
    found = lines(chat(templated, "a\nb\n", "--json", *options))
    assert [turn["tokens"] for turn in found] == [[END_ID]] * 2
    assert [turn["text"] for turn in found] == ["", ""]
    assert [turn["summary"]["finish"] for turn in found] == ["stop", "stop"]
    question = f"{BEGIN}user\na{END}\n{BEGIN}assistant\n"
    assert prompts[1] == ids(f"{question}{END}\n{BEGIN}user\nb{END}\n{BEGIN}assistant\n")
    assert prompts[1].count(END_ID) == 3


def test_another_end_of_text_gives_way_to_the_template(
    chat: Any, templated: Path, prompts: list[tuple[int, ...]]
) -> None:
    lines(chat(templated, "a\nb\n", "--json", "--greedy", "--logit-bias", "500:100"))
    assert prompts[1] == ids(f"{BEGIN}user\na{END}\n{BEGIN}assistant\n{END}\n{BEGIN}user\nb{END}\n{BEGIN}assistant\n")


def test_as_many_stop_ids_as_there_may_be_leave_none_for_the_template(
    chat: Any, templated: Path, tmp_path: Path
) -> None:
    settings = json.dumps({"eos_token_id": list(range(300, 308))})
    folder = altered_checkpoint(templated, tmp_path / "full", files={"generation_config.json": settings})
    outcome = chat(folder, "a\n", *GREEDY)
    assert outcome.code == 4 and outcome.stderr.startswith("specdec: error: the checkpoint has 8 stop ids"), outcome


def test_a_template_that_changes_answers(
    chat: Any, plain: Path, tmp_path: Path, prompts: list[tuple[int, ...]]
) -> None:
    template = CHATML.replace("message.content", "(message.content | trim | upper)")
    folder = altered_checkpoint(plain, tmp_path / "upper", files=tokenizer_config(template))
    answer = lines(chat(folder, "a\nb\n", "--json", *GREEDY))[0]["text"]
    changed = answer.strip().upper()
    assert changed != answer
    question = ids(f"{BEGIN}user\nA{END}\n{BEGIN}assistant\n")
    assert prompts[1] == question + ids(f"{changed}{END}\n{BEGIN}user\nB{END}\n{BEGIN}assistant\n")


def test_without_a_template_texts_follow_each_other(chat: Any, plain: Path, prompts: list[tuple[int, ...]]) -> None:
    found = lines(chat(plain, "def f(\r\n\nreturn\n", "--json", "--system", "# Python\n", *GREEDY))
    assert prompts[0] == ids("# Python\ndef f(")
    assert prompts[1] == (*prompts[0], *found[0]["tokens"], *ids("return"))
    assert len(found) == 2
    # what ended an answer is no part of the text
    lines(chat(plain, "a\nb", "--json", "--greedy", "--logit-bias", "500:100"))
    assert prompts[3] == (*ids("a"), *ids("b"))


def test_text_behind_a_stop_string_is_no_part_of_the_chat(
    chat: Any, plain: Path, prompts: list[tuple[int, ...]]
) -> None:
    whole = lines(chat(plain, "def f(", "--json", *GREEDY))[0]["text"]
    stop = whole[3:5]
    cut = lines(chat(plain, "def f(\nreturn", "--json", "--stop", stop, *GREEDY))[0]["text"]
    assert cut == whole[: whole.index(stop)]
    assert prompts[2] == (*prompts[1], *ids(cut), *ids("return"))


def test_prompt_options_give_the_first_turn(chat: Any, plain: Path, tmp_path: Path) -> None:
    piped = chat(plain, "def f(\nreturn", "--json", *GREEDY)
    file = tmp_path / "turn.txt"
    file.write_text("def f(", encoding="utf-8")
    answers = [[turn["text"] for turn in lines(piped)]]
    for option in (("--prompt", "def f("), ("--prompt-file", file)):
        answers.append([turn["text"] for turn in lines(chat(plain, "return", "--json", *option, *GREEDY))])
    assert answers[0] == answers[1] == answers[2]
    assert len(lines(chat(plain, "", "--json", "--prompt", "def f(", *GREEDY))) == 1


def test_text_goes_to_stdout_and_one_summary_to_stderr(chat: Any, templated: Path) -> None:
    data = lines(chat(templated, "a\nb\n", "--json", *GREEDY))
    outcome = chat(templated, "a\nb\n", *GREEDY)
    assert outcome.code == 0
    assert outcome.stdout == "".join(turn["text"] + "\n" for turn in data)
    summary = dict(line.split("  ", 1) for line in outcome.stderr.splitlines())
    assert list(summary) == ["tokens", "rounds", "tokens per round", "acceptance by depth", "speed"]
    read = sum(turn["summary"]["prompt_tokens"] - turn["summary"]["reused_tokens"] for turn in data)
    count = sum(len(turn["tokens"]) for turn in data)
    assert summary["tokens"].strip() == f"{count} in 2 turns, which had {read} to read"


def test_a_turns_summary_counts_this_turn(chat: Any, templated: Path) -> None:
    for turn in lines(chat(templated, "a\nb\nc", "--json", "--logprobs", 1, *GREEDY)):
        summary = turn["summary"]
        assert summary["tokens"] == len(turn["tokens"]) == len(turn["logprobs"])
        assert summary["tokens_per_round"] == pytest.approx((summary["tokens"] - 1) / summary["rounds"])


def test_metrics_and_trace_are_of_the_whole_chat(chat: Any, plain: Path, tmp_path: Path) -> None:
    metrics, trace = tmp_path / "metrics.json", tmp_path / "trace.jsonl"
    assert chat(plain, "a\nb", "--metrics", metrics, "--trace", trace, *GREEDY).code == 0
    assert json.loads(metrics.read_text(encoding="utf-8"))["requests"]["finished"]["length"] == 2
    assert trace.read_text(encoding="utf-8").count("\n") > 4


def test_metrics_are_written_however_a_chat_ends(chat: Any, plain: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    outcome = chat(plain, b"a\n\xff\n", "--metrics", metrics, *GREEDY)
    assert (outcome.code, outcome.stderr.splitlines()[0].split()[0]) == (2, "tokens"), outcome
    assert json.loads(metrics.read_text(encoding="utf-8"))["requests"]["finished"]["length"] == 1


def test_grammar_holds_for_every_answer(chat: Any, templated: Path) -> None:
    found = lines(chat(templated, "a\nb", "--json", "--regex", "(yes|no)"))
    assert all(turn["text"] in ("yes", "no") for turn in found)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "options", "words"),
    [
        ("a", ("--prompt", "-"), "--prompt - and --chat would both read standard input"),
        ("a", ("--prompt-logprobs", 1, "--json"), "--prompt-logprobs would read the whole chat again"),
        ("a", ("--system", "\udcff"), "--system: not UTF-8 text"),
        ("", (), "no turn; standard input is empty"),
        ("\n\n", (), "no turn; standard input is empty"),
        (b"\xff\n", (), "line 1 of standard input: not UTF-8 text"),
        ("a", ("--regex", "("), "regex is not valid"),
        ("a", ("--context", 4097), "--context is 4097"),
    ],
)
def test_refused(chat: Any, plain: Path, turns: str | bytes, options: tuple[object, ...], words: str) -> None:
    outcome = chat(plain, turns, *options)
    assert outcome.code == 2 and words in outcome.refusal, outcome


def test_a_system_text_needs_a_chat(capsys: pytest.CaptureFixture[str], plain: Path) -> None:
    outcome = specdec(capsys, "run", RECIPE, "--checkpoint", plain, "--prompt", "a", "--system", "b")
    assert outcome.code == 2 and "--system is the first message of a chat; add --chat" in outcome.refusal


@pytest.mark.parametrize(
    ("template", "code", "words"),
    [
        ("{% if %}", 4, "chat_template is no template, line 1"),
        ("{{ messages[7].content }}", 4, "chat_template fails with UndefinedError"),
        ("{{ raise_exception('no system\nplease') }}", 2, "chat template refuses this chat: no system / please"),
        (7, 4, "chat_template is a int, needs text"),
        ([{"name": "tools", "template": "x"}, {"name": "rag", "template": "y"}], 4, "it has: tools, rag"),
    ],
)
def test_templates_that_do_not_serve(
    chat: Any, plain: Path, tmp_path: Path, template: Any, code: int, words: str
) -> None:
    folder = altered_checkpoint(plain, tmp_path / "bad", files=tokenizer_config(template))
    outcome = chat(folder, "a")
    assert outcome.code == code and words in outcome.refusal, outcome


def test_a_template_without_jinja(chat: Any, templated: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    outcome = chat(templated, "a")
    assert outcome.code == 2 and "install it: pip install 'specdec-core[chat]'" in outcome.refusal
    assert chat(plain, "a", *GREEDY).code == 0


def test_an_old_jinja_is_refused(chat: Any, templated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    outcome = chat(templated, "a")
    assert outcome.code == 2 and "jinja2 3.1.5 is too old" in outcome.refusal


def test_a_line_that_is_no_text_ends_a_chat(chat: Any, plain: Path) -> None:
    outcome = chat(plain, b"a\n\xff\n", "--json", *GREEDY)
    assert outcome.code == 2 and outcome.stdout.count("\n") == 1
    assert outcome.stderr.startswith("specdec: error: line 2 of standard input: not UTF-8 text"), outcome


# --- how it ends ---------------------------------------------------------------------------------------------------------


def test_a_full_context_ends_the_chat(chat: Any, plain: Path) -> None:
    """By an answer that reaches its end, and by a turn that leaves no room for one."""
    outcome = chat(plain, "a\nb\nc", "--context", 20, *GREEDY)
    assert outcome.code == 5, outcome
    *summary, last = outcome.stderr.splitlines()
    assert last == (
        "specdec: error: the answer ends here; the context of 20 tokens is full; raise --context (the checkpoint has up to "
        "4096) or begin a new chat"
    )
    assert summary[0].startswith("tokens ")
    outcome = chat(plain, "a\n" + "class A: " * 30, "--context", 40, *GREEDY)
    tokens = len(ids("class A: " * 30)) + 13
    assert outcome.code == 5
    assert f"with this turn the chat has {tokens} tokens; the context of 40 tokens is full" in outcome.stderr


def test_a_whole_checkpoint_full(chat: Any, plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 64
    folder = altered_checkpoint(plain, tmp_path / "short", config=config)
    outcome = chat(folder, "class A: " * 40)
    assert outcome.code == 5
    assert outcome.stderr.endswith("the context of 64 tokens, all that the checkpoint has, is full; begin a new chat\n")


def test_a_fault_ends_the_chat(chat: Any, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: ModelDevice, plan: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(ModelDevice, "submit", failing)
    outcome = chat(plain, "a\nb", *GREEDY)
    assert outcome.code == 1 and outcome.stdout == "\n", outcome
    assert outcome.stderr.splitlines()[0].startswith("specdec: error: RuntimeError: no device"), outcome


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}


def on_a_terminal(folder: Path, *options: str) -> Session:
    arguments = ("-m", "specdec.cli.main", "run", RECIPE, "--checkpoint", str(folder), "--chat", *options)
    return Session.start(arguments, terminal=("stdin", "stdout", "stderr"), environment=environment())


def test_on_a_terminal_turns_are_asked_for(plain: Path) -> None:
    session = on_a_terminal(plain, "--greedy", "--max-new-tokens", "8")
    session.expect("> ")
    session.type("def f(\n")
    session.expect("> ")
    session.type("\n")  # no turn
    session.expect("> ")
    session.type("\x04")
    assert session.finish() == 0, session.shown
    assert "8 in 1 turns" in session.shown


def test_an_interrupt_ends_an_answer_and_then_the_chat(plain: Path) -> None:
    session = on_a_terminal(plain, "--seed", "1", "--max-new-tokens", "3000", "--ignore-eos")
    session.expect("> ")
    session.type("def f(\n")
    session.expect("tokens/s")
    session.type("\x03")
    session.expect("specdec: this turn was interrupted; Ctrl-C again leaves")
    session.expect("> ")
    session.type("class A:\n")  # the chat goes on
    session.expect("tokens/s")
    session.type("\x03")
    session.expect("interrupted")
    session.expect("> ")
    session.type("\x03")
    assert session.finish() == 130, session.shown
    assert session.shown.endswith("\r\nspecdec: interrupted\r\n")
    assert "Traceback" not in session.shown


def test_an_interrupt_ends_a_piped_chat(plain: Path) -> None:
    command = [sys.executable, "-m", "specdec.cli.main", "run", RECIPE, "--checkpoint", str(plain), "--chat"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "3000", "--seed", "1"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"def f(\nreturn\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.decode()) == (130, "specdec: interrupted\n")
    assert stdout.endswith(b"\n")


# --- a prompt from standard input, without a chat ------------------------------------------------------------------------


def test_a_prompt_is_read_from_a_pipe(
    capsys: pytest.CaptureFixture[str], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for options in ((), ("--prompt", "-"), ("--prompt", "naïve\n")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("naïve\n".encode()), encoding="ascii"))
        outcome = specdec(capsys, "run", RECIPE, "--checkpoint", plain, "--json", *GREEDY, *options)
        assert (outcome.code, outcome.stderr) == (0, ""), outcome
        found.append(json.loads(outcome.stdout)["tokens"])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "standard input: the prompt is empty"), (b"\xff", "standard input: not UTF-8 text")]
)
def test_what_a_pipe_brings_is_checked(
    capsys: pytest.CaptureFixture[str], plain: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    outcome = specdec(capsys, "run", RECIPE, "--checkpoint", plain)
    assert outcome.code == 2 and words in outcome.refusal


@pytest.mark.parametrize("stdin", [None, io.StringIO()], ids=["closed", "a terminal"])
def test_a_terminal_is_no_prompt(
    capsys: pytest.CaptureFixture[str], plain: Path, monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO | None
) -> None:
    if stdin is not None:
        monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", stdin)
    outcome = specdec(capsys, "run", RECIPE, "--checkpoint", plain)
    assert outcome.code == 2
    assert "no prompt; give --prompt TEXT or --prompt-file FILE, pipe it in, or add --chat" in outcome.refusal
