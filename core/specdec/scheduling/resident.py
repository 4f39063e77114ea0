"""One request as the host knows it, from admission to its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from attrs import define, field

from specdec.control.acceptance import RequestSurvival
from specdec.scheduling.device import LanePlan, RoundPlan
from specdec.serving.grammar import GrammarState
from specdec.serving.request import Request
from specdec.serving.stops import StopMatcher
from specdec.state.prefix_records import PrefixHash


class TokenRun:
    """Tokens of one request, prompt and acknowledged output, and the digest of those already published."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens = array("q", prompt)
        self._hash = PrefixHash()

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds acknowledged output."""
        self.tokens.extend(tokens)

    def key(self, length: int) -> bytes:
        """Digest of the first ``length`` tokens; lengths never decrease from call to call."""
        self._hash.extend(self.tokens[self._hash.length : length])
        return self._hash.digest()


@define(kw_only=True, eq=False)
class Waiting:
    """A request without a slot: new, or preempted with the output it had. scores, acceptance: see ``Resident``."""

    number: int
    request: Request
    scores: Any = None
    acceptance: RequestSurvival | None = None


@define(kw_only=True, eq=False)
class Resident:
    """One admitted request.

    budget: most new tokens. context_bound: the context, not max_new_tokens, sets it. run: inputs and acknowledged output.
    extended: its rounds must be extended ones. host_decides: the host must read each of its rounds before the next, for its stop
    strings or its grammar. plain: neither, and no log-probabilities. total: inputs before its first round. generated: tokens
    emitted, earlier output included.
    consumed: inputs whose state the slot holds, as acknowledged. entered: the prompt is consumed, rounds may run. started: its
    first token was sampled. flights: its submitted and unacknowledged rounds. lost: a round of it was submitted and never
    acknowledged, so the slot's state is not known to be that of ``consumed``. matcher: looks for stop strings, None if there are
    none. retired: it has left its slot. grammar: where its output stands, None without one. plan: the last one without copies and
    masks, to be used again. acceptance: what a policy knows of its drafts. scores: prompt scores being read, the device's own
    object.
    """

    number: int
    request: Request
    slot: int
    epoch: int
    budget: int
    context_bound: bool
    run: TokenRun
    extended: bool = field(init=False)
    host_decides: bool = field(init=False)
    plain: bool = field(init=False)
    total: int = field(init=False)
    generated: int = field(init=False)
    consumed: int = 0
    entered: bool = False
    started: bool = False
    flights: list[RoundPlan] = field(factory=list)
    lost: bool = False
    retired: bool = False
    matcher: StopMatcher | None = None
    grammar: GrammarState | None = None
    plan: LanePlan | None = None
    acceptance: RequestSurvival | None = None
    scores: Any = None

    def __attrs_post_init__(self) -> None:
        self.extended = self.request.extended
        self.total = len(self.run.tokens)
        self.generated = len(self.request.output)
        self.host_decides = bool(self.request.stop) or self.request.grammar is not None
        self.plain = not self.host_decides and self.request.logprobs is None

    @property
    def ahead(self) -> int:
        """Most tokens that its unacknowledged rounds may have consumed."""
        return sum(plan.width for plan in self.flights if not plan.first)

    @property
    def in_flight(self) -> bool:
        """Whether a round of it was submitted and not acknowledged."""
        return self.lost or bool(self.flights)

    @property
    def settled(self) -> bool:
        """Whether the slot's state is that of ``consumed`` tokens of ``run``, the last token of which is pending."""
        return not self.in_flight and self.consumed == len(self.run.tokens) - 1

    @property
    def output(self) -> tuple[int, ...]:
        """Everything emitted so far, earlier output of a resumed request included."""
        return tuple(self.run.tokens[len(self.request.prompt) :])
