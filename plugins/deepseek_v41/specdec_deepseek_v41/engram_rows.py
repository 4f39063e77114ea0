"""Table rows of an Engram layer for a batch of token windows, as a tensor program."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.hash_tables import offsets

from .geometry import Geometry


@frozen(kw_only=True, eq=False)
class RowIds:
    """The hash of one Engram layer; build it with :meth:`of`.

    ``multipliers``: int64 [n], newest token first; ``sizes`` and ``starts``: int64 [(n − 1) · heads].
    """

    multipliers: Tensor
    sizes: Tensor
    starts: Tensor

    @classmethod
    def of(cls, geometry: Geometry, layer: int, device: torch.device) -> RowIds:
        """The constants of Engram layer ``layer`` on a device. Preparation only."""
        sizes = geometry.engram_primes(layer)
        numbers = (geometry.engram_multipliers(layer), sizes, offsets(sizes))
        multipliers, primes, starts = (torch.tensor(item, dtype=torch.int64, device=device) for item in numbers)
        return cls(multipliers=multipliers, sizes=primes, starts=starts)

    def __call__(self, windows: Tensor) -> Tensor:
        """windows: compressed ids int64 [..., n], newest first → row ids int64 [..., (n − 1) · heads].

        A tensor program: no synchronisation, allocates its result, does not change its input.
        """
        products = (windows * self.multipliers).unbind(-1)
        mixed, prefixes = products[0], []
        for product in products[1:]:
            mixed = mixed ^ product
            prefixes.append(mixed)
        heads = self.sizes.shape[0] // len(prefixes)
        # products of an odd multiplier and an id stay below 2^63, so the remainder is that of a non-negative number
        spread = torch.stack(prefixes, -1).unsqueeze(-1).expand(*mixed.shape, len(prefixes), heads).flatten(-2)
        return spread % self.sizes + self.starts
