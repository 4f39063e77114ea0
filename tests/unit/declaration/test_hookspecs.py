"""The hooks are reference pages: every part is there, and every example is Python."""

import ast
import inspect
import textwrap

import pytest

from specdec import hookspecs

SIGNATURES = {
    "declare_speculation": [],
    "build_target_state": ["recipe", "checkpoint", "capacities", "device"],
    "load_drafter": ["recipe", "checkpoint", "target", "capacities"],
    "capture_round": ["recipe", "target", "drafter", "shape", "arena"],
}


def test_the_four_hooks() -> None:
    assert sorted(hookspecs.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_page(name: str) -> None:
    hook = getattr(hookspecs, name)
    # arguments are only ever added: the contract starts with these, in this order
    assert list(inspect.signature(hook).parameters)[: len(SIGNATURES[name])] == SIGNATURES[name]
    page = inspect.getdoc(hook) or ""
    places = [page.find(f"\n{part}") for part in ("When called", "Arguments", "Returns", "Raises", "Example::")]
    assert -1 not in places
    assert places == sorted(places)
    for argument in SIGNATURES[name]:
        assert argument in page[places[1] : places[2]]
    example = ast.parse(textwrap.dedent(page.split("Example::")[1]))
    functions = [node for node in example.body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions] == [name]
    assert [argument.arg for argument in functions[0].args.args] == SIGNATURES[name]


def test_only_declaring_is_not_first_result() -> None:
    first = {name for name in SIGNATURES if getattr(hookspecs, name).specdec_spec["firstresult"]}
    assert first == set(SIGNATURES) - {"declare_speculation"}
