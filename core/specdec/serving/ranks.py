"""Agreement of tensor-parallel ranks: what a round did is compared before any of it is applied.

Every rank runs the round on its own copy of the request table and draws with the same random words; no rank tells another
which token it took. One bit of difference in a logit can decide a draw, and from there the ranks' states belong to different
texts while their collectives still match. The records say all of a round that may differ, so comparing them is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import torch
import torch.distributed as dist

from specdec.errors import DesynchronisationError, UsageError
from specdec.round.completion import METADATA_FIELDS, Field, Finish

Record = Sequence[int]

_CURE = (
    "nothing of the round was applied; give all ranks the same calls in the same order, the same checkpoint, options and seeds, "
    "and sample from the same gathered logits"
)
_IDENTITY = (Field.REQUEST, Field.ROUND, Field.SLOT)
# admissions of one rank's model, counted from its loading: after an error ranks may have made different numbers of them, and a
# new generator on each may still do the same
_OWN = (Field.EPOCH,)


class RankAgreement:
    """Compares completion records over a process group; one object for each generator of each rank.

    All ranks must make the same calls of the generator in the same order, cancellations and steps included: a rank that waits
    for one that has failed or stopped gives up after the timeout of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: the ranks, over a backend that carries CPU tensors such as gloo, because records are compared on the host.
        None or a group of one compares nothing.

        Raises UsageError if the backend cannot carry them or this process is none of the ranks.
        """
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UsageError("this process is no rank of the group; build the generator on the ranks of the group only")
        if group is not None and group.size() > 1 and "cpu:" not in dist.get_backend_config(group):
            raise UsageError(
                f"rank agreement over {dist.get_backend(group)}: completion records are CPU tensors; make a group of the same "
                "ranks for them with new_group(backend='gloo')"
            )
        self._group = group if group is not None and group.size() > 1 else None
        self._failure: str | None = None

    def check(self, number: int, records: Sequence[Record]) -> None:
        """Returns if all ranks have these records of round ``number``, in lane order, epochs aside; collective.

        records: each METADATA_FIELDS + W integers, as read from a frame.

        Raises DesynchronisationError if any differ, with the same message on every rank, or if a rank does not answer within the
        timeout of the group. Every later call raises it again: the device is a round ahead of what was acknowledged, so
        requests can be cancelled, but not continued.
        """
        if self._group is None:
            return
        if self._failure is None:
            self._failure = self._difference(self._group, number, records)
        if self._failure is not None:
            raise DesynchronisationError(self._failure)

    @staticmethod
    def _difference(group: dist.ProcessGroup, number: int, records: Sequence[Record]) -> str | None:
        """What is wrong, None if nothing is. Records travel only if their digests differ, which all ranks see alike."""
        records = [[0 if place in _OWN else value for place, value in enumerate(record)] for record in records]
        own = torch.tensor([number, len(records), _digest(records)], dtype=torch.int64)
        try:
            found = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(found, own, group=group)
            if all(torch.equal(other, own) for other in found):
                return None
            gathered: list[tuple[int, Sequence[Record]]] = [(0, ())] * group.size()
            dist.all_gather_object(gathered, (number, records), group=group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return (
                f"round {number}: not all ranks answered ({reason}); look for one that failed or ended before; {_CURE}"
            )
        return first_difference(dict(zip(dist.get_process_group_ranks(group), gathered, strict=True)))


def first_difference(ranks: dict[int, tuple[int, Sequence[Record]]]) -> str:
    """One line about the first difference. ranks: number of the round and records by rank, not all the same."""
    number, records = next(iter(ranks.values()))
    rounds = {rank: str(other) for rank, (other, _) in ranks.items()}
    if len(set(rounds.values())) > 1:
        return f"ranks differ in the number of the round: {_listed(rounds)}; {_CURE}"
    requests = {rank: [record[Field.REQUEST] for record in found] for rank, (_, found) in ranks.items()}
    if len({tuple(found) for found in requests.values()}) > 1:
        shown = {rank: "requests " + ", ".join(map(str, found)) for rank, found in requests.items()}
        return f"round {number}: ranks differ in their lanes: {_listed(shown)}; {_CURE}"
    for lane, record in enumerate(records):
        described = [_described(found[lane]) for _, found in ranks.values()]
        for parts in zip(*described, strict=True):
            if len({value for _, value in parts}) > 1:
                values = dict(zip(ranks, (value for _, value in parts), strict=True))
                where = f"request {record[Field.REQUEST]} (lane {lane}), {parts[0][0]}"
                return f"round {number}: ranks differ in {where}: {_listed(values)}; {_CURE}"
    raise AssertionError("the records are the same")


def _digest(records: Sequence[Record]) -> int:
    """A signed 64-bit digest."""
    digest = blake2b(digest_size=8)
    for record in records:
        digest.update(b"".join(value.to_bytes(8, "little", signed=True) for value in record))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _described(record: Record) -> Iterator[tuple[str, str]]:
    """Names and values in the order in which they explain each other: whose record it is, tokens, then what follows from them."""
    yield "record length", str(len(record))
    for field in _IDENTITY:
        yield field.name.lower(), str(record[field])
    for place, token in enumerate(islice(record, METADATA_FIELDS, None)):
        yield f"token {place}", "no token" if token < 0 else str(token)
    for field in Field:
        if field not in (*_IDENTITY, *_OWN):
            value = record[field]
            yield field.name.lower(), Finish(value).name if field is Field.FINISH else str(value)


def _listed(values: dict[int, str]) -> str:
    """Values with the ranks that have them."""
    having: dict[str, list[str]] = {}
    for rank, value in values.items():
        having.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
        for value, ranks in having.items()
    )
