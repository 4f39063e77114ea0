"""Sizes of prefix checkpoints, pages provided for them, token runs, copies of rows."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.errors import CapacityError, ExitCode
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import TokenRun, copy_rows, prefix_cache
from specdec.snapshot_sizes import checkpoint_pages, page_bytes, snapshot_bytes
from specdec.state.store import StateStore
from specdec_qwen38.geometry import REAL
from specdec_qwen38.state import drafter_layout, target_layout


def field(name: str, kind: StateKind, **values: Any) -> StateField:
    return StateField(name=name, kind=kind, source="test", **{"dtype": "float32", **values})


LAYOUT = StateLayout(
    owner="target",
    max_draft_tokens=3,
    fields=(
        field("kv", StateKind.PAGED, shape=(2, 3), layers=5),  # 5 · 64 · 24 bytes a page
        field("groups", StateKind.PAGED, shape=(7,), extent=4, dtype="bfloat16"),  # 16 · 14
        field("matrix", StateKind.ROW, shape=(3,), layers=2),  # 24
        field("tail", StateKind.COLUMNS, shape=(5,), extent=4),  # 20, one of four columns
        field("conv", StateKind.WINDOW, shape=(2,), extent=3),  # 24, without the candidates
        field("ring", StateKind.RING, shape=(), extent=16, dtype="int64"),  # 128
        field("records", StateKind.RECORDS, shape=(100,), extent=4),  # nothing between rounds
    ),
)
PAGE, STATE = 5 * 64 * 24 + 16 * 14, 24 + 20 + 24 + 128


def test_sizes_by_hand_and_as_allocated() -> None:
    assert (page_bytes(LAYOUT), snapshot_bytes(LAYOUT)) == (PAGE, STATE)
    store = StateStore(LAYOUT, slots=2, pages=3, context=64, device=torch.device("cpu"))
    state = store.state_after(torch.tensor([1]), torch.tensor([0]))
    assert sum(value.nbytes for value in state.values()) == STATE
    assert store.nbytes == LAYOUT.bytes(3, 4)
    store.resize_pages(10)
    assert store.nbytes == LAYOUT.bytes(3, 11) and store.pages == 10
    assert store["kv"].shape == (5, 11, 64, 2, 3)


def test_real_size_state_of_one_checkpoint() -> None:
    """The architecture's figures: 2,112 bytes per token and layer, thirteen layers with the drafter's; 108 MiB of matrices."""
    target, drafter = target_layout(REAL), drafter_layout(REAL)
    assert page_bytes(target) == 12 * 64 * 2112 and page_bytes(drafter) == 64 * 2112
    matrices = 108 * 2**20
    assert matrices < snapshot_bytes(target) < matrices + 3 * 2**20
    assert snapshot_bytes(drafter) == 16 * 128 * 2 + 16 * 8 + 8 + 8
    # a budget of 16 GiB holds about 145 checkpoints, each at a page boundary of its own
    pages = checkpoint_pages([target, drafter], 16 * 2**30)
    each = snapshot_bytes(target) + snapshot_bytes(drafter) + 2 * (page_bytes(target) + page_bytes(drafter))
    assert pages == 2 * (16 * 2**30 // each) == 2 * 144


@pytest.mark.parametrize("checkpoints", [1, 2, 17])
def test_pages_and_states_are_within_the_budget(checkpoints: int) -> None:
    each = 2 * (2 * PAGE + STATE)  # two pools of this layout, two pages and a state in each
    for spare in (0, each - 1):
        budget = checkpoints * each + spare
        pages = checkpoint_pages([LAYOUT, LAYOUT], budget)
        assert pages == 2 * checkpoints
        assert pages * 2 * PAGE + checkpoints * 2 * STATE <= budget


def test_budget_below_one_checkpoint_is_refused_with_numbers() -> None:
    assert checkpoint_pages([LAYOUT], PAGE + STATE) == 2
    with pytest.raises(CapacityError) as raised:
        checkpoint_pages([LAYOUT], PAGE + STATE - 1)
    message = str(raised.value)
    assert message.startswith(
        f"snapshot_bytes is {PAGE + STATE - 1}, but one prefix checkpoint takes {PAGE + STATE} bytes"
    )
    assert "set it to 0" in message and "\n" not in message
    assert raised.value.exit_code is ExitCode.CAPACITY


def test_preparation_provides_pages_beside_those_of_requests(directory: Path) -> None:
    recipe = recipe_book().recipe("qwen3.8-flash")

    def prepare(budget: int) -> LoadedModel:
        config = PreparationConfig.for_recipe(recipe, concurrency=2, context=100, snapshot_bytes=budget)
        return LoadedModel.prepare(recipe, config, directory=directory)

    without, model = prepare(0), prepare(1 << 20)
    extra = checkpoint_pages([store.layout for store in model.stores], 1 << 20)
    assert extra > 4
    for store, pool in zip(model.stores, model.pools, strict=True):
        assert store.pages == pool.pages == pool.free == model.capacities.pages == without.capacities.pages + extra
        assert store.nbytes == store.layout.bytes(store.slots + 1, store.pages + 1)
    assert prefix_cache(model).budget == 1 << 20
    assert prefix_cache(model, 77).budget == 77
    with pytest.raises(CapacityError, match="snapshot_bytes is 5"):
        prepare(5)


def test_copy_takes_rows_of_the_prefix_and_complete_groups_only() -> None:
    store = StateStore(LAYOUT, slots=1, pages=3, context=64, device=torch.device("cpu"))
    for name in ("kv", "groups"):
        values = torch.arange(1, store[name].numel() + 1).view(store[name].shape)
        store[name].copy_(values % 251)
    before = {name: store[name].clone() for name in ("kv", "groups")}
    copy_rows(store, 1, 3, 11)
    for name, entries in (("kv", 11), ("groups", 2)):
        assert torch.equal(store[name][:, 3, :entries], before[name][:, 1, :entries])
        assert torch.equal(store[name][:, 3, entries:], before[name][:, 3, entries:])
        assert torch.equal(store[name][:, :3], before[name][:, :3])


def test_keys_of_a_run_are_digests_of_its_prefixes() -> None:
    run = TokenRun([5, 6, 7])
    run.extend((8, 9))
    run.extend(())
    for length in (1, 3, 3, 4, 5):
        assert run.key(length) == blake2b(array("q", [5, 6, 7, 8, 9][:length]).tobytes(), digest_size=16).digest()
