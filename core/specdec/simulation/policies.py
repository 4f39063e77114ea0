"""Width policies by name: ``adaptive``, ``fixed:W`` (verification width W), ``plain`` (no drafter at all)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from specdec.control.acceptance import AcceptanceHistory
from specdec.control.controller import WidthController
from specdec.errors import UsageError
from specdec.scheduling.policy import AdaptiveWidth, FixedWidth, WidthPolicy


@frozen(kw_only=True)
class NamedPolicy:
    """plain: the device has no drafter. make: a fresh policy for one replica."""

    name: str
    plain: bool
    make: Callable[[], WidthPolicy]


def named_policy(name: str, widths: Sequence[int]) -> NamedPolicy:
    """The policy of a name. widths: those prepared. Raises UsageError for an unknown name or a width that is not prepared."""
    kind, colon, number = name.partition(":")
    if name == "plain" or (name == "adaptive" and widths[-1] == 1):
        return NamedPolicy(name=name, plain=name == "plain", make=lambda: FixedWidth(1))
    if name == "adaptive":
        return NamedPolicy(name=name, plain=False, make=lambda: _adaptive(widths))
    if kind == "fixed" and colon and number.isascii() and number.isdecimal():
        width = int(number)
        if width not in widths:
            raise UsageError(f"policy {name!r}: width {width} is not prepared; prepared: {', '.join(map(str, widths))}")
        return NamedPolicy(name=name, plain=False, make=lambda: FixedWidth(width))
    raise UsageError(f"policy is {name!r}; allowed: adaptive, plain, fixed:W with a verification width W")


def _adaptive(widths: Sequence[int]) -> AdaptiveWidth:
    """Knows nothing yet: neither costs nor acceptance."""
    return AdaptiveWidth(WidthController(widths), AcceptanceHistory(widths[-1] - 1))
