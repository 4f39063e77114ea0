"""Fenced blocks, links and code spans of the repository's Markdown, as the tests of the documentation read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: The tutorial's blocks are run in order by a test of their own.
TUTORIAL = tuple(path for path in (DOCS / "writing-a-drafter.md", *sorted(DOCS.glob("tutorial/*.md"))) if path.exists())
#: Read by tests of their own: they are to be understood without this repository.
EXAMPLES = tuple(sorted(DOCS.glob("examples/*/*.md")))
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted(DOCS.glob("**/*.md")) if path not in EXAMPLES),
)

_FENCE = re.compile(
    r"(?:^[ ]*<!-- test: (?P<marker>[\w-]+) -->\n)?^(?P<indent>[ ]*)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


@frozen(kw_only=True)
class Block:
    """One fenced block. marker: of the comment before it, empty for none."""

    page: Path
    number: int
    language: str
    body: str
    marker: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"


def blocks(page: Path) -> list[Block]:
    """Fenced blocks of a page in order."""
    return [
        Block(
            page=page,
            number=number,
            language=found["language"],
            body="\n".join(line.removeprefix(found["indent"]) for line in found["body"].splitlines()) + "\n",
            marker=found["marker"] or "",
        )
        for number, found in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8")))
    ]


def prose(page: Path) -> str:
    """The page's text without fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> Iterator[str]:
    """Code spans of the prose; table cells escape nothing in them."""
    for found in _SPAN.finditer(prose(page)):
        yield found[1]


def links(page: Path) -> Iterator[str]:
    """Targets of links and images of the prose."""
    for found in _LINK.finditer(_SPAN.sub("", prose(page))):
        yield found[1]
    # a code span may be a link's text
    for found in re.finditer(r"\[`[^`]*`\]\(([^()\s]+)\)", prose(page)):
        yield found[1]
