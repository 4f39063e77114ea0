"""What the site's build makes of docstrings, parsers, records, sources and raw results."""

from __future__ import annotations

import argparse
import re
from inspect import signature
from types import FunctionType

import build_pages
import pytest
import torch
from attrs import NOTHING, Factory, fields
from doc_blocks import DOCS, ROOT, prose
from doc_pages import commands, figures, metrics, records, reference
from doc_pages.docstrings import inline, markdown

from specdec.catalog import RoundShape
from specdec.checkpoint.reader import Checkpoint
from specdec.cli.main import COMMANDS
from specdec.declaration import SOURCED_FIELDS, StateField, StateKind, StateLayout
from specdec.round.allocation import PackedRows
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.engine import Engine, Stream
from specdec.serving.metrics import Metrics
from specdec.serving.prometheus import prometheus_text
from specdec.serving.request import Request
from specdec.state.requests import Lanes
from specdec.state.store import StateStore
from specdec.tensors import TensorGroup, TensorInventory

PAGES = sorted(DOCS.glob("*.md"))
ROWS = StateField(name="rows", kind=StateKind.ROW, shape=(), dtype="int64", source="rows of draft history")


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table without its rule."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    # neither escaped bars nor those in code part columns
    bar = re.compile(r"(?<!\\)\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")
    return [[cell.strip() for cell in bar.split(line)[1:-1]] for line in lines if not re.match(r"^[|\s-]+$", line)]


def test_every_place_has_content_and_all_content_a_place() -> None:
    named = [
        name for page in PAGES for name in re.findall(r"<!-- generated: ([\w-]+) -->", page.read_text(encoding="utf-8"))
    ]
    assert sorted(named) == sorted(build_pages.CONTENT)
    for name in named:
        assert build_pages.CONTENT[name]().strip(), name


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(build_pages.PluginError, match=r"x\.md: nothing is generated under the name 'nothing'"):
        build_pages.filled("<!-- generated: nothing -->", "x.md")


# --- docstrings ---------------------------------------------------------------------------------------------------------


DOCSTRINGS = {
    "One ``code`` and :func:`name`.": "One `code` and `name`.",
    "Shapes [B, W] and a*b < c.": r"Shapes \[B, W\] and a\*b &lt; c.",
    "First\nline.\n\nSecond.": "First line.\n\nSecond.",
    "``a``\n    what it is.\n``b``, ``c``\n    what\n    they are.": "- `a`: what it is.\n- `b`, `c`: what they are.",
    "Raises:\n    UsageError: if it\n        is.\n    Other: no.": "**Raises:**\n\n- `UsageError`: if it is.\n- `Other`: no.",
    "Example::\n\n    a = 1\n\n    b = 2": "**Example:**\n\n```python\na = 1\n\nb = 2\n```",
    "Law:\n\n    a < b": "Law:\n\n```text\na < b\n```",
    "When called\n    Once.\n\n    Again.": "**When called.** Once.\n\nAgain.",
    "====  ====\nkey   is\n====  ====\n1     one\n      of two\n2     x|y\n====  ====": (
        "| key | is |\n| --- | --- |\n| 1 | one of two |\n| 2 | x\\|y |"
    ),
}


@pytest.mark.parametrize(("text", "made"), DOCSTRINGS.items(), ids=range(len(DOCSTRINGS)))
def test_docstrings_become_markdown(text: str, made: str) -> None:
    assert markdown(text) == made


def test_paragraphs_that_explain_arguments_become_lists() -> None:
    text = "One line.\n\ntokens: [T] int64; see below. slot, start: numbers. other: of no argument. Returns rows: [T]."
    assert markdown(text, ["tokens", "slot", "start"]) == (
        "One line.\n\n"
        r"- `tokens`: \[T\] int64; see below."
        "\n"
        "- `slot`, `start`: numbers. other: of no argument.\n\n"
        r"Returns rows: \[T\]."
    )
    assert markdown("rows: 1.", ["tokens"]) == "rows: 1."


