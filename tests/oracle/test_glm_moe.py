"""Feed-forward blocks of GLM-5.3-Flash: transformers' MoE and MLP for plain weights, b12x's references for NVFP4."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import b12x_moe
import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from b12x_moe import block_tensors, load_references, quantised_arguments, stacked
from double_oracle import KeepDouble
from glm_modules import hf_config, load_stored, randomise, stored
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as hf

from specdec.checkpoint import mixtures
from specdec.errors import CheckpointError
from specdec.ops.moe import DenseMixture, GatheredMixture
from specdec.testing.guard import CapturableGuard
from specdec_glm53.geometry import TINY
from specdec_glm53.mixture import Router, load_dense, load_mixture

E, H, INNER, TOP = TINY.n_routed_experts, TINY.hidden_size, TINY.moe_intermediate_size, TINY.num_experts_per_tok
ROWS = 24
TOLERANCES = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2**-6}
packed_experts = partial(b12x_moe.packed_experts, count=E, hidden=H, inner=INNER)
input_scales = partial(b12x_moe.input_scales, count=E)


@pytest.fixture(scope="module")
def module() -> hf.Glm5NextTextMoE:
    return randomise(hf.Glm5NextTextMoE(hf_config()), 1)


@pytest.fixture(scope="module")
def references():
    return load_references()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes a block and loads it; ``dense`` chooses the form by moving the size limit."""

    def loaded(tensors, *, dtype: str = "float32", quantised: bool = False, dense: bool = False, geometry=TINY):
        monkeypatch.setattr(mixtures, "DENSE_LIMIT_BYTES", (1 << 40) if dense else 0)
        read = partial(load_mixture, geometry=geometry, quantised_activations=quantised)
        block = load_stored(tmp_path, tensors, getattr(torch, dtype), read)
        assert isinstance(block, DenseMixture if dense else GatheredMixture)
        return block

    return loaded


def rows_of(dtype: str, spread: float = 4.0) -> Tensor:
    """Rows so large that a good part of the gates and ups is beyond the limit of ten."""
    rows = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(200)) * spread
    return rows.to(torch.bfloat16).to(getattr(torch, dtype))


