"""Faults of random words, laws and capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import mutant, override
from torch import Tensor

from specdec.round import transaction
from specdec.sampling.law import law
from specdec.sampling.philox import TARGET_DOMAIN
from specdec.sampling.sampler import ReferenceSampler, RoundWords
from specdec.state.requests import GENERATED, RequestTable
from specdec.testing.conformance import Bench


def _last_lanes(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keeps the lanes of the round that runs."""
    seen: dict[str, Any] = {}

    def make(lanes: Any) -> Any:
        def kept(self: RequestTable, slots: Tensor) -> Any:
            seen["lanes"] = lanes(self, slots)
            return seen["lanes"]

        return kept

    override(patch, RequestTable, "lanes", make)
    return seen


@mutant("test_continuation_depends_on_position_only")
def words_follow_the_generated_count(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The random stream advances by emitted tokens, from zero at admission."""
    seen = _last_lanes(patch)
    override(
        patch,
        RoundWords,
        "of",
        lambda of: lambda seed, consumed, deepest: of(seed, seen["lanes"].integers[:, GENERATED], deepest),
    )


@mutant("test_every_draw_uses_the_words_of_its_position")
def drafts_and_target_share_words(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(patch, RoundWords, "uniforms", lambda uniforms: lambda self, domain: uniforms(self, TARGET_DOMAIN))


@mutant("test_abandoned_rounds_leave_no_mark")
def words_follow_the_rounds_that_ran(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    count = iter(range(1 << 40))
    override(
        patch,
        RoundWords,
        "of",
        lambda of: lambda seed, consumed, deepest: of(seed, torch.full_like(consumed, next(count)), deepest),
    )


@mutant("test_same_seed_gives_same_tokens_anywhere")
def drafts_use_the_global_generator(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(
        patch,
        RoundWords,
        "uniforms",
        lambda uniforms: (
            lambda self, domain: (
                uniforms(self, domain) if domain == TARGET_DOMAIN else torch.rand_like(uniforms(self, domain))
            )
        ),
    )


@mutant("test_same_seed_gives_same_tokens_anywhere")
def words_depend_on_the_lane(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(patch, RoundWords, "of", lambda of: lambda seed, *rest: of(seed + torch.arange(seed.shape[0]), *rest))


@mutant("test_emitted_law_with_good_drafts")
def stored_law_is_not_the_drawn_one(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The draw is right; what is kept for the accept test is the law at twice the temperature."""

    def make(draw: Any) -> Any:
        def broken(self: Any, depth: int, logits: Tensor) -> Tensor:
            token = draw(self, depth, logits)
            root = self.probs[:, depth].sqrt()
            self.probs[:, depth] = root / root.sum(-1, keepdim=True)
            return token

        return broken

    override(patch, transaction.ChainProposer, "draw", make)


@mutant("test_the_kept_law_is_the_drawn_one")
def drafts_are_drawn_from_rounded_logits(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The draw sees logits of another precision than the accept test."""

    def make(draw: Any) -> Any:
        def broken(self: Any, depth: int, logits: Tensor) -> Tensor:
            token = draw(self, depth, (logits * 16).round() / 16)
            self.probs[:, depth] = law(logits, self.params, self.vocab_size)
            return token

        return broken

    override(patch, transaction.ChainProposer, "draw", make)


@mutant("test_every_draw_uses_the_words_of_its_position")
def stored_laws_share_scratch_across_depths(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Every depth writes its law to the same memory; the last one is what all are judged by."""
    scratch = bench.arena.scratch

    def broken(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name != "draft_probs" or not shape[1]:
            return scratch(name, shape, dtype)
        return scratch(name, (shape[0], 1, shape[2]), dtype).expand(shape)

    bench.arena.scratch = broken


@mutant("test_drafter_without_a_law_keeps_the_law")
def a_draft_row_without_mass_is_always_accepted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(draw: Any) -> Any:
        def broken(self: Any, depth: int, logits: Tensor) -> Tensor:
            token = draw(self, depth, logits)
            self.probs[:, depth] *= logits.isfinite().all(-1, keepdim=True)
            return token

        return broken

    override(patch, transaction.ChainProposer, "draw", make)


@mutant("test_padded_vocabulary_is_never_proposed")
def padding_ids_are_tokens(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(draw: Any) -> Any:
        def broken(self: Any, depth: int, logits: Tensor) -> Tensor:
            token = draw(self, depth, logits)
            if logits.shape[-1] > self.vocab_size:
                self.tokens[:, depth] = logits.argmax(-1)
                return token
            return token

        return broken

    override(patch, transaction.ChainProposer, "draw", make)


@mutant("test_equal_logits_take_the_lowest_id")
def ties_take_the_highest_id(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(
        patch,
        ReferenceSampler,
        "law",
        lambda law: lambda self, logits, *args: law(self, logits.flip(-1), *args).flip(-1),
    )


@mutant("test_round_is_capturable")
def the_host_reads_a_tensor(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    verify = bench.target.verify

    def broken(tokens: Tensor, lanes: Any) -> Tensor:
        logits = verify(tokens, lanes)
        return logits if logits.isfinite().all() else torch.zeros_like(logits)

    bench.target.verify = broken


@mutant("test_round_is_capturable")
def a_round_leaves_memory_behind(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    verify, kept = bench.target.verify, []

    def broken(tokens: Tensor, lanes: Any) -> Tensor:
        logits = verify(tokens, lanes)
        kept.append(logits.clone())
        return logits

    bench.target.verify = broken


@mutant("test_broken_target_row_ends_that_request_only")
def a_broken_row_gives_token_zero(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """NaN in the target's law is papered over."""
    override(
        patch,
        ReferenceSampler,
        "law",
        lambda law: lambda *args: (lambda p: p + (p.sum(-1, keepdim=True) == 0))(torch.nan_to_num(law(*args), nan=0.0)),
    )
