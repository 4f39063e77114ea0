"""What the core asks of a model: the objects that plugin hooks return, and what the core hands them.

Protocols only; nothing here is inherited. Torch types are imported for the type checker alone, so reading the contract
loads nothing.

Letters: B lanes, K draft tokens, W = K + 1 verification width, V vocabulary, N consumed tokens, t emitted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import Factory, field, frozen

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.round.allocation import PackedRows
    from specdec.round.graphs import Program
    from specdec.state.requests import Lanes
    from specdec.state.store import StateStore

__all__ = ["Capacities", "Drafter", "PackedTarget", "Proposer", "Round", "Target"]


@frozen(kw_only=True)
class Capacities:
    """What preparation decided to hold. Handed to ``build_target_state`` and ``load_drafter``.

    slots: requests that can be resident (R). context: most tokens of one request, prompt and output. pages: 64-token pages of
    each paged pool, trash page not counted. max_draft_tokens: the history horizon is this plus one whatever a round uses.
    draft_tokens: most drafts of a prepared round, by default ``max_draft_tokens``; the length of a block where the drafter works
    in blocks. dtype: torch dtype name of activations and weights, e.g. "float32". prefill_rows: most rows of one prompt chunk.
    """

    slots: int
    context: int
    pages: int
    max_draft_tokens: int
    dtype: str
    prefill_rows: int
    draft_tokens: int = field(default=Factory(lambda self: self.max_draft_tokens, takes_self=True))


@runtime_checkable
class Target(Protocol):
    """Target weights and the target's per-request state. Methods are tensor programs on fixed buffers (the guard checks)."""

    store: StateStore
    vocab_size: int

    def prefill(self, tokens: Tensor, slot: Tensor, start: int | Tensor) -> Tensor:
        """Consumes a prompt chunk of one request and commits all of it.

        tokens: [T] int64; slot: [1] int64; start: N before the chunk, a number, or [1] int64 where the chunk is captured. Returns
        the chunk's feedback rows [T, D]. Changes the store. Any 1 ≤ T ≤ ``Capacities.prefill_rows`` at any start.
        """

    def prefill_logits(self, rows: int, first: int = 0) -> Tensor:
        """Logits [rows, V] after inputs ``first`` … ``first + rows − 1`` of the last prompt chunk. Changes nothing.

        Valid from that ``prefill`` until the target's next call of another method, whatever the drafter does to its feedback
        rows meanwhile. Called right after ``prefill``, before the drafter absorbs the chunk, and a few rows at a time, so that
        the logits of a whole chunk never exist at once. Raises RuntimeError if no chunk's rows are kept any more (a replayed
        graph cannot tell) and ValueError if the chunk has fewer rows.
        """

    def first_logits(self, slots: Tensor) -> Tensor:
        """Logits [B, V] of the token after the consumed ones, from the saved sampling vector. Changes nothing."""

    def verify(self, tokens: Tensor, lanes: Lanes) -> Tensor:
        """Runs the target on W inputs per lane at positions N … N+W−1; row j sees exactly the candidate prefix up to j.

        tokens: [B, W] int64. Returns logits [B, W, V]. Writes candidates (columns, records, window candidates, private pages) and
        changes nothing committed; with W = 1, where nothing can be rejected, it may update a committed row directly.
        """

    def commit(self, lanes: Lanes, taken: Tensor) -> None:
        """Selects the state after verification input ``taken − 1`` (taken [B] int64; 0 keeps the state)."""

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> Mapping[str, Tensor]:
        """Committed state of lanes, pages excluded: [layers, B, …] by field name.

        taken: [B] int64 between verification and commit: the state as if that many inputs were consumed; None between rounds.
        """

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """Gives a slot the state of ``consumed`` tokens from a snapshot of one lane. slot, consumed: [1] int64. Pages are the
        caller's. Between rounds; a tensor program that may be captured."""

    def feedback(self, slots: Tensor) -> Tensor:
        """Saved feedback row h[N−1] of each slot, [B, D]; what a drafter completes with the pending token."""

    def feedback_rows(self, slots: Tensor, rows: int) -> Tensor:
        """Feedback of the last verification's first ``rows`` inputs, [B, rows, D]."""

    def faults(self, slots: Tensor) -> Tensor:
        """Number of broken state invariants seen since admission, [B] int64; anything but 0 ends the request with an error."""


@runtime_checkable
class PackedTarget(Target, Protocol):
    """A target that verifies fewer rows than B·W: what rounds with forecasts (``Recipe.confidence_width``) need."""

    def verify_rows(self, tokens: Tensor, rows: PackedRows) -> Tensor:
        """As ``verify`` for packed rows: row i of a lane sees its lane's committed state and the rows of smaller index.

        tokens: [P] int64. Returns logits [P, V]; they mean nothing where a row is not live, and such rows write to the spare slot
        and the trash page only. Feedback and head input of a row are left in column ``rows.index`` of its slot, so that
        ``commit`` and ``feedback_rows`` work as after ``verify``; columns of rows that were not packed keep what they held.
        """


