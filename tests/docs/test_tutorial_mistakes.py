"""The table *What goes wrong, and how it looks* of the tutorial: each mistake is made in its plugin and looks like that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from example_env import example_env, execute
from wheels import ROOT

ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| `([^|`]+)`[^|]*\|$",
    (ROOT / "docs" / "writing-a-drafter.md").read_text(encoding="utf-8").partition("## What goes wrong")[2],
    re.MULTILINE,
)
RUN = ("-m", "specdec.cli.main", "run", "qwen3.8-ngram", "--prompt", "def f(", "--max-new-tokens", "4")


@frozen(kw_only=True)
class Mistake:
    """An edit of one module of the finished plugin, and what shows it: arguments of Python."""

    row: str
    module: str
    right: str
    wrong: str
    shown_by: tuple[str, ...] = RUN


MISTAKES = (
    Mistake(
        row="a hook's name is misspelt",
        module="plugin.py",
        right="def load_drafter(",
        wrong="def load_draftr(",
        shown_by=("-m", "specdec.cli.main", "plugins"),
    ),
    Mistake(
        row="a hook returns nothing, or a class in place of an object",
        module="plugin.py",
        right="    return NgramDrafter.build(",
        wrong="    NgramDrafter.build(",
    ),
    Mistake(
        row="history is written one position off, or a draft is kept that was rejected",
        module="drafter.py",
        right="torch.cat([lanes.pending.unsqueeze(1), tokens[:, :-1]], dim=1)",
        wrong="tokens",
        shown_by=("-m", "pytest", "-x", "-k", "test_state_after_every_accepted_count and 1"),
    ),
    Mistake(
        row="a declared field is not committed",
        module="drafter.py",
        right='        self.store.write_row("rows", lanes.slots, lanes.consumed + emitted)\n',
        wrong="",
    ),
    Mistake(
        row="the round reads a tensor on the host",
        module="drafter.py",
        right="        token = lanes.pending\n",
        wrong="        token = lanes.pending + lanes.consumed.min().item() * 0\n",
        shown_by=("-m", "pytest", "-x", "-k", "test_round_is_capturable and 1"),
    ),
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    return example_env(tmp_path_factory.mktemp("mistakes"), ["specdec_ngram"], ["qwen38"])


@pytest.fixture
def package(environment: Path) -> Iterator[Path]:
    """The installed package, put back afterwards."""
    folder = next(environment.glob("lib/python*/site-packages/specdec_ngram"))
    texts = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    yield folder
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.row)
def test_the_mistake_looks_like_that(mistake: Mistake, environment: Path, package: Path, tmp_path: Path) -> None:
    module = package / mistake.module
    text = module.read_text(encoding="utf-8")
    assert text.count(mistake.right) == 1
    module.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")
    arguments = mistake.shown_by
    if "pytest" in arguments:
        suite = ROOT / "docs" / "examples" / "specdec_ngram" / "tests" / "test_conformance.py"
        (tmp_path / suite.name).write_text(suite.read_text(encoding="utf-8"), encoding="utf-8")
        arguments = (*arguments, "--rootdir", str(tmp_path), str(tmp_path / suite.name))
    done = execute((environment / "bin" / "python", *arguments), cwd=tmp_path, timeout=600)
    message = dict(ROWS)[mistake.row]
    # line numbers are those of the page's day
    pattern = ".*".join(re.sub(r"\d+", r"\\d+", re.escape(part)) for part in message.split("…"))
    assert re.search(pattern, done.stdout + done.stderr), f"{message}\n{done.stdout}\n{done.stderr}"


def test_every_row_is_tried() -> None:
    assert [row for row, _ in ROWS] == [mistake.row for mistake in MISTAKES]
