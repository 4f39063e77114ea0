"""A start with zero drafts of a model that was prepared with some: the target alone, prompts and rounds alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.engine import Engine
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import PrefixState, prefix_cache
from specdec.serving.request import Request
from specdec.testing import CapturableGuard

PROMPT, NEW = tuple(range(7, 47)), 12


RECIPES = ["qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash"]


def prepared(name: str, **options: Any) -> LoadedModel:
    recipe = recipe_book().recipe(name)
    config = PreparationConfig.for_recipe(recipe, concurrency=2, context=128, prefill_tokens=(16,), **options)
    return LoadedModel.prepare(recipe, config, dtype="float64")


def texts(engine: Engine) -> list[tuple[int, ...]]:
    sampling = engine.model.defaults.sampling(greedy=True)
    streams = [
        engine.submit(Request(prompt=PROMPT[:rows], max_new_tokens=NEW, sampling=sampling, ignore_eos=True))
        for rows in (40, 9, 17)
    ]
    return [tuple(stream.result().tokens) for stream in streams]


@pytest.mark.parametrize("name", RECIPES)
def test_zero_drafts_run_the_target_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of a model without a drafter, and of drafted rounds before and after."""
    with Engine(prepared(name, speculative=False)) as engine:
        wanted = texts(engine)
    model = prepared(name)
    with Engine(model) as engine:
        assert texts(engine) == wanted
    with monkeypatch.context() as patch, Engine(model, draft_tokens=0) as engine:
        for method in ("prefill", "propose", "absorb", "commit"):
            patch.setattr(model.drafter, method, lambda *_: pytest.fail("draft work"))
        assert texts(engine) == wanted
        totals = engine.metrics.snapshot()
    assert [shape["width"] for shape in totals["rounds"]] == [1] * len(totals["rounds"])
    with Engine(model) as engine:
        assert texts(engine) == wanted


def test_preparing_with_zero_drafts_keeps_draft_state() -> None:
    """Another thing than running with zero: rounds of width one that a wider preparation's state could go on from."""
    model = prepared("qwen3.8-flash", max_draft_tokens=0)
    calls: list[str] = []
    inner = model.drafter.commit  # type: ignore[union-attr]
    model.drafter.commit = lambda *a: (calls.append("commit"), inner(*a))[1]  # type: ignore
    with Engine(model) as engine:
        texts(engine)
    assert calls


def test_a_preparation_without_ordinary_operations_says_so() -> None:
    model = prepared("qwen3.8-flash", mtp_only=True)
    assert model.ordinary is None
    with pytest.raises(UsageError, match="mtp_only"):
        Engine(model, draft_tokens=0)


def test_checkpoints_with_and_without_draft_state_are_not_mixed() -> None:
    model = prepared("qwen3.8-flash", snapshot_bytes=1 << 24)
    cache = prefix_cache(model)
    PrefixState(model, cache, drafts=False)
    PrefixState(model, cache, drafts=False)
    with pytest.raises(UsageError, match="without drafts"):
        PrefixState(model, cache)
    with Engine(model, draft_tokens=0) as engine:
        first = texts(engine)
        assert texts(engine) == first
        assert engine.metrics.snapshot()["prefix"]["reused_tokens"] > 0


@torch.inference_mode()
@pytest.mark.parametrize("name", RECIPES)
def test_snapshots_and_restores_pass_the_guard(name: str) -> None:
    """What graphs are captured of: state goes from one slot to another, and nothing waits for the host."""
    model = prepared(name)
    slot, other, length = (torch.tensor([value]) for value in (0, 1, len(PROMPT)))
    for start in range(0, len(PROMPT), 16):
        model.prompts.consume(PROMPT[start : start + 16], 0, start)
    owners = (model.target, model.drafter)
    with torch.device("meta"), CapturableGuard() as guard:
        taken = [owner.snapshot(slot) for owner in owners]
        for owner, state in zip(owners, taken, strict=True):
            guard.allow(state)
            owner.restore(other, state, length)
    for owner, state in zip(owners, taken, strict=True):
        again = owner.snapshot(other)
        for field in state:
            # of rings only the open group stays valid, and says so in its tags
            if field not in ("raw_tags", "anchor"):
                assert torch.equal(again[field], state[field]), field
