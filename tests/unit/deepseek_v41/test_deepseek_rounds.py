"""Rounds of a preparation: which ones allocate, how long their block is and which calibration they use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepseek_models import write_random_checkpoint
from small_checkpoint import byte_tokenizer

from specdec.control.calibration import calibration_file
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.allocated import AllocatedRound
from specdec.serving.model import LoadedModel

#: Different at every depth and for every length.
FIVE = [0.5, 0.8, 1.25, 2.0, 4.0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a calibration for blocks of five and none for others."""
    folder = write_random_checkpoint(tmp_path_factory.mktemp("rounds"), 3)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / calibration_file(5)).write_text(json.dumps(FIVE))
    return folder


def prepared(directory: Path, widths: tuple[int, ...]) -> LoadedModel:
    recipe = recipe_book().recipe("deepseek-v4.1-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=2, speculative_widths=widths, context=64, adaptive_verification=False
    )
    return LoadedModel.prepare(recipe, config, directory=directory)


def test_rounds_use_the_calibration_of_their_block(directory: Path) -> None:
    """A round of three drafts on a block of five has the block's first three temperatures."""
    model = prepared(directory, (1, 4, 6))
    assert model.drafter.block_length == 5  # type: ignore[union-attr]
    for batch in (1, 2):
        for width in (4, 6):
            captured = model.rounds[batch, width]
            assert isinstance(captured, AllocatedRound) and captured.temperatures is not None
            torch.testing.assert_close(captured.temperatures, torch.tensor(FIVE[: width - 1]))
        assert not isinstance(model.rounds[batch, 1], AllocatedRound)


@pytest.mark.parametrize("widths", [(1, 8), (1, 4), (1, 2)])
def test_another_block_length_is_not_calibrated_by_it(directory: Path, widths: tuple[int, ...]) -> None:
    model = prepared(directory, widths)
    assert model.drafter.block_length == widths[-1] - 1  # type: ignore[union-attr]
    captured = model.rounds[1, widths[-1]]
    assert isinstance(captured, AllocatedRound) and captured.temperatures is None
