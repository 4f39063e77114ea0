"""What a CPU can tell of captured rounds: nothing waits for the host, and every tensor made inside names its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from captured_rounds import CASES, CapturedRun, Case, folders

from specdec.testing import CapturableGuard

BUDGET = 40


folders = pytest.fixture(folders, scope="module")


def elsewhere(program: Callable[[], object]) -> None:
    """Runs a program guarded and with another default device: a constructor that relies on the default gives a tensor that no
    operation can mix with the model's."""
    with torch.device("meta"), CapturableGuard() as guard:
        program()
    assert guard.operations > 0


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_make_tensors_on_their_own_device_only(folders: dict[str, Path], case: Case) -> None:
    """The records equal those of an undisturbed run."""
    run, again = (
        CapturedRun(case, folders[case.recipe], budget=BUDGET, dtype="bfloat16", device="cpu") for _ in range(2)
    )
    for _ in run.play(2, lambda: elsewhere(run.run)):
        pass
    for _ in again.play(2, again.run):
        pass
    assert run.played == again.played
    if case.rows:
        assert any(done.verified < done.offered for records in run.played for done in records)


def test_a_constructor_that_relies_on_the_default_device_is_noticed() -> None:
    """The control."""
    model = torch.ones(3)
    elsewhere(lambda: model + torch.arange(3, device=model.device))
    with pytest.raises(RuntimeError, match="device"):
        elsewhere(lambda: model + torch.arange(3))
