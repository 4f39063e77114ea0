"""Error messages of the core: what is wrong and where, then what is allowed or what to do, in one line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from doc_pages import commands, expressions, numbers
from doc_pages import messages as page

from specdec.cli.main import COMMANDS
from specdec.errors import CapacityError, UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.sampling.params import SamplingParams
from specdec.serving.request import Request

MESSAGES = page.messages()


def ids(message: page.Message) -> str:
    return f"{message.module}:{message.line}"


def test_the_source_has_many_messages_and_they_are_found() -> None:
    assert len(MESSAGES) > 300
    assert {message.error for message in MESSAGES} >= {"UsageError", "CheckpointError", "CapacityError", "DeviceError"}


@pytest.mark.parametrize("message", MESSAGES, ids=ids)
def test_form_of_a_message(message: page.Message) -> None:
    assert "\n" not in message.text
    assert not message.text.endswith((".", "!", ":", ";")), "one line without a full stop"
    assert message.text == " ".join(message.text.split()), "words one space apart"
    assert not re.search(r"\b(?:please|oops|sorry|invalid)\b", message.text, re.IGNORECASE), "say what is wrong"
    assert len(message.wrong) >= 6 or "{" in message.wrong, "say what is wrong"
    # what to do about a damaged file, a declaration or a plugin is always the same, and the page says it
    assert message.cure or page.general_cure(message), "say what is allowed or what to do, after a semicolon"


def test_what_differs_in_a_message_is_named() -> None:
    """Functions, ``self`` and lists say nothing to a reader; constants have a value."""
    unnamed = {"str", "map", "join", "self", "self name", *(name.lower() for name in ("VERSION_FLOOR", "SAMPLERS"))}
    for message in MESSAGES:
        assert not unnamed.intersection(re.findall(r"\{([^{}]*)\}", message.text)), message.text
    assert not [message.text for message in MESSAGES if message.cure and re.fullmatch(r"\{[^{}]*\}", message.cure)]


def test_a_class_is_described_by_its_own_docstring() -> None:
    listed = page.message_tables()
    for error in {message.error for message in MESSAGES} - {"SpecdecError"}:
        summary = listed[listed.index(f"### {error} (") :].split("\n\n")[1]
        assert not summary.startswith("Base of every error"), error
    assert "### OutputError (exit code 1)\n\nStandard output or a file cannot be written" in listed


def test_numbers_name_options_of_commands_apart_from_names_in_python() -> None:
    options, python = numbers.number_tables().split("What is given in Python only:")
    names = re.findall(r"^\| `([^`]+)` \|", options, re.MULTILINE)
    known = {option for name in COMMANDS for option in commands.parser_of(name)._option_string_actions}
    assert names and set(names) <= known
    assert "| `--logprobs` | `logprobs` of `Request` | 0 to 20 |" in options
    assert "| `--snapshot-bytes` | `snapshot_bytes` of `PreparationConfig` | 0 or more |" in options, "named by a loop"
    assert "| `--mtp-draft-tokens` | `max_draft_tokens` of `PreparationConfig` | 0 to" in options, "of another name"
    assert "`{widest width}` or more" in options
    assert "| `specdec.catalog.RoundShape` | `packed_rows` | `{batch}` to `{rows}` |" in python


@pytest.mark.parametrize(
    ("expression", "made"),
    [
        ("', '.join(map(str, widths))", "{widths}"),
        ("widths[-1]", "{widest width}"),
        ("self.name", "{name}"),
        ("type(error).__name__", "{type of error}"),
        ("', '.join(KINDS)", "row, paged"),
        ("LIMIT", "16"),
        ("'it' if one else 'them'", "it | them"),
        ("f': {error}' if error else ''", "[: {error}]"),
        ("_cure(name)", "do {this} | do that"),
        ("listed((0, *depths))", "0, {depths}"),
        ("error.strerror or error", "{reason}"),
    ],
)
def test_expressions_are_shown_in_words(expression: str, made: str, tmp_path: Path) -> None:
    source = "KINDS = ('row', 'paged')\nLIMIT = 16\ndef _cure(this):\n    return f'do {this}' if this else 'do that'\n"
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    texts = expressions.constants_of(tmp_path)
    texts |= expressions.helpers_of(ast.parse(source), texts)
    assert expressions.shown(ast.parse(expression, mode="eval").body, texts) == made


def test_every_message_has_something_to_do_on_the_page() -> None:
    table = page.message_tables()
    assert "| ** |" not in table
    for message in MESSAGES:
        assert page.code(message.wrong) in table


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SamplingParams(top_p=2.0), UsageError),
        (lambda: Request(prompt=()), UsageError),
        (lambda: Request(prompt=(1,), stop=("",)), UsageError),
        (lambda: PreparationConfig.for_recipe(recipe_book().recipe("qwen3.8-flash"), sampler="none"), UsageError),
    ],
)
def test_what_is_raised_is_one_of_those_listed(make: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make()  # type: ignore[operator]
    assert any(matches(message.text, str(caught.value)) for message in MESSAGES), caught.value


def matches(template: str, text: str) -> bool:
    """Whether a template with names in braces is that of a text."""
    pattern = ".*".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", template))
    return re.fullmatch(pattern, text) is not None


def test_messages_are_read_from_every_shape_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text(
        "CURE = 'do that instead'\n"
        "def one(name, values):\n"
        "    raise UsageError(f'{name} is {values[0]!r}; {CURE}')\n"
        "def two(path, *, error: type[SpecdecError] = CheckpointError):\n"
        "    message = f'{path.name}: cannot be read: {path.error.strerror or path}'\n"
        "    raise error(message)\n"
        "def three(count):\n"
        "    return CapacityError(f'{count + 1} pages are needed, but {len(count)} are free')\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(page, "CORE", tmp_path)
    family = {"SpecdecError", "UsageError", "CheckpointError", "CapacityError"}
    found = {message.error: message for message in page._of_module(tmp_path / "module.py", family, {})}
    assert found["UsageError"].wrong == "{name} is {values}"
    assert found["UsageError"].cure == "do that instead"
    assert found["CheckpointError"].text == "{path name}: cannot be read: {reason}"
    assert found["CapacityError"].cure == "but {number of count} are free"
    assert CapacityError.exit_code == found["CapacityError"].exit_code
