"""What a simulated target would accept: conditional acceptance by depth, how it varies along an output, and copies.

All luck is a function of (seed, request, position in the output), never of what was drawn before. Two policies that bring a
request to the same position see the same luck there, so that their difference is theirs and not chance's.

Words: position i is the i-th output token, from 0; depth k is the k-th draft of a round, from 0.
"""

from __future__ import annotations

from attrs import field, frozen

from specdec.errors import UsageError

_MASK = (1 << 64) - 1
#: Token ids of simulated outputs are 1 … VOCAB − 1; 0 ends an output early.
VOCAB = 1 << 20
STOP = 0

# independent streams of one position
_DRAFT, _TOKEN, _BURST, _MATCH, _LENGTH, _COPY = range(6)


def _mixed(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits without visible structure."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


class Luck:
    """The random numbers of one request. Equal arguments give equal numbers in every process."""

    __slots__ = ("_key",)

    def __init__(self, seed: int, request: int) -> None:
        self._key = _mixed((_mixed((seed + 0x9E3779B97F4A7C15) & _MASK) + request * 0xD1B54A32D192ED03) & _MASK)

    def word(self, stream: int, position: int) -> int:
        """64 uniform bits."""
        return _mixed((self._key + stream * 0x8CB92BA72F3D8DD7 + position * 0x9E3779B97F4A7C15) & _MASK)

    def uniform(self, stream: int, position: int) -> float:
        """In [0, 1), 53 bits."""
        return (self.word(stream, position) >> 11) * 2.0**-53

    def token(self, position: int) -> int:
        """The token that the target emits at a position, whatever was drafted; never STOP."""
        return 1 + self.word(_TOKEN, position) % (VOCAB - 1)


def _rates(values: object) -> tuple[float, ...]:
    return tuple(values)  # type: ignore[arg-type]


def _check_rates(instance: object, attribute: object, values: tuple[float, ...]) -> None:
    name = getattr(attribute, "name", "conditional")
    if not values:
        raise UsageError(f"{name} is empty; give the acceptance of at least one depth")
    for value in values:
        _check_share(name, value)


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"{name} is {value!r}; it must be between 0 and 1")


@frozen(kw_only=True)
class Burst:
    """Stretches of an output with another curve: a ``share`` of blocks of ``tokens`` positions, chosen independently.

    Raises UsageError for a number out of range.
    """

    tokens: int
    share: float
    conditional: tuple[float, ...] = field(converter=_rates, validator=_check_rates)

    def __attrs_post_init__(self) -> None:
        _check_share("share", self.share)
        if type(self.tokens) is not int or self.tokens < 1:
            raise UsageError(f"tokens is {self.tokens!r}; a block has at least one position")


@frozen(kw_only=True)
class Change:
    """From position ``at`` on, another curve. Raises UsageError for a number out of range."""

    at: int
    conditional: tuple[float, ...] = field(converter=_rates, validator=_check_rates)

    def __attrs_post_init__(self) -> None:
        if type(self.at) is not int or self.at < 0:
            raise UsageError(f"at is {self.at!r}; it must be a position, 0 or more")


@frozen(kw_only=True)
class Copies:
    """Copied continuations. rate: share of positions where one is found. long_share: of those, matched by eight tokens, the rest
    by four. long, short: acceptance of copied draft k if those before it were right, by match length. most: longest copy.

    Raises UsageError for a number out of range.
    """

    rate: float
    long_share: float
    long: tuple[float, ...] = field(converter=_rates, validator=_check_rates)
    short: tuple[float, ...] = field(converter=_rates, validator=_check_rates)
    most: int = 7

    def __attrs_post_init__(self) -> None:
        _check_share("rate", self.rate)
        _check_share("long_share", self.long_share)
        if type(self.most) is not int or self.most < 1:
            raise UsageError(f"most is {self.most!r}; a copy has at least one token")


@frozen(kw_only=True)
class Category:
    """One kind of text. conditional: probability that draft k is accepted if those before it were; the last one holds for deeper
    drafts. Later changes win over the curve, bursts over both.

    Raises UsageError for a number out of range.
    """

    conditional: tuple[float, ...] = field(converter=_rates, validator=_check_rates)
    burst: Burst | None = None
    changes: tuple[Change, ...] = field(default=(), converter=tuple)
    copies: Copies | None = None

    def curve(self, luck: Luck, position: int) -> tuple[float, ...]:
        """The curve in force at a position."""
        burst = self.burst
        if burst is not None and luck.uniform(_BURST, position // burst.tokens) < burst.share:
            return burst.conditional
        found = self.conditional
        for change in self.changes:
            if position >= change.at:
                found = change.conditional
        return found

    def accepts(self, luck: Luck, position: int, depth: int) -> bool:
        """Whether a learned draft at a depth is accepted at a position if the drafts before it were.

        A position is judged again only where an earlier round did not look, so the curve is met exactly.
        """
        rates = self.curve(luck, position)
        return luck.uniform(_DRAFT, position) < rates[min(depth, len(rates) - 1)]

    def copy(self, luck: Luck, position: int) -> tuple[tuple[int, ...], int] | None:
        """The continuation that decoded history offers for the tokens from a position on, and its match length."""
        copies = self.copies
        if copies is None or luck.uniform(_MATCH, position) >= copies.rate:
            return None
        long = luck.uniform(_LENGTH, position) < copies.long_share
        rates = copies.long if long else copies.short
        tokens, right = [], True
        for depth in range(copies.most):
            rate = rates[min(depth, len(rates) - 1)]
            right = right and luck.uniform(_COPY, position * copies.most + depth) < rate
            truth = luck.token(position + depth)
            # any other token is a wrong one
            tokens.append(truth if right else 1 + truth % (VOCAB - 1))
        return tuple(tokens), 8 if long else 4


def survival(conditional: tuple[float, ...], drafts: int) -> tuple[float, ...]:
    """Probability that a prefix of 1 … ``drafts`` drafts is accepted."""
    found, running = [], 1.0
    for depth in range(drafts):
        running *= conditional[min(depth, len(conditional) - 1)]
        found.append(running)
    return tuple(found)
