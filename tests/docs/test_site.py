"""The site builds without a warning, its links and anchors lead somewhere, and nothing on it comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from attrs import define, field
from doc_blocks import DOCS, ROOT, blocks


class _AnyTag(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function by a tag of its own."""


_AnyTag.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _AnyTag)


@define
class Page(HTMLParser):
    """Ids, links and sources of one page."""

    ids: set[str] = field(factory=set)
    links: list[str] = field(factory=list)
    sources: list[str] = field(factory=list)
    diagrams: int = 0

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.sources.append(given.get("href", ""))
        if "src" in given:
            self.sources.append(given["src"])
        if "mermaid" in given.get("class", "").split():
            self.diagrams += 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not [line for line in said.splitlines() if "WARNING" in line or "Warning:" in line], said
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        found[path] = page
    return found


def test_every_page_is_in_the_navigation(pages: dict[Path, Page], site: Path) -> None:
    named = {str(file).removesuffix(".md") + ".html" for entry in CONFIG["nav"] for file in entry.values()}
    assert {str(path.relative_to(site)) for path in pages} == named | {"404.html"}
    assert named == {str(path.relative_to(DOCS)).removesuffix(".md") + ".html" for path in _sources()}


def _sources() -> list[Path]:
    return [path for path in DOCS.rglob("*.md") if "examples" not in path.relative_to(DOCS).parts]


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page], site: Path) -> None:
    wrong, checked = [], 0
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("http://", "https://", "mailto:", "javascript:")) or path.name == "404.html":
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            checked += 1
            if not target.is_file():
                wrong.append(f"{path.relative_to(site)}: {link}: no such file")
            elif anchor and target.suffix == ".html" and unquote(anchor) not in pages[target].ids:
                wrong.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert not wrong, "\n".join(wrong)
    assert checked > 100


def test_nothing_comes_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    foreign, missing = [], []
    for path, page in pages.items():
        for source in page.sources:
            if "//" in source:
                foreign.append(f"{path.relative_to(site)}: {source}")
            elif path.name != "404.html" and not (path.parent / source.partition("?")[0]).is_file():
                missing.append(f"{path.relative_to(site)}: {source}")
    assert not foreign
    assert not missing


def test_diagrams_are_recognised(pages: dict[Path, Page], site: Path) -> None:
    diagrams = [block.body for block in blocks(DOCS / "one-round.md") if block.language == "mermaid"]
    assert [diagram.split()[0] for diagram in diagrams] == ["flowchart", "sequenceDiagram", "stateDiagram-v2"]
    assert pages[site / "one-round.html"].diagrams == len(diagrams)
    for diagram in diagrams:
        # no parser is at hand here; what is left open is what is usually forgotten
        opened = len(re.findall(r"^\s*(?:subgraph|par|loop|alt|opt)\b", diagram, re.MULTILINE))
        assert opened == len(re.findall(r"^\s*end$", diagram, re.MULTILINE))
        assert all(diagram.count(left) == diagram.count(right) for left, right in ("[]", "()", "{}"))
        assert diagram.count('"') % 2 == 0


def test_everything_generated_is_there(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert "<!-- generated:" not in path.read_text(encoding="utf-8"), path.name


def test_only_pages_are_published(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    assert not (site / "examples").exists()
