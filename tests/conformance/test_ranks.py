"""Ranks commit the same tokens, or all stop in the round where they first differ, with nothing of it applied.

What to expect comes from runs of each rank alone: the first round in which those differ is where the ranks must stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from rank_runs import NOISES, Run, load, requests, run, run_ranks
from serving_runs import FEW_TOKENS, FEW_TOKENS_SEED
from small_checkpoint import write_small_checkpoint

from specdec.errors import DesynchronisationError, ExitCode, UsageError
from specdec.round.completion import METADATA_FIELDS, Field, Finish
from specdec.serving.generate import Generator
from specdec.serving.prefixes import prefix_cache
from specdec.serving.ranks import RankAgreement, first_difference
from specdec.serving.request import Emission
from specdec.testing.conformance import replaced


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(
        tmp_path_factory.mktemp("ranks") / "checkpoint", seed=FEW_TOKENS_SEED, geometry=FEW_TOKENS
    )


@pytest.fixture(scope="module")
def found(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Run]]:
    """What each of two ranks saw, by scenario."""
    return run_ranks(directory, tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    torch.set_num_threads(1)
    return load(directory)


def first_round_that_differs(ranks: list[Run]) -> int | None:
    """Of runs without agreement; None if the ranks say the same throughout."""
    ours, theirs = (rank.emitted for rank in ranks)
    return next((number for number in sorted({*ours, *theirs}) if ours.get(number) != theirs.get(number)), None)


def check_both(found: list[dict[Any, Run]], scenario: tuple[Any, ...]) -> int | None:
    """Both ranks did what their runs alone call for. Returns the round in which they stopped."""
    alone = [rank["alone", *scenario] for rank in found]
    together = [rank[scenario] for rank in found]
    stopped = first_round_that_differs(alone)
    for mine, whole in zip(together, alone, strict=True):
        if stopped is None:
            assert mine == whole
        else:
            assert mine.error is not None and mine.error.startswith(f"round {stopped}: "), f"{scenario}: {mine.error}"
            assert mine.emitted == {number: whole.emitted[number] for number in range(stopped)}
    assert together[0].error == together[1].error
    return stopped


def test_equal_ranks_emit_what_one_process_emits(found: list[dict[Any, Run]], model: Any) -> None:
    alone = run(model, requests(0))
    assert len(alone.tokens) == 4 and alone.error is None
    assert any(accepted for emissions in alone.emitted.values() for *_, accepted in emissions)
    assert found[0]["same"] == found[1]["same"] == alone


@pytest.mark.parametrize("seed", range(NOISES[1e-7]))
def test_ranks_whose_logits_differ_in_the_last_bits_agree_or_stop_together(
    found: list[dict[Any, Run]], seed: int
) -> None:
    """Fault class: unsynchronised RNG across ranks, accepted counts that part at temperature one."""
    check_both(found, (1e-7, seed))


def test_ranks_stop_in_the_round_of_the_first_difference(found: list[dict[Any, Run]]) -> None:
    """Noise that decides some draws: some seeds run to their ends, others stop, and not all of those at the start."""
    stopped = [check_both(found, (1e-2, seed)) for seed in range(NOISES[1e-2])]
    assert None in stopped
    assert len({number for number in stopped if number is not None and number > 0}) >= 2


def test_ranks_that_draw_other_tokens_are_always_noticed(found: list[dict[Any, Run]]) -> None:
    """The negative control: without agreement, every one of these seeds gives the ranks different texts."""
    for seed in range(NOISES[1.0]):
        alone = [rank["alone", 1.0, seed] for rank in found]
        assert alone[0].tokens != alone[1].tokens
        assert check_both(found, (1.0, seed)) is not None


def test_ranks_with_other_seeds_are_noticed(found: list[dict[Any, Run]]) -> None:
    for seed in range(4):
        assert check_both(found, ("seed", seed)) is not None


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("fewer", "round 0: ranks differ in their lanes: rank 0 has requests 0, 1, 2, rank 1 has requests 0, 1; "),
        ("cancelled", "round 2: ranks differ in their lanes: rank 0 has requests 0, 1, 2, rank 1 has requests 0, 1; "),
        ("stops", "round 0: ranks differ in request 0 (lane 0), finish: rank 0 has NONE, rank 1 has STOP; "),
    ],
)
def test_ranks_with_other_calls_are_noticed(found: list[dict[Any, Run]], scenario: str, message: str) -> None:
    for rank in found:
        assert rank[scenario].error is not None and rank[scenario].error.startswith(message)


def test_a_rank_does_not_wait_for_ever_for_one_that_left(found: list[dict[Any, Run]]) -> None:
    left = found[0]["departed"]
    assert left.emitted == {}
    assert left.error is not None and left.error.startswith("round 0: not all ranks answered (")


def test_the_error_stays(found: list[dict[Any, Run]]) -> None:
    """The device is a round ahead, so going on would lose tokens."""
    ended = [run for rank in found for run in rank.values() if run.error is not None]
    assert len(ended) > 2 * NOISES[1.0]
    assert all(run.again == run.error for run in ended)


class Refusing(RankAgreement):
    """Finds a difference in one round."""

    def __init__(self, number: int) -> None:
        super().__init__(None)
        self.number = number

    def check(self, number: int, records: Any) -> None:
        if number == self.number:
            raise DesynchronisationError(f"round {number}: refused")


@pytest.mark.parametrize("number", range(7))
def test_nothing_of_a_refused_round_is_applied(model: Any, number: int) -> None:
    """Emitted, published, retired: all is as when the records were read, and cancelling gives everything back."""
    cache = prefix_cache(model)
    generator = Generator(model, width=5, prefix_cache=cache, ranks=Refusing(number))
    # one ends with its first token, one within a few rounds, one crosses a page
    for request, length, budget in zip(requests(2, count=3), (3, 5, 61), (1, 9, 30), strict=True):
        generator.submit(evolve(request, prompt=(request.prompt * 21)[:length], max_new_tokens=budget))

    def state() -> Any:
        runs = {slot: (list(r.run.tokens), r.consumed, r.started) for slot, r in generator._residents.items()}
        return runs, [(entry.key, entry.length) for entry in cache], [pool.free for pool in model.pools]

    states: list[Any] = []
    read = model.arena.read_frame

    def reading(*arguments: Any) -> Any:
        states.append(state())
        return read(*arguments)

    emitted: list[Emission] = []

    def exhaust() -> None:
        for event in generator.run():
            if isinstance(event, Emission):
                emitted.append(event)

    with (
        replaced(model.arena, "read_frame", reading),
        pytest.raises(DesynchronisationError, match=f"round {number}: refused"),
    ):
        exhaust()
    assert len(states) == number + 1 and states[-1][0]
    assert state() == states[-1]
    assert all(emission.completion.round < number for emission in emitted)
    for request in range(3):
        generator.cancel(request)
    assert state()[:2] == ({}, states[-1][1]), "an unacknowledged round was published"
    cache.clear()
    assert [pool.free for pool in model.pools] == [model.capacities.pages] * len(model.pools)


def record(**changes: int) -> list[int]:
    """A record of four token places."""
    values = {"request": 7, "round": 3, "slot": 1, "emitted": 2, "epoch": 5, **changes}
    tokens = [values.pop(f"token{place}", default) for place, default in enumerate((4, 9, -1, -1))]
    found = [0] * METADATA_FIELDS
    for name, value in values.items():
        found[Field[name.upper()]] = value
    return found + tokens


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([record(token1=8)], "request 7 (lane 0), token 1: rank 4 has 9, rank 5 has 8"),
        ([record(token2=8, emitted=3)], "request 7 (lane 0), token 2: rank 4 has no token, rank 5 has 8"),
        ([record(), record(accepted=2)], "request 7 (lane 0), accepted: ranks 4 and 5 have 0, rank 6 has 2"),
        ([record(slot=2, token0=0)], "request 7 (lane 0), slot: rank 4 has 1, rank 5 has 2"),
        ([record(finish=Finish.FAULT)], "request 7 (lane 0), finish: rank 4 has NONE, rank 5 has FAULT"),
        ([[*record(), -1]], "request 7 (lane 0), record length: rank 4 has 20, rank 5 has 21"),
        ([record(request=8)], "their lanes: rank 4 has requests 7, rank 5 has requests 8"),
    ],
)
def test_the_message_names_the_first_difference(others: list[list[int]], message: str) -> None:
    ranks = {4 + rank: (3, [found]) for rank, found in enumerate([record(), *others])}
    text = first_difference(ranks)
    assert text.startswith(f"round 3: ranks differ in {message}; nothing of the round was applied; ")


def test_rounds_that_differ_are_named() -> None:
    text = first_difference({0: (3, [record()]), 1: (4, [record()])})
    assert text.startswith("ranks differ in the number of the round: rank 0 has 3, rank 1 has 4; ")


def test_one_rank_compares_nothing() -> None:
    RankAgreement(None).check(0, [])
    assert DesynchronisationError("x").exit_code is ExitCode.FAILURE
    with pytest.raises(UsageError, match="no rank of the group"):
        RankAgreement(-100)  # type: ignore[arg-type]  # what torch hands to processes outside a group
