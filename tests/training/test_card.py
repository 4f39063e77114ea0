"""The card of a checkpoint: text for people, and licences by the names that tools know."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "stated", "shown"),
    [
        ("a", "MIT", "MIT"),
        (
            "a",
            "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
            "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
        ),
        ("a", "Apache-2.0; License :: OSI Approved :: Apache Software License", "Apache-2.0"),
        ("a", "Apache License, Version 2.0; License :: OSI Approved :: Apache Software License", "Apache-2.0"),
        ("a", "see LICENSE; License :: OSI Approved :: MIT License", "MIT"),
        # one of several BSD licences: only the text says which
        ("a", "BSD; License :: OSI Approved :: BSD License", '"BSD; License :: OSI Approved :: BSD License"'),
        ("sympy", "BSD; License :: OSI Approved :: BSD License", "BSD-3-Clause"),
        ("a", "", '""'),
    ],
)
def test_licences_are_spdx_or_quoted(name, stated, shown):
    from training.card import licence_of

    assert licence_of({"name": name, "licence": stated}) == shown


def test_steps_and_tokens_are_prose():
    from training.card import render

    counts = {"train": {"tokens": 5, "files": 2}, "heldout": {"tokens": 1, "files": 1}}
    results = {
        "parameters": {"target": 10, "mtp": 2},
        "hardware": "a device",
        "torch": "2",
        "command": "train.py --resume FIRST",
        "earlier_runs": [
            {
                "command": "train.py --hold",
                "steps": {"joint": 1000, "drafter": 7},
                "tokens": {"joint": 2000, "drafter": 9},
            }
        ],
        "steps": {"joint": 1234},
        "tokens": {"joint": 4321},
        "history": [{"phase": "joint", "loss": 1.5}],
        "corpus": {"counts": counts, "sources": []},
    }
    lines = render(results, architecture="Toy", law="temperature 1", forms={}).splitlines()
    earlier = "joint phase: 1,000 steps, 2,000 tokens read; drafter phase: 7 steps, 9 tokens read"
    assert f"- continued from: `train.py --hold` ({earlier})" in lines
    assert "- joint phase: 1,234 steps, 4,321 tokens read" in lines


@pytest.mark.parametrize(
    "card", sorted(ROOT.glob("plugins/*/specdec_*/tiny/README.md")), ids=lambda path: path.parts[-4]
)
def test_shipped_cards_are_text_for_people(card):
    text = card.read_text(encoding="utf-8")
    outside_quotes = "".join(text.split('"')[::2])
    assert "{" not in text and "License" not in outside_quotes


def test_the_training_text_shows_the_runs_of_the_card():
    """Both commands, in order, up to the names of folders."""
    card = (ROOT / "plugins/qwen38/specdec_qwen38/tiny/README.md").read_text(encoding="utf-8")
    shown = (ROOT / "plugins/qwen38/training/README.md").read_text(encoding="utf-8").replace(" \\\n  ", " ")

    def options(line):
        words = line.strip("`- ").split()
        return [word for word in words if word.startswith("--") or word.replace(".", "").isdecimal()]

    second, first = (line.split("`")[1] for line in card.splitlines() if line.startswith(("- command:", "- continued")))
    trained = [options(line) for line in shown.splitlines() if "train.py" in line]
    assert trained[0] == options(first)
    assert sorted(trained[1]) == sorted(options(second))
