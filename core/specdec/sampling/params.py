"""What a request asks of the sampler. Torch-free: the command line builds these before anything heavy is imported."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Attribute, field, frozen

from specdec.errors import UsageError

INT64_LIMIT = 1 << 63
"""Seeds and top-k travel in int64 tensors."""
_SMALLEST, _GREATEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The normal float32 numbers; temperatures travel in float32 tensors, and one that became 0 or infinite would turn
logits into NaN."""


PENALTY_LIMIT = 2.0
"""Presence and frequency penalties reach from minus to plus this (OpenAI API reference)."""
REPETITION_LIMITS = 0.01, 100.0
"""Ours: far wider than anything in use, and no finite logit of a model overflows float32."""
BIAS_LIMIT = 100.0
"""Logit biases reach from minus to plus this (OpenAI API reference)."""


def _real(attribute: "Attribute[Any]", value: object, allowed: str) -> float:
    # bool is an int in Python, and `True` as a temperature is a slip, not a number.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise UsageError(f"{attribute.name} is {value!r}; it must be a number {allowed}")
    return float(value)


def _whole(attribute: "Attribute[Any]", value: object, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{attribute.name} is {value!r}; it must be a whole number {allowed}")
    return value


def _pairs(value: object) -> object:
    """Pairs by token id; anything else is left for the validator to name."""
    if isinstance(value, Mapping):
        value = value.items()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        pairs = tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in value)
        if all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs):
            return tuple(sorted(pairs, key=lambda pair: pair[0]))
        return pairs
    return value


@frozen(kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every value is checked when the object is made.

    Logits change in this order: repetition, frequency and presence penalty, logit bias. Then filters apply in this order, each
    to the renormalised rest of the one before: temperature, min-p, top-k, top-p.

    Raises:
        UsageError: if a value is not a number or outside its range; one line names option, value, range and cure.
    """

    temperature: float = field(default=1.0)
    """Divisor of the logits: a positive normal float32 number. For deterministic output use `greedy`, not 0."""
    top_k: int = field(default=0)
    """Keep the k most probable tokens; 0 turns the filter off."""
    top_p: float = field(default=1.0)
    """Keep the most probable tokens that together reach this mass, in (0, 1]; 1 turns the filter off."""
    min_p: float = field(default=0.0)
    """Keep tokens with at least this fraction of the greatest probability, in [0, 1]; 0 turns the filter off."""
    greedy: bool = field(default=False)
    """Take the most probable token (the lowest id among equals) after penalties and bias; the filters have no effect."""
    seed: int = field(default=0)
    """Key of the request's random stream, 0 .. 2^63 - 1."""
    presence_penalty: float = field(default=0.0)
    """Taken off the logit of every token that the output holds already, in [-2, 2]; 0 is off."""
    frequency_penalty: float = field(default=0.0)
    """Taken off a token's logit once for each time that the output holds it, in [-2, 2]; 0 is off."""
    repetition_penalty: float = field(default=1.0)
    """Divides positive logits of tokens in prompt or output and multiplies negative ones, in [0.01, 100]; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_pairs)
    """(token id, value added to its logit) pairs or a mapping; ids once each, values in [-100, 100]."""

    @property
    def shapes_logits(self) -> bool:
        """Whether a penalty or a bias is on, which ordinary rounds leave out."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        return bool(self.logit_bias) or not neutral

    @temperature.validator
    def _positive_temperature(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "above 0 and finite as float32 (1.2e-38 to 3.4e38)"
        number = _real(attribute, value, allowed)
        if number == 0:
            raise UsageError(
                "temperature is 0, but it divides the logits and must be above 0; "
                "for the most probable token every time use greedy=True (--greedy)"
            )
        if not _SMALLEST <= number <= _GREATEST:
            raise UsageError(f"temperature is {value!r}; it must be a number {allowed}")

    @top_k.validator
    def _natural_top_k(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "from 0 (off) to 2^63 - 1"
        if not 0 <= _whole(attribute, value, allowed) < INT64_LIMIT:
            raise UsageError(f"top_k is {value!r}; it must be a whole number {allowed}")

    @top_p.validator
    def _mass_top_p(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "above 0 and at most 1 (off)"
        if not 0 < _real(attribute, value, allowed) <= 1:
            raise UsageError(f"top_p is {value!r}; it must be a number {allowed}")

    @min_p.validator
    def _fraction_min_p(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "from 0 (off) to 1"
        if not 0 <= _real(attribute, value, allowed) <= 1:
            raise UsageError(f"min_p is {value!r}; it must be a number {allowed}")

    @greedy.validator
    def _boolean_greedy(self, attribute: "Attribute[Any]", value: object) -> None:
        if not isinstance(value, bool):
            raise UsageError(f"greedy is {value!r}; it must be True or False")

    @seed.validator
    def _int64_seed(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "from 0 to 2^63 - 1"
        if not 0 <= _whole(attribute, value, allowed) < INT64_LIMIT:
            raise UsageError(f"seed is {value!r}; it must be a whole number {allowed}")

    @presence_penalty.validator
    @frequency_penalty.validator
    def _bounded_penalty(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "from -2 to 2; 0 is off"
        if not -PENALTY_LIMIT <= _real(attribute, value, allowed) <= PENALTY_LIMIT:
            raise UsageError(f"{attribute.name} is {value!r}; it must be a number {allowed}")

    @repetition_penalty.validator
    def _positive_factor(self, attribute: "Attribute[Any]", value: object) -> None:
        allowed = "from 0.01 to 100; 1 is off"
        if not REPETITION_LIMITS[0] <= _real(attribute, value, allowed) <= REPETITION_LIMITS[1]:
            raise UsageError(f"repetition_penalty is {value!r}; it must be a number {allowed}")

    @logit_bias.validator
    def _bias_pairs(self, attribute: "Attribute[Any]", value: object) -> None:
        if not isinstance(value, tuple):
            raise UsageError(f"logit_bias is {value!r}; it must be a mapping from token ids to numbers")
        seen = set()
        for pair in value:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise UsageError(f"logit_bias holds {pair!r}; it takes pairs of a token id and a number")
            token, bias = pair
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UsageError(f"logit_bias names token {token!r}; token ids are whole numbers from 0")
            if token in seen:
                raise UsageError(f"logit_bias names token {token} twice; give one value for each token")
            seen.add(token)
            number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not number or not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
                raise UsageError(f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100")