class Proposer(Protocol):
    """Draws draft tokens for a drafter; owned by the core, so that the stored law is the law that was drawn from."""

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """Filters logits [B, V] by each lane's sampling options, stores the law as ``draft_probs[:, depth]`` and returns
        the tokens [B] int64 that the drafter goes on from: the drawn ones, or a lane's copied token of this depth, which takes
        the place of the drawn one under a point-mass law."""

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        """Proposes the given tokens [B] int64 under a point-mass law. Returns as ``draw``; ids outside the vocabulary come back
        as the nearest one."""


@runtime_checkable
class Drafter(Protocol):
    """Draft weights and draft state. Same rules as ``Target``.

    lag: rows of draft history that are missing at N consumed tokens. 1 where row i pairs the feedback h[i] with the token after
    it, which is not known for the last one; 0 where a row is made from h[i] alone. History has max(N − lag, 0) rows, counted
    in the ``row`` field ``rows`` of the store.
    """

    store: StateStore

    @property
    def lag(self) -> int:
        """0 or 1; see the class."""

    def prefill(self, feedback: Tensor, tokens: Tensor, slot: Tensor, start: int | Tensor) -> None:
        """Absorbs prompt rows start … start+T−1 from real feedback and commits them: row i is made from h[i] and, with lag 1,
        the token x[i+1].

        feedback: [T, D]; tokens: [T] int64 are x[start+lag … start+T−1+lag]; slot: [1]; start as for ``Target.prefill``.
        """

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> Tensor | None:
        """Proposes ``draft_tokens`` tokens through ``proposer``; with lag 1 it first completes row N−1 (saved feedback, pending
        token), also where ``draft_tokens`` = 0. Called before verification, which overwrites the saved feedback.

        Returns forecasts [B, K] float32, or None from a drafter that makes none: the probability that draft j is accepted if the
        earlier ones are, computed from nothing but tokens before draft j and committed state, so that a round may use it to
        decide whether to verify that draft.
        """

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """Writes draft rows from real feedback, as candidates that ``commit`` selects among: rows N … N+t−1−lag, row N+j from
        h[N+j] and, with lag 1, emitted token j.

        tokens: [B, W] int64 emitted tokens (−1 padded); emitted: [B] int64 t. Called once in every round, after verification.
        With lag 1 and W = 1 there is nothing to write.
        """

    def commit(self, lanes: Lanes, emitted: Tensor) -> None:
        """Selects the draft state after ``emitted`` [B] int64 consumed inputs; 0 keeps the state. Called once in every round,
        after ``absorb`` and the round's snapshots and before ``Target.commit``. This is the commit of all draft state."""

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> Mapping[str, Tensor]:
        """Committed draft state of lanes, pages excluded: [layers, B, …] by field name.

        taken: [B] int64 between ``absorb`` and ``commit``: the state as if that many inputs were consumed, at most those that
        were emitted; None between rounds.
        """

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """Gives a slot the state of max(consumed − lag, 0) absorbed rows from a snapshot of one lane: one taken at that length,
        or, where rows stay readable by position, at a greater one. Otherwise as ``Target.restore``."""

    def faults(self, slots: Tensor) -> Tensor:
        """As ``Target.faults``."""


@runtime_checkable
class Round(Protocol):
    """One captured or eager round of one shape."""

    program: Program
    """``run`` as ``submit`` runs it: eagerly until preparation captures it, then one CUDA graph for every prepared variant."""

    @property
    def boundary_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """After a round with ``boundary``: "target" and "drafter" snapshots at the next multiple of the page size."""

    def submit(
        self,
        slots: Sequence[int],
        ceilings: Sequence[int],
        number: int,
        *,
        boundary: bool = False,
        extended: bool = False,
        copies: Sequence[Sequence[int]] | None = None,
        masked: bool = False,
    ) -> None:
        """Copies the host's frozen decisions into the staging buffer (one copy) and runs the round.

        copies: tokens by lane that replace the lane's first drafts under a point-mass law, at most K each and () for none;
        drafts behind them continue from them, and the ceiling counts both. Raises UsageError where the recipe does not declare
        ``supports_history_drafts``, or the copies do not fit lanes and drafts.

        boundary: also keep the state at the next page boundary of each lane, for lanes whose emission crosses it.
        extended: also apply penalties, logit bias and minimum lengths and keep log-probabilities; submitted only when a lane uses
        one of these.
        masked: also forbid what the masks of each lane's rows forbid, which the host wrote to ``Arena.masks`` before: row j under
        the grammar after the pending token and the lane's first j drafts; submitted only when a lane has a grammar.
        All three are static variants of the program; lanes that use nothing of a variant get the same result without it.
        """

    def run(self, *, boundary: bool = False, extended: bool = False, masked: bool = False) -> None:
        """The tensor program alone, reading the staging buffer. This is what a CUDA graph captures."""
