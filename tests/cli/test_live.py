"""The live line: what it says, how often, where it shows, and that no text is ever harmed by it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from attrs import define
from command import PROMPT, RECIPE
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoint import write_small_checkpoint
from terminal import COLUMNS, Screen, Session

from specdec.cli import live, output
from specdec.cli.live import LiveLine
from specdec.round.completion import METADATA_FIELDS, Completion, Field, Finish
from specdec.serving.request import Emission

LINE = re.compile(
    r"\d+ tokens  [\d.]+/round  (acceptance [\d.]+ \((last \d+ rounds|1 round)\)|no drafts)  [\d.]+ tokens/s"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("live") / "checkpoint")


def emission(tokens: int, *, verified: int = 0, accepted: int = 0) -> Emission:
    record = [0] * METADATA_FIELDS
    record[Field.VERIFIED], record[Field.ACCEPTED] = verified, accepted
    return Emission(0, (1,) * tokens, Finish.NONE, Completion.parse(record))


# --- a terminal in the process ---------------------------------------------------------------------------------------


@define
class Stream:
    """A standard stream that is a terminal with this screen."""

    screen: Screen
    encoding: str = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.screen.feed(text.replace("\n", "\r\n"))

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        raise OSError("no descriptor")


def one_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int = 24, rows: int = 5, locale: str = "C.UTF-8", encoding: str = "utf-8"
) -> Screen:
    """Makes both streams one terminal."""
    screen = Screen(columns, rows)
    monkeypatch.setattr("sys.stdout", Stream(screen, encoding))
    monkeypatch.setattr("sys.stderr", Stream(screen, encoding))
    monkeypatch.setattr(live, "_size", lambda: (screen.columns, screen.rows))
    monkeypatch.setattr(output, "_streaming", None)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.setenv(name, locale)
    return screen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    return partial(one_terminal, monkeypatch)


PIECES = st.lists(st.text(st.sampled_from("ab \n\tö数字한é́👍🏽\u200d—…Ж│"), max_size=30), min_size=1, max_size=12)


def show(pieces: list[str], screen: Screen) -> tuple[list[str], int]:
    """The screen after pieces with a drawing behind each, and how many drawings there were."""
    drawn, now = 0, 0.0
    with LiveLine(streaming=True, clock=lambda: now) as line:
        for piece in pieces:
            line.write(piece)
            line.update(emission(2, verified=3, accepted=1))
            drawn += line._shown
            now += 1
    return screen.text(), drawn


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES)
def test_text_on_the_same_terminal_is_what_it_is_without_the_line(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shown, _ = show(pieces, one_terminal(patch))
    bare = Screen(24, 5)
    bare.feed("".join(pieces).replace("\n", "\r\n"))
    assert shown == bare.text()


def test_the_property_notices_a_wrong_column(terminal: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, text = ["数字", "字", "ab"], "数字字ab"
    found, drawn = show(pieces, terminal())
    assert (found, drawn) == ([text], 2)
    monkeypatch.setattr(live, "_width", lambda character, wide: 1)
    assert show(pieces, terminal())[0] != [text]


def test_the_line_stands_below_the_text_and_waits_where_the_column_is_not_known(
    terminal: Callable[..., Screen],
) -> None:
    screen, now = terminal(columns=80), 0.0
    with LiveLine(streaming=True, clock=lambda: now) as line:
        for piece, shown in (
            ("ab", False),  # the first token is no round
            ("cd", True),
            ("e\u0301", False),  # terminals disagree about combining characters
            ("x\nyz", True),
            ("👍", False),
            ("\n", True),
            ("x" * 80, True),  # still the last one: the cursor may stand in the last column or behind it
            ("y", True),
        ):
            line.write(piece)
            line.update(emission(2, verified=2, accepted=1))
            now += 1
            assert bool([text for text in screen.text() if LINE.fullmatch(text)]) is shown, piece
            assert not shown or LINE.fullmatch(screen.text()[-1])
    assert screen.text() == ["abcde\u0301x", "yz👍", "x" * 80, "y"]


@pytest.mark.parametrize(("locale", "shown"), [("de_DE.UTF-8", True), ("ja_JP.UTF-8", False)])
def test_ambiguous_width_is_certain_where_no_terminal_makes_it_two(
    terminal: Callable[..., Screen], locale: str, shown: bool
) -> None:
    assert bool(show(["ab", "…"], terminal(locale=locale))[1]) is shown


def test_an_escape_in_the_text_ends_it(terminal: Callable[..., Screen]) -> None:
    """The model may have changed how the terminal works."""
    assert show(["a", "b", "\x1b[1C\n", "c", "d"], terminal()) == (["ab", "cd"], 1)


def test_characters_that_are_replaced_end_it(terminal: Callable[..., Screen]) -> None:
    assert show(["a", "b", "ö\n", "c"], terminal(encoding="ascii"))[1] == 1


def test_another_width_waits_for_the_next_line(terminal: Callable[..., Screen]) -> None:
    screen, now = terminal(columns=40), 0.0
    shown = []
    with LiveLine(streaming=True, clock=lambda: now) as line:
        for piece in ("ab", "cd", "ef", "\n", "gh"):
            if piece == "ef":
                screen.columns = 30
            line.write(piece)
            line.update(emission(2, verified=1))
            shown.append(line._shown)
            now += 1
    assert shown == [False, True, False, False, True]


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_terminal_without_a_cursor_has_none(
    terminal: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    screen = terminal()
    monkeypatch.setenv("TERM", term)
    assert show(["a", "b", "c"], screen) == (["abc"], 0)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 10.0
    line = LiveLine(streaming=False, clock=lambda: now)
    line.update(emission(1))
    assert line.text(now) == "1 tokens  0.00/round  no drafts  0.0 tokens/s"
    now = 12.0
    line.update(emission(3, verified=4, accepted=2))
    assert line.text(now) == "4 tokens  3.00/round  acceptance 0.50 (1 round)  1.5 tokens/s"
    for _ in range(live.RECENT_ROUNDS):
        line.update(emission(1, verified=4, accepted=1))
    assert line.text(14.0) == "36 tokens  1.06/round  acceptance 0.25 (last 32 rounds)  8.8 tokens/s"
    # no terminal here
    assert capsys.readouterr() == ("", "")


def test_at_most_ten_drawings_a_second(terminal: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal()
    times: list[float] = []
    now = 0.0
    monkeypatch.setattr(LiveLine, "_draw", lambda self, text: times.append(now))
    line = LiveLine(streaming=True, clock=lambda: now)
    for step in range(5000):
        now = step / 1000
        line.update(emission(1))
    assert 45 <= len(times) <= 50
    assert min(later - earlier for earlier, later in zip(times, times[1:])) >= 0.1 - 1e-9


def test_it_goes_with_whatever_ends_the_text(terminal: Callable[..., Screen]) -> None:
    screen = terminal()

    def interrupted() -> None:
        with LiveLine(streaming=True, clock=iter(range(9)).__next__) as line:
            for piece in ("a", "b"):
                line.write(piece)
                line.update(emission(1))
            assert len(screen.text()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.text() == ["ab"]


# --- the command on a terminal ---------------------------------------------------------------------------------------


def start(
    checkpoint: Path,
    *terminal: str,
    options: tuple[str, ...] = (),
    files: dict[str, IO[bytes]] | None = None,
    **variables: str,
) -> Session:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}
    command = ("-m", "specdec.cli.main", "run", RECIPE, "--checkpoint", str(checkpoint), "--prompt", PROMPT)
    arguments = (*command, "--max-new-tokens", "60", "--greedy", "--seed", "1", *options)
    return Session.start(arguments, terminal=terminal, environment={**environment, **variables}, files=files)


def wrapped(text: str) -> list[str]:
    screen = Screen()
    screen.feed(text.replace("\n", "\r\n"))
    return screen.text()


def test_on_a_terminal_and_nowhere_else(checkpoint: Path, tmp_path: Path) -> None:
    with (tmp_path / "text").open("wb") as file:
        piped, both, apart, passed, other = (
            start(checkpoint),
            start(checkpoint, "stdout", "stderr"),
            start(checkpoint, "stderr", files={"stdout": file}),
            start(checkpoint, "stderr"),
            start(checkpoint, "stdout"),
        )
        assert [one.finish() for one in (piped, both, apart, passed, other)] == [0] * 5
    text, summary = (piped.piped[name].decode() for name in ("stdout", "stderr"))
    assert not LINE.search(summary) and "\x1b" not in summary and summary.count("\n") == 6
    # text and line on one terminal
    assert LINE.search(both.shown), both.shown
    screen = Screen()
    screen.feed(both.shown)
    shown = screen.text()
    assert shown[: len(wrapped(text))] == wrapped(text)
    assert [line.split("  ")[0] for line in shown[len(wrapped(text)) :]] == [
        line.split("  ")[0] for line in summary.splitlines()
    ]
    # text to another command, which may show it on this terminal
    assert passed.piped["stdout"].decode() == text
    assert not LINE.search(passed.shown)
    # text in a file
    assert (tmp_path / "text").read_text(encoding="utf-8") == text
    assert LINE.search(apart.shown)
    screen = Screen()
    screen.feed(apart.shown)
    assert len(screen.text()) == 6 and screen.text()[0].startswith("tokens    ")
    # text on a terminal, messages elsewhere
    assert wrapped(text) == wrapped(other.shown.replace("\r\n", "\n"))
    assert not LINE.search(other.piped["stderr"].decode())


def test_json_has_a_line_too(checkpoint: Path) -> None:
    session = start(checkpoint, "stdout", "stderr", options=("--json",))
    assert session.finish() == 0
    assert LINE.search(session.shown)
    screen = Screen()
    screen.feed(session.shown)
    assert screen.text()[0] == "{" and screen.text()[-1] == "}"


def test_lines_fit_the_terminal(checkpoint: Path) -> None:
    session = start(checkpoint, "stderr")
    assert session.finish() == 0
    assert all(len(found[0]) < COLUMNS for found in LINE.finditer(session.shown))
