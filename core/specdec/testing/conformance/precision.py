"""How far two ways of computing the same state may differ in the precision of a suite."""

from __future__ import annotations

import math

from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class Precision:
    """What is allowed in one dtype.

    states: of one value, relative to itself and the field's scale. fields: norm of the difference over the norm of a field, where
    small differences of many values show. scaled: the scale is the root mean square of the field; otherwise it is 1.
    """

    states: float
    fields: float
    scaled: bool = True

    def differences(self, found: Tensor, wanted: Tensor) -> str | None:
        """What is wrong with floating-point values, for a message; None if nothing is. NaN differs from everything."""
        found, wanted = found.double(), wanted.double()
        difference = (found - wanted).abs()
        scale = wanted.pow(2).mean().sqrt() if self.scaled else 1.0
        close = difference <= self.states * (scale + wanted.abs())
        if not bool(close.all()):
            return f"{int((~close).sum())} of {close.numel()} values differ, by up to {float(difference.max()):.3g}"
        norm = float(wanted.norm())
        if norm and float(difference.norm()) > self.fields * norm:
            return f"values differ by {float(difference.norm()) / norm:.3g} of their norm"
        return None


#: Measured over the random checkpoints of this project's three recipes, rounds against prompt passes. float32: values differ by
#: up to 3e-5, fields by 6e-6 of their norm. bfloat16: by up to 0.14 and 0.02, with one result in fifty of every matrix product
#: off by a unit in the last place.
PRECISIONS = {
    "float64": Precision(states=1e-9, fields=math.inf, scaled=False),
    "float32": Precision(states=1e-3, fields=1e-4),
    "bfloat16": Precision(states=0.25, fields=0.05),
}
