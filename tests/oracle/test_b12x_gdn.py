"""Gated delta net against b12x's sequential decode reference (16 key and 48 value heads of width 128), and form against form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from specdec_qwen38.delta_net import DeltaNet
from specdec_qwen38.geometry import REAL
from specdec_qwen38.state import target_layout

from specdec.ops.delta_rule import delta_rule_chunks, delta_rule_rows
from specdec.state.store import StateStore

reference = pytest.importorskip("b12x.sequence.gdn_decode.reference")

# Heads of the real model on a narrow residual and one delta net layer. The projection of a one-hot row is one column of the
# weights, exact in bfloat16, so no matrix product blurs the comparison.
INPUTS = 96
G = evolve(
    REAL,
    hidden_size=INPUTS,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    ple_layer_ids=(),
)
SLOTS = 2
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=generator) * std).to(BF16)

    heads = G.linear_num_value_heads
    return {
        "qkv": normal(INPUTS, G.qkv_width),
        "z": normal(INPUTS, G.value_width),
        "b": normal(INPUTS, heads),
        # softplus of a + bias reaches both the curved and the linear part
        "a": normal(INPUTS, heads, std=4.0),
        "taps": normal(G.qkv_width, G.linear_conv_kernel_dim, std=0.5),
        "A_log": torch.rand(heads, generator=generator).to(BF16).float() - 3,
        "dt_bias": normal(heads).float(),
        "norm": (1 + 0.2 * torch.randn(G.linear_value_head_dim, generator=generator)).to(BF16),
    }


@pytest.fixture(scope="module")
def net(weights) -> DeltaNet:
    merged = torch.cat([weights["qkv"], weights["z"], weights["b"], weights["a"]], dim=1)
    return DeltaNet(
        projection=merged.t().contiguous(),
        taps=weights["taps"].float().t().contiguous(),
        rate=-weights["A_log"].exp(),
        bias=weights["dt_bias"],
        norm=weights["norm"],
        output=torch.eye(G.value_width, dtype=BF16),
        geometry=G,
    )


def store_of() -> StateStore:
    layout = target_layout(G, max_draft_tokens=7, dtype="bfloat16")
    return StateStore(layout, slots=SLOTS, pages=1, context=64, device=torch.device("cpu"))


def convolved(history: torch.Tensor, rows: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Short convolution and SiLU of [T, C] rows behind [3, C] carried ones, accumulated exactly, rounded twice."""
    extended = torch.cat([history, rows]).double().t().unsqueeze(0)
    mixed = F.conv1d(extended, taps.double().unsqueeze(1), groups=taps.shape[0])[0].t()
    return F.silu(mixed.to(BF16))


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(2))
def test_rounds_equal_the_reference(net, weights, seed):
    """Two requests through rounds of width 1 to 8: every state column, every gated output row, accepted counts of any size."""
    generator = torch.Generator().manual_seed(seed)
    store, slots = store_of(), torch.tensor([1, 0])
    columns = store.fields["delta_state"].extent
    state = torch.randn(SLOTS * columns, G.linear_num_value_heads, 128, 128, generator=generator) * 0.3
    store["delta_state"][0, :SLOTS] = state.view(SLOTS, columns, *store.fields["delta_state"].shape)
    cells = slots.unsqueeze(1) * columns + torch.arange(columns)
    history = [torch.zeros(3, G.qkv_width, dtype=BF16) for _ in range(SLOTS)]
    accepted = torch.ones(SLOTS, dtype=torch.int64)
    worst_state, differing, total = 0.0, 0, 0
    for width in (8, 1, 3, 8, 2):
        ids = torch.randint(0, INPUTS, (SLOTS, width), generator=generator)
        m = F.one_hot(ids.flatten(), INPUTS).to(BF16)
        ours = net(m, store, 0, slots, store.column_index(slots, "delta_state"), prompt=False)
        mixed = [convolved(history[lane], weights["qkv"][ids[lane]], weights["taps"]) for lane in range(SLOTS)]
        expected = reference.decode(
            torch.cat(mixed),
            weights["a"][ids.flatten()],
            weights["b"][ids.flatten()],
            weights["z"][ids.flatten()].view(-1, G.linear_num_value_heads, 128),
            weights["A_log"],
            weights["dt_bias"],
            weights["norm"],
            state,
            torch.arange(SLOTS + 1) * width,
            accepted,
            cells,
            SLOTS,
            SLOTS * width,
            key_heads=G.linear_num_key_heads,
            value_heads=G.linear_num_value_heads,
            gate_activation=G.output_gate_type,
            eps=G.rms_norm_eps,
        ).flatten(1)
        held = store["delta_state"][0, :SLOTS].view_as(state)
        worst_state = max(worst_state, ((held - state).abs().max() / state.abs().max()).item())
        # same real value rounded to bfloat16 by two summation orders: now and then the neighbour, never further
        gap = (ours.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert ((gap <= 2) | ((ours - expected).abs() < 1e-3 * expected.abs().mean())).all()
        differing, total = differing + int((gap > 0).sum()), total + gap.numel()
        accepted = torch.randint(1, width + 1, (SLOTS,), generator=generator)
        store.commit(slots, accepted)
        for lane in range(SLOTS):
            rows = torch.cat([history[lane], weights["qkv"][ids[lane]]])
            history[lane] = rows[accepted[lane] : accepted[lane] + 3]
    print(worst_state, differing / total)
    assert worst_state <= 1e-6
    assert differing / total < 0.01
