"""What the core asks of the objects that hooks return, before it calls any of their methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from stand_ins import ROWS, stand_in_drafter, stand_in_round, stand_in_target, store

from specdec.declaration import Recipe
from specdec.interfaces import Drafter, PackedTarget, Round, Target
from specdec.places import place
from specdec.plugin_objects import mistake_in, protocol_of


def test_what_satisfies_the_protocols_has_no_mistake() -> None:
    assert mistake_in(stand_in_target(), Target) is None
    assert mistake_in(stand_in_drafter(), Drafter) is None
    assert mistake_in(stand_in_round(), Round) is None


def test_more_than_the_protocol_asks_is_no_mistake() -> None:
    def snapshot(self: Any, slots: Any, taken: Any = None, *, deep: bool = False) -> Any: ...

    def absorb(self: Any, *arguments: Any) -> Any: ...

    def commit(self: Any, where: Any, count: Any) -> Any: ...

    assert mistake_in(stand_in_drafter(snapshot=snapshot, absorb=absorb, commit=commit, other=1), Drafter) is None


def test_a_property_that_cannot_be_read_yet_is_there() -> None:
    def unread(self: Any) -> Any:
        raise RuntimeError("no round has run")

    assert mistake_in(stand_in_round(boundary_state=property(unread)), Round) is None


def test_state_that_cannot_be_looked_at_is_a_mistake() -> None:
    def unread(self: Any) -> Any:
        raise RuntimeError("no store yet")

    said = str(mistake_in(stand_in_drafter(store=property(unread)), Drafter))
    assert "whose state cannot be looked at: RuntimeError: no store yet (" in said and __file__ in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "an int; return one object"),
        ((1, 2), "a tuple; return one object"),
        ({"target": 1}, "a dict; return one object"),
        ("target", "a str; return one object"),
    ],
)
def test_plain_values_are_refused(value: object, words: str) -> None:
    said = mistake_in(value, Target)
    assert said is not None and words in said and "specdec.interfaces.Target" in said


def test_a_class_is_not_its_object() -> None:
    kind = type(stand_in_target())
    assert "the class StandInTarget" in str(mistake_in(kind, Target))


def test_missing_members_are_all_named() -> None:
    said = str(mistake_in(SimpleNamespace(store=None, prefill=None), Drafter))
    assert "without lag, propose, absorb, commit, snapshot, restore, faults;" in said
    assert "specdec.interfaces.Drafter has store, lag, prefill, propose" in said


def swapped(self: Any, lanes: Any, emitted: Any, tokens: Any) -> None:
    """The two last the wrong way round."""


def demanding(self: Any, slots: Any, taken: Any) -> Any:
    """Without the default that the core relies on."""


def keyword_only(self: Any, *, slots: Any) -> Any:
    """The core gives it by position."""


@pytest.mark.parametrize(
    ("method", "function", "words"),
    [
        (
            "absorb",
            swapped,
            "has its arguments in another order than the core gives them: absorb(lanes, tokens, emitted)",
        ),
        ("snapshot", demanding, "cannot be called as the core does: snapshot(slots, taken)"),
        ("faults", keyword_only, "cannot be called as the core does: faults(slots)"),
        ("faults", 3, "faults is an int, not a method"),
    ],
)
def test_methods_that_cannot_be_called(method: str, function: Any, words: str) -> None:
    said = str(mistake_in(stand_in_drafter(**{method: function}), Drafter))
    assert words in said
    assert not callable(function) or f"({place(function)})" in said


def test_keywords_of_a_round_are_asked_for() -> None:
    def run(self: Any, boundary: bool = False) -> None: ...

    assert "run(boundary, extended, masked)" in str(mistake_in(stand_in_round(run=run), Round))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"store": {"rows": 1}}, "store is a dict; make it with specdec.state.store.StateStore"),
        ({"store": store("target", ROWS)}, "store has a layout of the target; give it one with owner='drafter'"),
        ({"store": store("drafter")}, "declare a field 'rows' of kind row"),
        ({"store": store("drafter", evolve(ROWS, layers=2))}, "declare a field 'rows' of kind row"),
        ({"lag": 2}, "lag is 2"),
    ],
)
def test_state_of_a_drafter(values: dict[str, Any], words: str) -> None:
    assert words in str(mistake_in(stand_in_drafter(**values), Drafter))


def test_size_of_the_vocabulary() -> None:
    assert "vocab_size is None" in str(mistake_in(stand_in_target(vocab_size=None), Target))


def test_recipes_with_forecasts_need_packed_rows(recipe: Recipe) -> None:
    assert protocol_of("build_target_state", recipe) is Target
    forecasting = SimpleNamespace(confidence_width=7)
    assert protocol_of("build_target_state", forecasting) is PackedTarget  # type: ignore[arg-type]
    assert "without verify_rows;" in str(mistake_in(stand_in_target(), PackedTarget))