def test_markup_outside_code_is_escaped() -> None:
    assert inline("`a*b` *c*") == r"`a*b` \*c\*"


def test_every_public_method_of_the_contract_is_on_the_page() -> None:
    text = reference.module_reference("interfaces")
    for name in ("Target.verify", "Drafter.absorb", "Proposer.draw", "Round.submit", "Drafter.lag (property)"):
        assert f"#### {name}\n" in text
    assert "``" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def public_methods(cls: type) -> list[str]:
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and isinstance(value, FunctionType | classmethod) and value.__doc__
    ]


@pytest.mark.parametrize("cls", [Lanes, StateStore, RoundShape, PackedRows, Checkpoint, TensorGroup, TensorInventory])
def test_what_hooks_are_handed_is_on_the_page(cls: type) -> None:
    page = build_pages.filled((DOCS / "hooks.md").read_text(encoding="utf-8"), "hooks.md")
    assert f"\n### {cls.__name__}\n" in page
    for name in public_methods(cls):
        assert f"\n#### {cls.__name__}.{name}\n" in page, name
    for name in getattr(cls, "__annotations__", {}):
        assert name.startswith("_") or f"| `{name}` | `" in page, name


def test_what_a_store_is_made_of_is_on_the_page() -> None:
    """Every public attribute that a drafter may read."""
    text = build_pages.CONTENT["store"]()
    layout = StateLayout(owner="drafter", fields=(ROWS,), max_draft_tokens=1)
    store = StateStore(layout, slots=1, pages=1, context=8, device=torch.device("cpu"))
    for name in vars(store):
        assert name.startswith("_") or re.search(rf"^- .*`{name}`.*:", text, re.MULTILINE), name


def test_fields_that_need_a_source_are_listed() -> None:
    listed = rows(build_pages.CONTENT["sourced-fields"]())[1:]
    assert [row[0] for row in listed] == [f"`{name}`" for name in SOURCED_FIELDS]
    assert ["`speculative_token_capacity`", "128", "yes"] in listed


# --- serving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "name"), [(Request, "request-fields"), (SamplingParams, "sampling-fields")])
def test_fields_of_a_request_are_on_the_page_with_their_defaults(cls: type, name: str) -> None:
    listed = {row[0].strip("`"): row[2] for row in rows(build_pages.CONTENT[name]())[1:]}
    assert list(listed) == [one.name for one in fields(cls)]
    for one in fields(cls):
        if one.default is NOTHING:
            assert listed[one.name] == "–"
        elif not isinstance(one.default, Factory):
            assert listed[one.name] == f"`{one.default!r}`"


def test_arguments_of_an_engine_are_explained() -> None:
    listed = {row[0].strip("`"): row for row in rows(build_pages.CONTENT["engine-load"]())[1:]}
    given = signature(Engine.load).parameters
    assert [name.strip("*") for name in listed] == list(given)
    for name, parameter in given.items():
        row = listed[name if name in listed else f"**{name}"]
        assert row[2] == ("–" if parameter.default is parameter.empty else f"`{parameter.default!r}`")
        assert name == "recipe" or row[3] not in ("", "–"), f"{name} is not explained"


def test_outputs_of_a_request_are_on_the_page() -> None:
    page = build_pages.filled((DOCS / "operations.md").read_text(encoding="utf-8"), "operations.md")
    for name in public_methods(Stream):
        assert f"\n#### Stream.{name}\n" in page
    for name in ("submit", "generate", "close"):
        assert f"\n#### Engine.{name}\n" in page
    for finish in Finish:
        assert f"| `{finish.name}` | " in page


# --- options ------------------------------------------------------------------------------------------------------------


def _all_options(parser: argparse.ArgumentParser) -> list[str]:
    found = [
        option for action in parser._actions for option in action.option_strings if action.help != argparse.SUPPRESS
    ]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [option for child in action.choices.values() for option in _all_options(child)]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_its_table(name: str) -> None:
    text = commands.option_tables()
    part = text[text.index(f"### specdec {name}\n") :].partition(f"\n### specdec {name}x")[0]
    for option in set(_all_options(commands.parser_of(name))) - {"-h", "--help"}:
        assert f"`{option}`" in part, option


