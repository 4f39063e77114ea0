"""The lookup of the n-gram example against plain Python: every draft, and what is kept of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_example import RECIPE, NgramDrafter, drafter_layout
from torch import Tensor

from specdec.interfaces import Capacities, Drafter
from specdec.testing.guard import CapturableGuard

SLOTS, CONTEXT, DRAFTS = 3, 150, 7
#: Drafts are placed by depth; what comes back is what the drafter goes on from.
Answer = Callable[[int, list[int]], list[int]]


def following(text: Sequence[int], longest: int) -> int:
    """The oracle: the token behind the place whose last tokens equal those at the end of the text, longest first, then latest."""
    end = len(text) - 1

    def agreement(place: int) -> int:
        count = 0
        while count < longest and count <= place and text[place - count] == text[end - count]:
            count += 1
        return count

    return text[max(range(end), key=lambda place: (agreement(place), place)) + 1]


def continuation(text: Sequence[int], longest: int, drafts: int) -> list[int]:
    """Drafts that each go on from the one before."""
    known = list(text)
    for _ in range(drafts):
        known.append(following(known, longest))
    return known[len(text) :]


class Placed:
    """A proposer that keeps what it is given and answers it, or what ``answer`` makes of it."""

    def __init__(self, answer: Answer = lambda depth, tokens: tokens) -> None:
        self.answer = answer
        self.drafts: list[list[int]] = []

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        assert depth == len(self.drafts)
        self.drafts.append(tokens.tolist())
        return torch.tensor(self.answer(depth, self.drafts[-1]))

    def lane(self, number: int) -> list[int]:
        return [tokens[number] for tokens in self.drafts]


def build(longest: int = 4, slots: int = SLOTS) -> NgramDrafter:
    reach = -(-(CONTEXT + DRAFTS + 1) // 64)
    capacities = Capacities(
        slots=slots,
        context=CONTEXT,
        pages=slots * reach,
        max_draft_tokens=DRAFTS,
        dtype="float32",
        prefill_rows=CONTEXT,
    )
    target = SimpleNamespace(store=SimpleNamespace(device=torch.device("cpu")))
    recipe = SimpleNamespace(drafter_layout=drafter_layout(DRAFTS))
    drafter = NgramDrafter.build(recipe=recipe, target=target, capacities=capacities, longest=longest)
    # what nobody wrote is no token of a text
    drafter.store.poison()
    drafter.store["tokens"].fill_(-7)
    for slot in range(slots):
        drafter.store.reset(slot)
        # pages of slots interleave, so that no page table is the identity
        drafter.store.set_pages(slot, range(1 + slot, 1 + slot + reach * slots, slots))
    return drafter


def lanes(consumed: Sequence[int], pending: Sequence[int], slots: Sequence[int] | None = None) -> Any:
    chosen = torch.tensor(list(range(len(consumed))) if slots is None else list(slots))
    return SimpleNamespace(
        slots=chosen, consumed=torch.tensor(list(consumed)), pending=torch.tensor(list(pending)), count=len(consumed)
    )


def consume(drafter: NgramDrafter, slot: int, tokens: Sequence[int], start: int = 0) -> None:
    drafter.prefill(torch.empty(len(tokens), 0), torch.tensor(list(tokens)), torch.tensor([slot]), start)


def drafted(drafter: NgramDrafter, texts: Sequence[Sequence[int]], proposer: Placed) -> None:
    """One proposal for lanes whose last token is pending."""
    assert drafter.propose(lanes([len(t) - 1 for t in texts], [t[-1] for t in texts]), DRAFTS, proposer) is None
    assert not drafter.faults(torch.arange(len(texts))).any()


texts = st.lists(st.integers(0, 3), min_size=2, max_size=CONTEXT)


@settings(max_examples=150, deadline=None)
@given(one=texts, other=texts, longest=st.integers(1, 6))
def test_drafts_are_those_of_the_oracle(one: list[int], other: list[int], longest: int) -> None:
    drafter, proposer = build(longest), Placed()
    for slot, text in enumerate((one, other)):
        consume(drafter, slot, text[:-1])
    drafted(drafter, (one, other), proposer)
    for lane, text in enumerate((one, other)):
        assert proposer.lane(lane) == continuation(text, longest, DRAFTS)


@settings(max_examples=50, deadline=None)
@given(text=texts, copies=st.lists(st.integers(0, 3), min_size=1, max_size=DRAFTS))
def test_drafts_go_on_from_what_was_copied(text: list[int], copies: list[int]) -> None:
    drafter = build()
    consume(drafter, 0, text[:-1])
    proposer = Placed(lambda depth, tokens: [copies[depth]] if depth < len(copies) else tokens)
    drafted(drafter, [text], proposer)
    assert proposer.lane(0)[len(copies) :] == continuation([*text, *copies], 4, DRAFTS - len(copies))


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        pytest.param([5, 6], [6] * 7, id="nothing matches: the last token"),
        pytest.param([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4, 1], id="a period goes on"),
        pytest.param([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8, 1, 2, 8], id="the latest of equals"),
        pytest.param([9, 1, 2, 7, 1, 2, 8, 9, 1, 2], [7, 1, 2, 8, 9, 1, 2], id="the longest before the latest"),
        pytest.param([3, 3], [3] * 7, id="a match of one token"),
    ],
)
def test_what_a_reader_would_expect(text: list[int], drafts: list[int]) -> None:
    assert continuation(text, 4, 7) == drafts
    drafter, proposer = build(), Placed()
    consume(drafter, 0, text[:-1])
    drafted(drafter, [text], proposer)
    assert proposer.lane(0) == drafts


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_history_is_what_was_consumed(data: st.DataObject) -> None:
    """Prompt chunks, then rounds of any width and emission; rejected drafts and −1 padding never get in."""
    drafter = build()
    text: list[int] = []
    for chunk in data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=70), min_size=1, max_size=2)):
        consume(drafter, 1, chunk, len(text))
        text += chunk
    pending = 0
    while len(text) < 145 and data.draw(st.booleans()):
        width = data.draw(st.integers(1, min(8, CONTEXT - len(text))))
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=width))
        emitted = data.draw(st.integers(0, len(tokens)))
        lane, count = lanes([len(text)], [pending], [1]), torch.tensor([emitted])
        drafter.absorb(lane, torch.tensor([[*tokens, *[-1] * (width - len(tokens))]]), count)
        drafter.commit(lane, count)
        if emitted:
            text += [pending, *tokens[: emitted - 1]]
            pending = tokens[emitted - 1]
    pages = drafter.store["tokens"][0][drafter.store.page_table[1]].flatten().tolist()
    assert pages[: len(text)] == text
    assert -1 not in pages
    assert int(drafter.store["rows"][0, 1]) == len(text)
    if len(text) > 1:
        proposer = Placed()
        drafter.propose(lanes([len(text)], [pending], [1]), DRAFTS, proposer)
        assert proposer.lane(0) == continuation([*text, pending], 4, DRAFTS)
        assert not drafter.faults(torch.tensor([1])).any()


def test_dead_lanes_write_to_the_trash_page_alone() -> None:
    drafter = build()
    consume(drafter, 0, [1, 2, 3])
    before = drafter.store["tokens"][:, 1:].clone()
    dead, nothing = lanes([1], [0], [drafter.store.spare]), torch.tensor([0])
    drafter.propose(dead, DRAFTS, Placed())
    drafter.absorb(dead, torch.full((1, 8), -1), nothing)
    drafter.commit(dead, nothing)
    assert torch.equal(drafter.store["tokens"][:, 1:], before)


def test_a_history_of_another_length_is_a_fault() -> None:
    drafter = build()
    consume(drafter, 0, [1, 2, 3])
    drafter.propose(lanes([4], [1]), 0, Placed())
    assert drafter.faults(torch.tensor([0])).tolist() == [1]
    consume(drafter, 1, [1, 2], start=1)
    assert drafter.faults(torch.tensor([1])).tolist() == [1]


def test_a_snapshot_restores_any_earlier_length() -> None:
    drafter = build()
    consume(drafter, 0, [1, 2, 3, 4, 1, 2, 3])
    state = drafter.snapshot(torch.tensor([0]))
    drafter.store.page_table[2] = drafter.store.page_table[0]
    drafter.restore(torch.tensor([2]), state, torch.tensor([5]))
    proposer = Placed()
    drafter.propose(lanes([5], [2], [2]), 2, proposer)
    assert proposer.lane(0) == continuation([1, 2, 3, 4, 1, 2], 4, 2)
    assert not drafter.faults(torch.tensor([2])).any()


class Ones:
    """Answers without reading a tensor."""

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        return tokens


def test_a_round_of_it_can_be_captured() -> None:
    drafter = build()
    consume(drafter, 0, [1, 2, 3, 1])
    consume(drafter, 1, [1, 2])
    lane, tokens, emitted = lanes([4, 2], [2, 1]), torch.ones(2, 8, dtype=torch.int64), torch.tensor([3, 0])
    with CapturableGuard():
        drafter.propose(lane, DRAFTS, Ones())
        drafter.absorb(lane, tokens, emitted)
        drafter.commit(lane, emitted)


def test_it_has_what_the_core_asks_for_and_holds_no_tensor_but_its_state() -> None:
    drafter = build()
    assert isinstance(drafter, Drafter)
    assert drafter.store.layout == RECIPE.drafter_layout
    held = [value for value in vars(drafter).values() if isinstance(value, Tensor)]
    assert not held and RECIPE.drafter_memory is None
