"""Plans of the published models against figures that were published or computed elsewhere."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from specdec.held import ModelMemory
from specdec.memory import MemoryPlan
from specdec.memory_plan import capacities_for, plan_memory
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec_deepseek_v41 import memory as deepseek
from specdec_glm53 import memory as glm
from specdec_qwen38 import memory as qwen
from specdec_qwen38.geometry import REAL as QWEN
from specdec_qwen38.state import target_layout

MIB, GIB = 1 << 20, 1 << 30


def real(name: str, **options: Any) -> MemoryPlan:
    recipe = recipe_book().recipe(name)
    return plan_memory(recipe, PreparationConfig.for_recipe(recipe, **options))


def item(plan: MemoryPlan, name: str) -> int:
    return next(one.bytes for one in plan.items if one.name == name)


def declared(name: str, module: Any) -> ModelMemory:
    recipe = recipe_book().recipe(name)
    return module.declare(None, None, capacities_for(recipe, PreparationConfig.for_recipe(recipe), "bfloat16"), True)


# --- Qwen: requirement text and header audits -------------------------------------------------------------------------


def test_a_saved_verification_position_has_108_mib_of_matrices() -> None:
    # 36 layers, 48 value heads, 128 × 128 in float32
    matrices = 36 * 48 * 128 * 128 * 4
    assert matrices == 108 * MIB
    plan = real("qwen3.8-flash", concurrency=4)
    assert item(plan, "target delta_state") == 5 * matrices  # four slots and the spare one
    # whole matrices for each of eight positions, the reference form, against one and its records
    columns = target_layout(QWEN, recurrence="columns").field("delta_state")
    assert columns.bytes(4, 0, 7, 64) - 4 * matrices == pytest.approx(2.953 * GIB, abs=0.0005 * GIB)
    # corrections, keys and decays of one row of all layers: 1,186,560 bytes
    records = sum(item(plan, f"target delta_{part}") for part in ("corrections", "keys", "decays"))
    assert records == 5 * 8 * 1_186_560


def test_a_token_of_the_draft_layer_has_2112_bytes() -> None:
    one = {"concurrency": 1, "context": 262_144 - 8}
    plan = real("qwen3.8-flash", **one)
    pages = item(plan, "drafter kv") + item(plan, "drafter group_keys")
    assert pages == 2_112 * (262_144 + 64)  # the trash page as well
    assert pages - 2_112 * 64 == pytest.approx(528 * MIB, abs=0)
    assert item(plan, "target kv") + item(plan, "target group_keys") == 12 * pages


def test_a_feedback_row_has_20_kib() -> None:
    assert item(real("qwen3.8-flash", concurrency=1), "target feedback") == 2 * 8 * 20 * 1024


def test_qwen_experts_stay_packed() -> None:
    plan = real("qwen3.8-flash")
    codes_and_scales = 3 * 640 * 2560 // 2 + 3 * 640 * 2560 // 16 + 3 * 4
    assert 512 * codes_and_scales == 1_415_583_744  # of the published totals: 4,608 expert tensors of the drafter
    shared = (3 * 640 * 2560 + 2560) * 2
    router = 512 * 2560 * 2
    assert item(plan, "drafter experts") == 1_415_583_744 + shared + router
    # the target's also have an activation scale for each projection, and what gate and up share once more
    scales = 512 * 4 * (3 + 2)
    assert item(plan, "target experts") == 48 * (1_415_583_744 + shared + router + scales)


def test_qwen_dense_weights_are_those_stored() -> None:
    """Header audit: 1,067 dense tensors, 9,895,397,120 bytes in BF16. Held in float32: norms, taps, rates; n-gram constants in
    BF16 or int64; rotations come on top."""
    memory = declared("qwen3.8-flash", qwen)
    dense = [
        one for one in memory.target if not one.name.startswith(("experts.experts", "n-grams.table", "rope", "row"))
    ]
    dense = [one for one in dense if "scales" not in one.name or one.name.startswith("attention")]
    values = {"int64": 0, "bfloat16": 2, "float32": 2}
    stored = sum(prod(one.shape) * one.count * values[one.dtype] for one in dense)
    # each norm of queries or keys is kept once for every head
    repeated = 12 * (24 - 1 + 2 - 1) * 256 * 2
    assert stored - repeated == 9_895_397_120


# --- GLM ---------------------------------------------------------------------------------------------------------------


def test_glm_state() -> None:
    plan = real("glm-5.3-flash", concurrency=1, context=262_144 - 8)
    assert item(plan, "target kda_state") == 2 * 1_140_850_688  # one slot and the spare one
    assert item(plan, "target kda_conv") == 2 * 18_382_848
    assert item(plan, "target latents") == 11_264 * (262_144 + 64)
    assert item(plan, "target group_keys") == 704 * (262_144 + 64)
    assert item(plan, "target raw_keys") == 2 * 67_584
    assert item(plan, "target feedback") == 2 * 65_536
    assert item(plan, "drafter latents") == 1_024 * (262_144 + 64)
    assert item(plan, "drafter group_keys") == 64 * (262_144 + 64)
    assert item(plan, "drafter raw_keys") == 2 * 6_144


def test_glm_dense_weights_are_those_stored() -> None:
    """Computed from the published names: 1,246 dense text tensors, 17,842,600,184 bytes, some of them in float32."""
    inventory = recipe_book().recipe("glm-5.3-flash").target_inventory
    dense = [group for group in inventory.groups if ".experts." not in group.name]
    assert sum(group.bytes for group in dense) == 17_842_600_184
    numbers = sum(group.count * prod(group.shape) for group in dense)
    memory = declared("glm-5.3-flash", glm)
    held = [one for one in memory.target if not one.name.startswith(("experts.experts", "row"))]
    held = [one for one in held if one.name not in ("experts.input scales", "experts.inner scales", "mixers.ones")]
    # three scales of each hyper-connection are multiplied into its matrix
    assert sum(one.count * prod(one.shape) for one in held) == numbers - 2 * 45 * 3


# --- DeepSeek ----------------------------------------------------------------------------------------------------------


def test_deepseek_state() -> None:
    plan = real("deepseek-v4.1-flash", concurrency=1, context=4096 - 8)
    rows = 128 + 8  # committed rows and a round's candidates
    assert item(plan, "target window") == 2 * 5_242_880 * rows // 128
    assert item(plan, "drafter window") == 2 * 393_216 * rows // 128
    assert item(plan, "target features") == 2 * 245_760
    # 3,200 bytes for each input
    names = ("compressed_r2", "index_keys_r2", "compressed_r1", "index_keys_r1")
    assert sum(item(plan, f"target {name}") for name in names) == 3_200 * (4096 + 64)


def test_deepseek_tables_stay_as_they_are_stored() -> None:
    memory = declared("deepseek-v4.1-flash", deepseek)
    tables = sum(one.bytes for one in memory.target if ".table" in one.name)
    assert tables == (384_006_168 + 384_016_682) * (256 + 8)
    assert tables == pytest.approx(188.8 * GIB, abs=0.1 * GIB)
    transition = next(one for one in memory.drafter if one.name == "transition")
    assert transition.bytes == 129_280 * 256 * 4  # half of the Markov head, whose 264.8 MB in float32 are published


# --- what belongs to no model -----------------------------------------------------------------------------------------


def test_scratch_of_a_round_is_its_draft_law() -> None:
    plan = real("qwen3.8-flash", concurrency=4)
    assert len(plan.shapes) == 18
    widest = max(plan.shapes, key=lambda shape: (shape.batch, shape.verify_width))
    assert (widest.batch, widest.verify_width) == (4, 6)
    assert widest.scratch == 4 * 5 * (248_320 * 4 + 8)


def test_pages_of_a_snapshot_budget_are_part_of_it() -> None:
    without, plan = real("qwen3.8-flash"), real("qwen3.8-flash", snapshot_bytes=8 * GIB)
    pages = plan.of("pages") - without.of("pages")
    assert 0 < pages < 8 * GIB
    assert pages + plan.of("snapshots") == 8 * GIB
    assert plan.of("state") == without.of("state")


def test_the_allocator_rounds_every_tensor() -> None:
    plan = real("glm-5.3-flash")
    tensors = sum(int(one.detail.partition(" ")[0]) for one in plan.items if one.kind == "weights")
    assert 0 < plan.of("rounding") < 512 * (tensors + 200)
