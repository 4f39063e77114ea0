"""Expert blocks with NVFP4 weights against b12x's references: W4A16 and W4A4, gathered and dense form."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import b12x_moe
import pytest
import torch
import torch.nn.functional as F
from b12x_moe import block_tensors, load_references, quantised_arguments, stacked
from double_oracle import KeepDouble
from qwen_models import hf_config, prepare, random_tensors
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

import specdec.checkpoint.mixtures as mixtures
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.ops.moe import DenseMixture, GatheredMixture, route_softmax
from specdec_qwen38.geometry import TINY
from specdec_qwen38.mixture import load_mixture
from specdec_qwen38.weights import Weights

G = TINY
E, H, INNER, TOP = G.num_experts, G.hidden_size, G.moe_intermediate_size, G.num_experts_per_tok
ROWS = 24
PROJECTIONS = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}


@pytest.fixture(scope="module")
def references():
    return load_references()


packed_experts = partial(b12x_moe.packed_experts, count=E, hidden=H, inner=INNER)
input_scales = partial(b12x_moe.input_scales, count=E)


@pytest.fixture(scope="module")
def dense_tensors():
    """Router and shared expert, and the rows they see."""
    generator = torch.Generator().manual_seed(100)

    def normal(*shape, std=0.12):
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16).float()

    shared = {
        f"shared_expert.{name}.weight": normal(*shape)
        for name, shape in (("gate_proj", (INNER, H)), ("up_proj", (INNER, H)), ("down_proj", (H, INNER)))
    }
    return {"gate.weight": normal(E, H, std=0.3), "shared_expert_gate.weight": normal(1, H), **shared}


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(200)
    return torch.randn(ROWS, H, generator=generator).to(torch.bfloat16)


@pytest.fixture
def load(tmp_path, dense_tensors, monkeypatch):
    """Writes a block and loads it; ``dense`` chooses the form by moving the size limit."""

    def loaded(experts, *, scales=None, dtype="float32", quantised=False, dense=False):
        write_checkpoint(tmp_path, {**dense_tensors, **block_tensors(experts, scales)}, G.to_config())
        monkeypatch.setattr(mixtures, "DENSE_LIMIT_BYTES", (1 << 40) if dense else 0)
        with Checkpoint.open(tmp_path) as checkpoint:
            weights = Weights(checkpoint, G, prefix="", dtype=getattr(torch, dtype), device=torch.device("cpu"))
            block = load_mixture(weights, quantised_activations=quantised)
        # packed experts in half precision keep their own scale outside the product, which only the gathered form does
        assert isinstance(block, DenseMixture if dense and dtype != "bfloat16" else GatheredMixture)
        return block

    return loaded


def routing(tensors, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and renormalised weights by transformers' router."""
    router = hf.Qwen4ExpTextTopKRouter(hf_config(G)).to(x.dtype)
    router.weight.data.copy_(tensors["gate.weight"])
    _, weights, ids = router(x)
    return ids, weights


def shared_output(tensors, x: torch.Tensor) -> torch.Tensor:
    w = {name: tensor.to(x.dtype) for name, tensor in tensors.items()}
    inner = F.silu(F.linear(x, w["shared_expert.gate_proj.weight"])) * F.linear(x, w["shared_expert.up_proj.weight"])
    opened = torch.sigmoid(F.linear(x, w["shared_expert_gate.weight"]))
    return opened * F.linear(inner, w["shared_expert.down_proj.weight"])


def expected_w4a16(references, tensors, experts, x: torch.Tensor) -> torch.Tensor:
    ids, weights = routing(tensors, x)
    routed = references["moe_reference_w4a16_f32"](
        x, topk_ids=ids, topk_weights=weights, E=E, K=H, I_tp=INNER, **stacked(experts)
    )
    return routed + shared_output(tensors, x)


def expected_w4a4(references, tensors, experts, scales, x: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
    """``rounded``: the kernel-shaped reference, which rounds the intermediate and the result to bfloat16."""
    ids, weights = routing(tensors, x)
    routed = references["moe_reference_nvfp4" if rounded else "moe_reference_f32"](
        x,
        topk_ids=ids,
        topk_weights=weights,
        E=E,
        K=H,
        I_tp=INNER,
        **quantised_arguments(experts, scales),
    )
    return routed.to(x.dtype) + shared_output(tensors, x)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((ours.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 2**-6)])
def test_w4a16(references, dense_tensors, rows, load, dense, dtype, tolerance):
    experts = packed_experts(1)
    block = load(experts, dtype=dtype, dense=dense)
    wide = rows.double() if dtype == "float64" else rows.float()
    with KeepDouble() if dtype == "float64" else nullcontext():
        expected = expected_w4a16(references, dense_tensors, experts, wide)
    assert error(block(rows.to(getattr(torch, dtype))), expected) <= tolerance


@torch.inference_mode()
def test_dense_and_gathered_form_agree(rows, load):
    x = rows.double()
    experts = packed_experts(1)
    assert error(load(experts, dtype="float64", dense=True)(x), load(experts, dtype="float64")(x)) <= 1e-13


