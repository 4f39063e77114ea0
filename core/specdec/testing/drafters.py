"""Drafters for tests that wrap a real one: its state is kept as always, only what it proposes or what is seen of it
differs.

Wrappers nest. The one next to the real drafter sees its logits first; what it draws through is the next one out, and
the outermost draws through the round's own proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.interfaces import Drafter, Proposer
from specdec.state.requests import Lanes
from specdec.state.store import StateStore


class WrappedDrafter:
    """Passes everything on to ``inner``; ``proposer`` is the place to interfere."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        #: state of the wrapped drafter
        self.store: StateStore = inner.store

    def __getattr__(self, name: str) -> Any:
        """What a plugin's own round asks of its own drafter."""
        return getattr(self.inner, name)

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """The proposer that the wrapped drafter draws through in one round."""
        return inner

    def prefill(self, feedback: Tensor, tokens: Tensor, slot: Tensor, start: int | Tensor) -> None:
        """See ``Drafter.prefill``."""
        self.inner.prefill(feedback, tokens, slot, start)

    @property
    def lag(self) -> int:
        """See ``Drafter.lag``."""
        return self.inner.lag

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> Tensor | None:
        """See ``Drafter.propose``."""
        return self.inner.propose(lanes, draft_tokens, self.proposer(lanes, proposer))

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter.absorb``."""
        self.inner.absorb(lanes, tokens, emitted)

    def commit(self, lanes: Lanes, emitted: Tensor) -> None:
        """See ``Drafter.commit``."""
        self.inner.commit(lanes, emitted)

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> Mapping[str, Tensor]:
        """See ``Drafter.snapshot``."""
        return self.inner.snapshot(slots, taken)

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """See ``Drafter.restore``."""
        self.inner.restore(slot, state, consumed)

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Drafter.faults``."""
        return self.inner.faults(slots)


@frozen(kw_only=True, eq=False)
class Proposal:
    """One depth of one round: logits [B, V'] as the drafter gave them, V' = 0 for placed tokens; tokens [B] int64 as proposed,
    placed ones as the drafter gave them; slots [B] of the lanes; law [B, V] as kept for the accept test, if the proposer shows
    it."""

    depth: int
    slots: Tensor
    logits: Tensor
    tokens: Tensor
    law: Tensor | None


@frozen(kw_only=True, eq=False)
class _Recorder:
    inner: Proposer
    slots: Tensor
    seen: list[Proposal]

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        tokens = self.inner.draw(depth, logits)
        self._keep(depth, logits, tokens)
        return tokens

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        placed = self.inner.place(depth, tokens)
        self._keep(depth, torch.empty(tokens.shape[0], 0), tokens)
        return placed

    def _keep(self, depth: int, logits: Tensor, tokens: Tensor) -> None:
        kept = getattr(self.inner, "probs", None)
        self.seen.append(
            Proposal(
                depth=depth,
                slots=self.slots.clone(),
                logits=logits.clone(),
                tokens=tokens.clone(),
                law=None if kept is None else kept[:, depth].clone(),
            )
        )


class RecordingDrafter(WrappedDrafter):
    """Keeps a copy of every proposal; ``seen`` holds those of the last round."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.seen: list[Proposal] = []

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """Starts a new round's list."""
        self.seen = []
        return _Recorder(inner=inner, slots=lanes.slots, seen=self.seen)

    def logits(self, slot: int) -> Tensor:
        """Logits [K, V'] of a live slot in the last round."""
        return torch.stack([p.logits[p.slots == slot][0] for p in self.seen])

    def given(self, slot: int) -> Tensor:
        """What the drafter itself gave for a live slot at every depth of the last round: logits [K, V'], or the token ids
        [K, 1] int64 of a drafter that placed them."""
        logits = self.logits(slot)
        return logits if logits.shape[1] else torch.tensor(self.tokens(slot)).unsqueeze(1)

    def tokens(self, slot: int) -> list[int]:
        """Proposals of a live slot in the last round."""
        return [int(p.tokens[p.slots == slot][0]) for p in self.seen]


@frozen(kw_only=True, eq=False)
class _Logits:
    inner: Proposer
    change: Callable[[int, Tensor], Tensor]

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        return self.inner.draw(depth, self.change(depth, logits))

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        return self.inner.place(depth, tokens)


class AlteredLogits(WrappedDrafter):
    """Draws from other logits: ``change(depth, logits [B, V])`` gives them."""

    def __init__(self, inner: Drafter, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(inner)
        self.change = change

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """Draws through the change."""
        return _Logits(inner=inner, change=self.change)


@frozen(kw_only=True, eq=False)
class _PointMass:
    inner: Proposer
    choose: Callable[[int, Tensor], Tensor] = field(default=lambda depth, logits: logits.argmax(-1))

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        return self.inner.place(depth, self.choose(depth, logits))

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        return self.inner.place(depth, tokens)


class PointMassDrafter(WrappedDrafter):
    """Proposes the most probable token and says so: the stored law is the point mass, whatever the temperature."""

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """Places instead of drawing."""
        return _PointMass(inner=inner)


class AlteredProposer(WrappedDrafter):
    """Draws through ``alter(inner proposer)``: for negative controls, such as a stored law that is not the one drawn
    from."""

    def __init__(self, inner: Drafter, alter: Callable[[Proposer], Proposer]) -> None:
        super().__init__(inner)
        self.alter = alter

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """The altered proposer."""
        return self.alter(inner)


@frozen(kw_only=True, eq=False)
class _Guided:
    inner: Proposer
    slots: list[int]
    guide: Callable[[int, tuple[int, ...]], Tensor]
    drawn: list[list[int]]

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        rows = [self.guide(slot, tuple(tokens)) for slot, tokens in zip(self.slots, self.drawn, strict=True)]
        tokens = self.inner.draw(depth, torch.stack(rows).to(logits))
        for lane, token in zip(self.drawn, tokens.tolist(), strict=True):
            lane.append(token)
        return tokens

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        # in the place of what would have been placed: the guide's logits are all that matters
        return self.draw(depth, torch.empty(0, dtype=torch.float32, device=tokens.device))


class GuidedDrafter(WrappedDrafter):
    """Draws from logits [V] that ``guide(slot, tokens drawn so far in this round)`` gives, whatever the wrapped drafter draws
    or places. Reads tensors on the host."""

    def __init__(self, inner: Drafter, guide: Callable[[int, tuple[int, ...]], Tensor]) -> None:
        super().__init__(inner)
        self.guide = guide

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """Draws from the guide's logits."""
        slots = lanes.slots.tolist()
        return _Guided(inner=inner, slots=slots, guide=self.guide, drawn=[[] for _ in slots])
