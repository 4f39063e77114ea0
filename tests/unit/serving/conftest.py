"""A small random model for the generation loop, in float64, so that greedy output is exact whatever the batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from serving_runs import FEW_TOKENS, FEW_TOKENS_SEED
from small_checkpoint import write_small_checkpoint

from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.model import LoadedModel

CONTEXT = 100
PREFILL_ROWS = 16


class Prepare(Protocol):
    """drafts: None prepares no drafter. extended: with tables for penalties and the like. options: of the configuration."""

    def __call__(
        self, *, concurrency: int = 1, drafts: int | None = 7, extended: bool = False, **options: Any
    ) -> LoadedModel: ...


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the models of these tests are loaded from."""
    torch.set_num_threads(1)
    return write_small_checkpoint(
        tmp_path_factory.mktemp("serving") / "checkpoint", seed=FEW_TOKENS_SEED, geometry=FEW_TOKENS
    )


@pytest.fixture(scope="session")
def prepared(directory: Path) -> Prepare:
    """Prepares a model, or returns the one prepared before with the same arguments: a drained model is as good as new."""
    recipe = recipe_book().recipe("qwen3.8-flash")

    @cache
    def prepare(*, concurrency: int = 1, drafts: int | None = 7, extended: bool = False, **options: Any) -> LoadedModel:
        config = PreparationConfig.for_recipe(
            recipe,
            concurrency=concurrency,
            max_draft_tokens=drafts,
            context=CONTEXT,
            prefill_tokens=(PREFILL_ROWS,),
            extended_sampling=extended,
            **{"speculative": drafts is not None, "adaptive_verification": False, **options},
        )
        return LoadedModel.prepare(recipe, config, directory=directory, dtype="float64")

    return prepare
