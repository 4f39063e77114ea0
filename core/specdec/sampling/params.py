"""What a request asks of the sampler. Torch-free: the command line builds these before anything heavy is imported."""

import math
from typing import Any

from attrs import Attribute, field, frozen

from specdec.errors import UsageError

INT64_LIMIT = 1 << 63
"""Seeds and top-k travel in int64 tensors."""
_SMALLEST, _GREATEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The normal float32 numbers; temperatures travel in float32 tensors, and one that became 0 or infinite would turn
logits into NaN."""


def _real(attribute: "Attribute[Any]", value: object, allowed: str) -> float:
    # bool is an int in Python, and `True` as a temperature is a slip, not a number.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise UsageError(f"{attribute.name} is {value!r}; it must be a number {allowed}")
    return float(value)


def _whole(attribute: "Attribute[Any]", value: object, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{attribute.name} is {value!r}; it must be a whole number {allowed}")
    return value


@frozen(kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every value is checked when the object is made.

    Filters apply in this order, each to the renormalised rest of the one before: temperature, min-p, top-k, top-p.

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
    """Take the most probable token (the lowest id among equals); the other settings have no effect."""
    seed: int = field(default=0)
    """Key of the request's random stream, 0 .. 2^63 - 1."""

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