# --- records ------------------------------------------------------------------------------------------------------------


def test_every_number_of_a_recipe_has_its_source_beside_it() -> None:
    text = records.recipe_pages()
    for recipe in records.recipes():
        for field, source in recipe.sources:
            assert any(row[0] == f"`{field}`" and row[2] == inline(source) for row in rows(text)), (recipe.name, field)


def test_every_field_of_every_layout_is_listed_with_its_bytes() -> None:
    parts = re.split(r"^#### (\w+) of (\S+)$", records.layouts(), flags=re.MULTILINE)[1:]
    tables = {(parts[at + 1], parts[at].lower()): rows(parts[at + 2])[1:] for at in range(0, len(parts), 3)}
    for recipe in records.recipes():
        for layout in (recipe.target_layout, recipe.drafter_layout):
            table = tables[recipe.name, layout.owner]
            assert [row[0] for row in table] == [f"`{field.name}`" for field in layout.fields]
            in_slots = sum(
                int(row[6].removesuffix(" a slot").replace(",", "")) for row in table if row[6].endswith("a slot")
            )
            assert in_slots == layout.bytes(slots=1, pages=0)


def test_the_table_of_kinds_names_all_kinds() -> None:
    kinds = [f"`{kind.value}`" for kind in StateKind]
    assert [row[0] for row in rows(records.kinds_in_use())[1:]] == kinds
    by_hand = rows(prose(DOCS / "state-layouts.md"))
    assert [row[0] for row in by_hand[1 : len(kinds) + 1]] == kinds


def test_the_readme_lists_every_recipe() -> None:
    listed = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    for _, name, _, drafts in rows(records.recipe_list())[1:]:
        assert any(row[1] == name and row[3] == drafts for row in listed if len(row) == 4), name


# --- metrics ------------------------------------------------------------------------------------------------------------


def test_metrics_are_named_as_they_are_exported() -> None:
    exported = set(re.findall(r"^# HELP (\S+)", prometheus_text(Metrics()), re.MULTILINE))
    assert {row[0].strip("`") for row in rows(metrics.metric_table())[1:]} == exported


# --- measured numbers ---------------------------------------------------------------------------------------------------


def test_the_readme_shows_what_the_raw_results_say() -> None:
    assert all(row in rows((ROOT / "README.md").read_text(encoding="utf-8")) for row in rows(figures.summary_table()))


def test_no_table_of_numbers_is_written_by_hand() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert "|" not in text
    assert not re.search(r"\d\s*(?:×|tokens/s|ms\b|µs)", text)


def performance_parts() -> list[str]:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    return [name for name in re.findall(r"<!-- generated: ([\w-]+) -->", text) if name != "summary"]


@pytest.mark.parametrize("name", performance_parts())
def test_every_measured_table_names_its_command_and_raw_result(name: str) -> None:
    text = build_pages.CONTENT[name]()
    tables = len(re.findall(r"^\| ---", text, re.MULTILINE))
    said = re.findall(r"^Command: `+(.+?)`+.*?\. Raw: (.+)\.$", text, re.MULTILINE)
    assert tables and len(said) >= tables
    for command, named in said:
        script = re.match(r"python (\S+)", command)
        assert script is None or (ROOT / script[1]).is_file(), command
        if command.startswith("specdec "):
            assert command.split()[1] in COMMANDS
        paths = re.findall(r"`([^`]+)`", named)
        assert paths and all((ROOT / path).is_file() for path in paths), named


def test_every_raw_result_is_shown() -> None:
    shown = "".join(build_pages.CONTENT[name]() for name in performance_parts())
    kept = list((ROOT / figures.RESULTS).glob("*.json"))
    assert kept
    missing = [path.name for path in kept if path.name not in shown]
    assert not missing, "results that no table of docs/doc_pages/figures.py reads"
