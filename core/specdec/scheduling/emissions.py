"""What a request's caller gets beside a round's tokens: log-probabilities, and the last words of requests that no round ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.round.completion import METADATA_FIELDS, Completion, Field, Finish
from specdec.scheduling.resident import Resident
from specdec.serving.request import Emission, TokenLogprobs


def farewell(
    number: int,
    finish: Finish,
    round_number: int,
    resident: Resident | None,
    *,
    text: str | None,
    error: str | None = None,
) -> Emission:
    """The record of a request that no round ended: of what was acknowledged, with nothing emitted. resident: None for one that
    never ran."""
    record = [0] * METADATA_FIELDS
    record[Field.REQUEST], record[Field.ROUND], record[Field.SLOT] = number, round_number, -1
    record[Field.FINISH] = finish
    if resident is not None and resident.entered:
        record[Field.EPOCH], record[Field.SLOT] = resident.epoch, resident.slot
        record[Field.CONSUMED], record[Field.GENERATED] = resident.consumed, resident.generated
        record[Field.PENDING] = resident.run.tokens[-1]
    completion = Completion.parse(record)
    return Emission(request=number, tokens=(), finish=finish, completion=completion, text=text, error=error)


def last_text(resident: Resident) -> str | None:
    """Text that a request with stop strings still held back; None for one without."""
    if not resident.request.stop:
        return None
    return "" if resident.matcher is None else resident.matcher.finish()


def fault_text(faults: int) -> str:
    """Why a request ended as a fault. faults: broken state invariants of its last record."""
    if faults:
        return f"{faults} invariants of the request's state were broken, which is a bug in the plugin or in specdec; report it"
    return "the model's logits were not a distribution (NaN or infinite); check the checkpoint or try --dtype float32"


def emitted_logprobs(tokens: tuple[int, ...], columns: Sequence[Any], count: int) -> tuple[TokenLogprobs, ...]:
    """Aligned with the emitted tokens: column j of the frame is the row that decided token j."""
    return tuple(
        TokenLogprobs(token=token, logprob=chosen, top=tuple(top[:count]))
        for token, (chosen, top) in zip(tokens, columns, strict=False)
    )
