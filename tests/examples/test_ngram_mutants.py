"""The conformance suite sees what may be wrong with a drafter that places tokens: each fault by the test named for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import Run
from ngram_conformance import NgramConformance
from ngram_example import NgramDrafter
from qwen_conformance import GEOMETRY, SEED
from qwen_models import write_random_checkpoint
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.testing.conformance import Bench, RoundConformance


def keeps_rejected_drafts(drafter: NgramDrafter) -> None:
    """History holds what was proposed, not what was emitted."""
    propose = drafter.propose

    def recording(lanes: Any, draft_tokens: int, proposer: Any) -> None:
        answers: list[Tensor] = []

        class Recorder:
            def place(self, depth: int, tokens: Tensor) -> Tensor:
                answers.append(proposer.place(depth, tokens))
                return answers[-1]

        propose(lanes, draft_tokens, Recorder())
        if answers:
            block = torch.stack([*answers, answers[-1]], dim=1)
            drafter.absorb = lambda lanes, tokens, emitted: absorb(lanes, block, torch.full_like(emitted, len(answers)))

    absorb = drafter.absorb
    drafter.propose = recording


def absorbs_one_position_late(drafter: NgramDrafter) -> None:
    keep = drafter._keep
    drafter._keep = lambda slots, start, tokens, valid=None: keep(slots, start + (tokens.shape[0] > 1), tokens, valid)


def absorbs_nothing(drafter: NgramDrafter) -> None:
    drafter.absorb = lambda lanes, tokens, emitted: None


def reads_behind_the_end(drafter: NgramDrafter) -> None:
    following = drafter._following
    drafter._following = lambda text, positions, end: following(text, positions, end + 3)


def ignores_copies(drafter: NgramDrafter) -> None:
    propose = drafter.propose

    class Deaf:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def place(self, depth: int, tokens: Tensor) -> Tensor:
            self.inner.place(depth, tokens)
            return tokens

    drafter.propose = lambda lanes, draft_tokens, proposer: propose(lanes, draft_tokens, Deaf(proposer))


def reads_a_neighbour(drafter: NgramDrafter) -> None:
    read = drafter.store.read_pages
    drafter.store.read_pages = lambda name, layer, rows, lanes: read(name, layer, rows, lanes).roll(1, 0)


def reads_the_host(drafter: NgramDrafter) -> None:
    check = drafter._check
    drafter._check = lambda slots, consumed: check(slots, consumed) if consumed.max().item() else None


def reads_feedback(drafter: NgramDrafter) -> None:
    """Fault of the declaration: the target's feedback has a say in what is placed."""
    propose = drafter.propose

    class Swayed:
        def __init__(self, inner: Any, mark: Tensor) -> None:
            self.inner, self.mark = inner, mark

        def place(self, depth: int, tokens: Tensor) -> Tensor:
            return self.inner.place(depth, (tokens + self.mark) % GEOMETRY.vocab_size)

    def swayed(lanes: Any, draft_tokens: int, proposer: Any) -> None:
        mark = (drafter.target.feedback(lanes.slots).sum(1) * 1e6).floor().remainder(GEOMETRY.vocab_size).long()
        propose(lanes, draft_tokens, Swayed(proposer, mark))

    drafter.propose = swayed


def snapshots_forget_the_length(drafter: NgramDrafter) -> None:
    restore = drafter.restore
    drafter.restore = lambda slot, state, consumed: restore(slot, state, consumed + 1)


def draws_from_logits(drafter: NgramDrafter) -> None:
    """Fault of the declaration: drafts are drawn."""

    class Drawing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def place(self, depth: int, tokens: Tensor) -> Tensor:
            return self.inner.draw(depth, torch.nn.functional.one_hot(tokens, GEOMETRY.vocab_size).double())

    propose = drafter.propose
    drafter.propose = lambda lanes, draft_tokens, proposer: propose(lanes, draft_tokens, Drawing(proposer))


FAULTS: dict[Callable[[NgramDrafter], None], str] = {
    keeps_rejected_drafts: "test_state_after_every_accepted_count",
    absorbs_one_position_late: "test_state_after_every_accepted_count",
    absorbs_nothing: "test_state_after_every_accepted_count",
    reads_behind_the_end: "test_poison_leaves_proposals_as_they_are",
    ignores_copies: "test_drafts_behind_copies_continue_from_them",
    reads_a_neighbour: "test_proposals_depend_on_committed_tokens_only",
    reads_the_host: "test_round_is_capturable",
    reads_feedback: "test_the_first_draft_reads_the_saved_feedback",
    snapshots_forget_the_length: "test_snapshots_continue_elsewhere",
    draws_from_logits: "test_the_kept_law_is_the_drawn_one",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("ngram"), SEED, GEOMETRY)


def suite(fault: Callable[[NgramDrafter], None] | None) -> type[RoundConformance]:
    class Suite(NgramConformance, RoundConformance):
        @classmethod
        def prepared(cls, bench: Bench) -> Bench:
            made = super().prepared(bench)
            if fault is not None:
                made.drafter.target = made.target  # type: ignore[attr-defined]
                fault(made.drafter)  # type: ignore[arg-type]
            return made

    return Suite


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@torch.inference_mode()
def test_fault_is_noticed(fault: Callable[[NgramDrafter], None], folder: Path) -> None:
    torch.set_num_threads(1)
    run, name = Run(suite(fault), folder), FAULTS[fault]
    for case in run.cases(name):
        try:
            run.call(name, case)
        except (AssertionError, SpecdecError):
            return
    pytest.fail(f"{fault.__name__} passes {name}")


@pytest.fixture(scope="module")
def sound(folder: Path) -> Run:
    return Run(suite(None), folder)


@pytest.mark.parametrize("name", sorted(set(FAULTS.values())))
@torch.inference_mode()
def test_without_a_fault_the_same_run_passes(name: str, sound: Run) -> None:
    torch.set_num_threads(1)
    cases = list(sound.cases(name))
    for case in {0: cases[0], len(cases) - 1: cases[-1]}.values():
        sound.call(name, case)


@torch.inference_mode()
def test_placed_drafts_must_be_declared(folder: Path) -> None:
    torch.set_num_threads(1)

    class Undeclared(NgramConformance, RoundConformance):
        proposals = "filtered"

    with pytest.raises(AssertionError, match="drafts are placed, but proposals is 'filtered'"):
        Run(Undeclared, folder).call("test_every_draw_uses_the_words_of_its_position", {"any_drafts": 3})