@torch.inference_mode()
def test_w4a4(references, dense_tensors, rows, load):
    experts, scales = packed_experts(2), input_scales(3)
    ours = load(experts, scales=scales, quantised=True)(rows.float())
    assert error(ours, expected_w4a4(references, dense_tensors, experts, scales, rows.float())) <= 1e-6
    # the kernel-shaped reference rounds the intermediate first, which moves some values to the next code
    rounded = expected_w4a4(references, dense_tensors, experts, scales, rows.float(), rounded=True)
    assert (ours - rounded).norm() / rounded.norm() <= 0.02


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
def test_w4a4_with_one_input_scale_per_layer(references, dense_tensors, rows, load, dense):
    experts = packed_experts(2)
    scales = {name: torch.full((E,), 0.003 if name == "down_proj" else 0.0021) for name in PROJECTIONS}
    ours = load(experts, scales=scales, quantised=True, dense=dense)(rows.float())
    assert error(ours, expected_w4a4(references, dense_tensors, experts, scales, rows.float())) <= 1e-6


@torch.inference_mode()
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "dense"])
def test_w4a16_is_not_w4a4(rows, load, dense):
    """Stored input scales change nothing unless activations are to be quantised; then they change a lot."""
    experts, scales = packed_experts(2), input_scales(3)
    plain = load(experts, dense=dense)(rows.float())
    ignoring = load(experts, scales=scales, dense=dense)(rows.float())
    quantised = load(experts, scales=scales, quantised=True)(rows.float())
    assert torch.equal(plain, ignoring)
    assert (quantised - plain).norm() / plain.norm() > 0.03


@torch.inference_mode()
def test_gate_and_up_keep_their_own_weight_scale(references, dense_tensors, rows, load):
    experts = packed_experts(4)
    doubled = {name: dict(parts) for name, parts in experts.items()}
    doubled["gate_proj"]["weight_scale_2"] = experts["gate_proj"]["weight_scale_2"] * 2
    # the reference has one factor for both, so its gate rows carry the two in their block scales, which is exact
    folded = {name: dict(parts) for name, parts in experts.items()}
    folded["gate_proj"]["weight_scale"] = (experts["gate_proj"]["weight_scale"].float() * 2).to(torch.float8_e4m3fn)
    expected = expected_w4a16(references, dense_tensors, folded, rows.float())
    for dense in (False, True):
        assert error(load(doubled, dense=dense)(rows.float()), expected) <= 1e-6
    assert error(load(experts)(rows.float()), expected) > 0.01


@torch.inference_mode()
def test_gate_and_up_share_the_larger_input_scale(references, dense_tensors, rows, load):
    experts, scales = packed_experts(5), input_scales(6)
    uneven = dict(scales, up_proj=scales["up_proj"] * torch.where(torch.arange(E) % 2 == 0, 1.5, 0.5))
    larger = dict(scales, gate_proj=torch.maximum(uneven["gate_proj"], uneven["up_proj"]))
    ours = load(experts, scales=uneven, quantised=True)(rows.float())
    assert error(ours, expected_w4a4(references, dense_tensors, experts, larger, rows.float())) <= 1e-6
    assert error(ours, expected_w4a4(references, dense_tensors, experts, scales, rows.float())) > 1e-3


@torch.inference_mode()
def test_router_equals_transformers_and_takes_the_lower_expert_on_ties(dense_tensors, rows):
    ids, weights = routing(dense_tensors, rows.float())
    our_ids, our_weights = route_softmax(F.linear(rows.float(), dense_tensors["gate.weight"]), TOP)
    assert torch.equal(our_ids, ids)
    assert (our_weights - weights).abs().max() <= 1e-7
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6])
    tied, even = route_softmax(logits, 4)
    assert tied.tolist() == [[1, 4, 0, 2], [0, 1, 2, 3]]
    assert torch.equal(even[1], torch.full((4,), 0.25))


# --- which path a model takes ------------------------------------------------------------------------------------------


def packed_model(directory, dense_tensors, *, declared: str | None):
    """Target and drafter with the same packed experts and input scales in every layer; ``declared``: the target's entry."""
    tensors = {name: tensor for name, tensor in random_tensors(0).items() if ".mlp.experts." not in name}
    names = [f"model.language_model.layers.{index}.mlp." for index in range(G.num_hidden_layers)]
    for prefix in (*names, "mtp.layers.0.mlp."):
        tensors |= {prefix + name: tensor for name, tensor in dense_tensors.items()}
        tensors |= block_tensors(packed_experts(7), input_scales(8), prefix=f"{prefix}experts.")
    config = {"model_type": "qwen4_exp", "text_config": G.to_config()}
    if declared is not None:
        entries = {f"{prefix}experts": {"quant_algo": declared, "group_size": 16} for prefix in names}
        config["quantization_config"] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries}
    return prepare(write_checkpoint(directory, tensors, config), slots=1)


@torch.inference_mode()
@pytest.mark.parametrize(("declared", "quantised"), [(None, True), ("NVFP4", True), ("W4A16_NVFP4", False)])
def test_target_follows_its_declaration_and_the_drafter_stays_w4a16(
    tmp_path, dense_tensors, rows, load, declared, quantised
):
    model = packed_model(tmp_path / "model", dense_tensors, declared=declared)
    experts, scales, x = packed_experts(7), input_scales(8), rows.float()
    plain, activations = load(experts)(x), load(experts, scales=scales, quantised=True)(x)
    assert error(plain, activations) > 0.01
    assert error(model.drafter.experts(x), plain) <= 1e-6
    for layer in model.target.layers:
        assert error(layer.experts(x), activations if quantised else plain) <= 1e-6
