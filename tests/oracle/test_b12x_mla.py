"""Latent attention of GLM-5.3-Flash against b12x's reference of attention over one latent per token, at the real latent width."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from attrs import evolve
from double_oracle import KeepDouble
from glm_models import random_weight
from glm_modules import load_stored
from torch.nn import functional as F

from specdec.ops.grouped_rows import RowPlan
from specdec.state.store import StateStore
from specdec_glm53.geometry import TINY
from specdec_glm53.inventory import mtp_inventory
from specdec_glm53.latent_attention import IndexedAttention
from specdec_glm53.state import drafter_layout


def load_reference():
    """b12x's MLA reference module by file: it needs torch alone, but its package imports GPU compilers."""
    spec = importlib.util.find_spec("b12x")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("b12x is not installed", allow_module_level=True)
    file = Path(spec.submodule_search_locations[0], "attention/_shared/mla/reference.py")
    own = importlib.util.spec_from_file_location("b12x_mla_reference", file)
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


reference = load_reference()

#: Tokens a context may have, and the form that the budget of 32 tokens leads to.
FORMS = {"masked": 64, "gathered": 192}
ROPE = 64  # rotary width that the reference insists on; zeros have no effect
GEOMETRY = evolve(TINY, kv_lora_rank=512, qk_nope_head_dim=64, v_head_dim=48)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Weights of one layer, exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for spec in mtp_inventory(GEOMETRY, experts="bfloat16").expand():
        if ".self_attn." in spec.name:
            name = spec.name.rpartition(".self_attn.")[2]
            found[name] = random_weight(name, spec.shape, generator).to(torch.bfloat16)
    return found


def expected(weights: dict[str, torch.Tensor], x: torch.Tensor, latents: torch.Tensor, selected: torch.Tensor):
    """x: [T, H]; latents: [n, rank]; selected: [T, m] positions, −1 padded. Everything in float64 but the stored latents."""
    g = GEOMETRY
    w = {name: tensor.double() for name, tensor in weights.items()}
    low = F.rms_norm(x.double() @ w["q_a_proj.weight"].t(), (g.q_lora_rank,), w["q_a_layernorm.weight"], g.rms_norm_eps)
    q = (low @ w["q_b_proj.weight"].t()).view(len(x), g.num_attention_heads, -1)
    keys, values = w["kv_b_proj.weight"].view(g.num_attention_heads, -1, g.kv_lora_rank).split([64, 48], dim=1)
    with KeepDouble():
        read = reference.dense_mla_reference(
            q_all=F.pad(torch.einsum("thd,hdr->thr", q, keys), (0, ROPE)),
            k_nope=latents.double(),
            k_rope=torch.zeros(len(latents), ROPE, dtype=torch.float64),
            page_table_1=selected.to(torch.int32),
            sm_scale=g.qk_nope_head_dim**-0.5,
            v_head_dim=g.kv_lora_rank,
        )
    return torch.einsum("thr,hdr->thd", read, values).flatten(1) @ w["o_proj.weight"].t()


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2**-5)])
def test_absorbed_attention_over_the_chosen_tokens(tmp_path, monkeypatch, form, dtype, tolerance):
    tokens, kind = FORMS[form], getattr(torch, dtype)
    weights = tensors(1)
    layer = load_stored(tmp_path, weights, kind, lambda reader: IndexedAttention.load(reader, GEOMETRY), GEOMETRY)
    layout = drafter_layout(GEOMETRY, max_draft_tokens=7, dtype=dtype)
    store = StateStore(layout, slots=1, pages=tokens // 64, context=tokens - 8, device=torch.device("cpu"))
    store.set_pages(0, range(tokens // 64, 0, -1))
    slot, rows = torch.tensor([0]), tokens - 3
    plan = RowPlan.build(
        store, ratio=4, budget=GEOMETRY.budget_groups, slots=slot, positions=torch.arange(rows)[None], tokens=tokens
    )
    assert plan.select and plan.gather == (form == "gathered")
    seen = []
    choose = RowPlan.choose
    monkeypatch.setattr(RowPlan, "choose", lambda self, scores: seen.append(choose(self, scores)) or seen[-1])
    x = torch.randn(rows, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ours = layer(x.to(kind), plan, 0)
    visible = plan.visible(seen[0])[0, :, :rows]
    assert visible.sum(-1).max() <= 32 + 3 and visible.sum() < rows * (rows + 1) // 2
    selected = torch.full((rows, rows), -1)
    for row in range(rows):
        positions = visible[row].nonzero().flatten()
        selected[row, : len(positions)] = positions
    latents = store.read_pages("latents", 0, store.page_rows(slot, tokens), 1)[0, :rows]
    wanted = expected(weights, x, latents, selected)
    assert ((ours.double() - wanted).abs().max() / wanted.abs().max()) <= tolerance
    # the scale of the absorbed width would be another attention
    monkeypatch.setattr(IndexedAttention, "_scale", GEOMETRY.kv_lora_rank**-0.5)
    plan = RowPlan.build(
        store, ratio=4, budget=GEOMETRY.budget_groups, slots=slot, positions=torch.arange(rows)[None], tokens=tokens
    )
    other = layer(x.to(kind), plan, 0)
    assert ((other.double() - wanted).abs().max() / wanted.abs().max()) > 4 * tolerance