def error(ours: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((ours.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def expected_of(module: torch.nn.Module, x: Tensor) -> Tensor:
    """The module in float64, no rounding inside; x: [T, H] of any dtype."""
    with KeepDouble():
        result = module.double()(x.double().unsqueeze(0))[0]
    module.float()
    return result


# --- plain weights against transformers ---------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_plain_experts_equal_transformers(module, load, dtype, dense):
    x = rows_of(dtype)
    kept = x.clone()
    y = load(stored(module), dtype=dtype, dense=dense)(x)
    assert y.dtype is x.dtype
    assert error(y, expected_of(module, x)) <= TOLERANCES[dtype]
    assert torch.equal(x, kept)


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize("limit", [1e9, 5.0])
def test_another_limit_gives_another_result(module, load, dense, limit):
    """The control of the tests above: the rows reach the limit, and both branches and the shared expert are bounded."""
    x = rows_of("float64")
    block = load(stored(module), dtype="float64", dense=dense, geometry=evolve(TINY, swiglu_limit=limit))
    assert error(block(x), expected_of(module, x)) > 0.01


@torch.inference_mode()
def test_stacked_experts_of_other_exporters_load_the_same(module, load):
    x = rows_of("float64")
    tensors = {name: value for name, value in stored(module).items() if not name.startswith("experts.")}
    state = module.state_dict()
    fused = {f"experts.{part}": state[f"experts.{part}"].clone() for part in ("gate_up_proj", "down_proj")}
    assert torch.equal(load({**tensors, **fused}, dtype="float64")(x), load(stored(module), dtype="float64")(x))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_dense_layers_equal_transformers(tmp_path, dtype):
    mlp = randomise(hf.Glm5NextTextMLP(hf_config()), 3)
    block = load_stored(tmp_path, stored(mlp), getattr(torch, dtype), partial(load_dense, geometry=TINY))
    x = rows_of(dtype)
    assert error(block(x), expected_of(mlp, x)) <= TOLERANCES[dtype]
    assert error(evolve(block, limit=1e9)(x), expected_of(mlp, x)) > 0.01


def router_of(module) -> Router:
    gate = module.gate
    return Router(bias=gate.e_score_correction_bias.float(), top_k=TOP, scale=TINY.routed_scaling_factor)


@torch.inference_mode()
def test_router_equals_transformers(module):
    x = rows_of("float32", spread=1.0)
    logits, wanted, wanted_ids = module.gate(x)
    ids, weights = router_of(module)(logits)
    # the class leaves the order of a row's experts open
    assert torch.equal(ids.sort(-1).values, wanted_ids.sort(-1).values)
    table, wanted_table = (torch.zeros(ROWS, E).scatter(1, i, w) for i, w in ((ids, weights), (wanted_ids, wanted)))
    assert (table - wanted_table).abs().max() <= 1e-6


def test_bias_selects_and_does_not_weigh():
    router = Router(bias=torch.tensor([0.0, 0.0, 0.0, 10.0]), top_k=2, scale=2.5)
    ids, weights = router(torch.tensor([[2.0, 1.0, 0.0, -3.0]]))
    scores = torch.sigmoid(torch.tensor([-3.0, 2.0]))
    assert ids.tolist() == [[3, 0]]
    assert torch.allclose(weights, scores / scores.sum() * 2.5)


def test_ties_take_the_lower_expert_and_dead_scores_stay_finite():
    router = Router(bias=torch.zeros(6), top_k=4, scale=1.0)
    ids, weights = router(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6, [-200.0] * 6]))
    assert ids.tolist() == [[1, 4, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert torch.allclose(weights[1], torch.full((4,), 0.25))
    assert torch.isfinite(weights).all()


@torch.inference_mode()
def test_scores_are_float32_in_half_precision(module, load):
    """The weights of the chosen experts are those of the float32 router, not of a product rounded to bfloat16."""
    block = load(stored(module), dtype="bfloat16")
    assert block.router.dtype is torch.float32
    x = rows_of("bfloat16")
    seen = {}
    spied = evolve(block, route=lambda logits: seen.setdefault("found", block.route(logits)))
    spied(x)
    logits, wanted, wanted_ids = module.gate(x.float())
    ids, weights = seen["found"]
    assert torch.equal(ids.sort(-1).values, wanted_ids.sort(-1).values)
    assert (weights.sort(-1).values - wanted.sort(-1).values).abs().max() <= 1e-6
    rounded_ids, rounded = block.route(logits.to(torch.bfloat16).float())
    assert not torch.equal(rounded_ids, ids) or (rounded - weights).abs().max() > 1e-4


# --- NVFP4 against b12x -------------------------------------------------------------------------------------------------


def dense_part(module) -> dict[str, Tensor]:
    """Router and shared expert under their checkpoint names."""
    return {name: value for name, value in stored(module).items() if not name.startswith("experts.")}


def with_experts(module, reference, x: Tensor, **arguments) -> Tensor:
    """Shared expert and a reference's routed experts under the oracle's routing."""
    with KeepDouble() if x.dtype is torch.float64 else nullcontext():
        _, weights, ids = module.to(x.dtype).gate(x)
        routed = reference(
            x, topk_ids=ids, topk_weights=weights, E=E, K=H, I_tp=INNER, swiglu_limit=TINY.swiglu_limit, **arguments
        )
        result = routed.to(x.dtype) + module.shared_experts(x)
    module.float()
    return result


def loud(experts):
    """Second scales so large that the activations reach the limit."""
    gate = experts["gate_proj"]["weight_scale_2"] * 16
    return {
        name: parts if name == "down_proj" else {**parts, "weight_scale_2": gate} for name, parts in experts.items()
    }


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_w4a16(references, module, load, dense, dtype):
    experts, x = loud(packed_experts(1)), rows_of(dtype, spread=1.0)
    block = load({**dense_part(module), **block_tensors(experts)}, dtype=dtype, dense=dense)
    expected = with_experts(module, references["moe_reference_w4a16_f32"], x, **stacked(experts))
    assert error(block(x), expected) <= TOLERANCES[dtype]
    assert error(evolve(block, activation=lambda gate, up: F.silu(gate) * up)(x), expected) > 0.01


@torch.inference_mode()
def test_half_precision_stays_packed(references, module, load):
    experts, x = loud(packed_experts(1)), rows_of("bfloat16", spread=1.0)
    block = load({**dense_part(module), **block_tensors(experts)}, dtype="bfloat16")
    expected = with_experts(module, references["moe_reference_w4a16_f32"], x.float(), **stacked(experts))
    assert error(block(x), expected) <= TOLERANCES["bfloat16"]


@torch.inference_mode()
@pytest.mark.parametrize("spread", [0.2, 1.0], ids=["below the limit", "beyond the limit"])
def test_w4a4(references, module, load, spread):
    experts, scales, x = packed_experts(2), input_scales(3), rows_of("float32", spread=spread)
    block = load({**dense_part(module), **block_tensors(experts, scales)}, quantised=True)
    expected = with_experts(module, references["moe_reference_f32"], x, **quantised_arguments(experts, scales))
    assert error(block(x), expected) <= TOLERANCES["float32"]


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
def test_w4a4_with_one_input_scale_per_layer(references, module, load, dense):
    experts, x = packed_experts(2), rows_of("float32", spread=0.3)
    scales = {name: torch.full((E,), 0.003 if name == "down_proj" else 0.0021) for name in experts}
    block = load({**dense_part(module), **block_tensors(experts, scales)}, quantised=True, dense=dense)
    expected = with_experts(module, references["moe_reference_f32"], x, **quantised_arguments(experts, scales))
    assert error(block(x), expected) <= TOLERANCES["float32"]


@torch.inference_mode()
def test_gate_and_up_share_the_larger_input_scale(references, module, load):
    experts, scales, x = packed_experts(5), input_scales(6), rows_of("float32", spread=0.3)
    uneven = dict(scales, up_proj=scales["up_proj"] * torch.where(torch.arange(E) % 2 == 0, 1.5, 0.5))
    larger = dict(scales, gate_proj=torch.maximum(uneven["gate_proj"], uneven["up_proj"]))
    ours = load({**dense_part(module), **block_tensors(experts, uneven)}, quantised=True)(x)
    reference = partial(with_experts, module, references["moe_reference_f32"], x)
    assert error(ours, reference(**quantised_arguments(experts, larger))) <= TOLERANCES["float32"]
    assert error(ours, reference(**quantised_arguments(experts, scales))) > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
def test_experts_of_the_mtp_layer_ignore_input_scales(module, load, dense):
    """Some or all projections may have one; nothing changes. Honoured, they change a lot, and some are not enough."""
    experts, x = packed_experts(2), rows_of("float32", spread=0.3)
    plain = {**dense_part(module), **block_tensors(experts)}
    scaled = {**dense_part(module), **block_tensors(experts, input_scales(3))}
    some = {name: value for name, value in scaled.items() if "up_proj.input_scale" not in name}
    expected = load(plain, dense=dense)(x)
    assert torch.equal(load(scaled, dense=dense)(x), expected)
    assert torch.equal(load(some, dense=dense)(x), expected)
    honoured = load(scaled, quantised=True)(x)
    assert (honoured - expected).norm() / expected.norm() > 0.03
    with pytest.raises(CheckpointError, match="only gate_proj, down_proj have an input_scale"):
        load(some, quantised=True)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["gathered", "dense", "quantised"])
def test_a_block_is_capturable(module, load, form):
    experts, x = packed_experts(2), rows_of("float32", spread=0.3)
    scales = input_scales(3) if form == "quantised" else None
    block = load(
        {**dense_part(module), **block_tensors(experts, scales)}, quantised=form == "quantised", dense=form == "dense"
    )
    with CapturableGuard():
        block(x)


def test_a_missing_bias_is_named(module, load):
    tensors = stored(module)
    del tensors["gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match=r"gate\.e_score_correction_bias"):
        load(tensors)
