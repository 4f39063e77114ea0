"""Gated delta net against b12x's sequential decode reference (16 key and 48 value heads of width 128), and form against form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from specdec.ops.delta_rule import delta_rule_chunks, delta_rule_replay, delta_rule_rows
from specdec.state.store import StateStore
from specdec_qwen38.delta_net import DeltaNet
from specdec_qwen38.geometry import REAL
from specdec_qwen38.state import target_layout

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
    layout = target_layout(G, max_draft_tokens=7, dtype="bfloat16", recurrence="columns")
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
        # the same value, rounded to bfloat16 after another summation order: now and then its neighbour
        gap = (ours.float() - expected.float()).abs()
        assert (gap <= 2**-6 * expected.float().abs() + 1e-4).all()
        differing, total = differing + int((gap > 0).sum()), total + gap.numel()
        accepted = torch.randint(1, width + 1, (SLOTS,), generator=generator)
        store.commit(slots, accepted)
        for lane in range(SLOTS):
            rows = torch.cat([history[lane], weights["qkv"][ids[lane]]])
            history[lane] = rows[accepted[lane] : accepted[lane] + 3]
    assert worst_state <= 5e-7
    assert differing / total < 1e-3


# key heads, value heads per key head, value width, key width
SMALL, FULL = (3, 2, 8, 16), (16, 3, 128, 128)


def recurrence(rows: int, seed: int, dtype: torch.dtype, *, batch: int = 2, decay: float = 0.5, sizes=SMALL):
    """State and operands of ``rows`` steps. ``decay`` scales −ln α."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, group, value, dim = sizes
    q, k = F.normalize(normal(batch, rows, heads, dim), dim=-1), F.normalize(normal(batch, rows, heads, dim), dim=-1)
    log_decay = -decay * normal(batch, rows, heads, group).exp()
    return (
        normal(batch, heads, group * value, dim),
        q * dim**-0.5,
        k,
        normal(batch, rows, heads, group * value),
        log_decay,
        torch.sigmoid(normal(batch, rows, heads, group)),
    )


def run_rows(state, q, k, v, log_decay, beta):
    """Outputs and the state after every row, [B, T, …]."""
    result = delta_rule_rows(state, q, k, v, log_decay.exp(), beta)
    return result.outputs, torch.stack(result.states, dim=1)


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 200])
# −ln α around 1e-3, 0.5, 30 and 1e4: from barely forgetting to underflow within one row
@pytest.mark.parametrize("decay", [1e-3, 0.5, 30.0, 1e4])
def test_chunks_equal_rows(rows, decay):
    operands = recurrence(rows, rows, torch.float64, decay=decay)
    kept = [operand.clone() for operand in operands]
    out, states = run_rows(*operands)
    chunked, last = delta_rule_chunks(*operands)
    assert torch.isfinite(chunked).all() and torch.isfinite(last).all()
    assert (chunked - out).abs().max() <= 1e-12
    assert (last - states[:, -1]).abs().max() <= 1e-12
    assert all(torch.equal(before, after) for before, after in zip(kept, operands, strict=True))


@pytest.mark.parametrize("decay", [1e-3, 0.5, 30.0, 1e4])
def test_chunks_stay_finite_in_float32(decay):
    out, states = run_rows(*recurrence(130, 1, torch.float32, decay=decay))
    chunked, last = delta_rule_chunks(*recurrence(130, 1, torch.float32, decay=decay))
    assert (chunked - out).abs().max() <= 2e-5
    assert (last - states[:, -1]).abs().max() <= 2e-5


@pytest.mark.parametrize("cuts", [(37, 163), (64, 136), (1, 1, 198), (65, 65, 70)])
def test_chunks_carry_the_state_across_any_cut(cuts):
    state, *rows = recurrence(200, 4, torch.float64)
    expected, states = run_rows(state, *rows)
    outputs = []
    for pieces in zip(*(operand.split(cuts, dim=1) for operand in rows), strict=True):
        out, state = delta_rule_chunks(state, *pieces)
        outputs.append(out)
    assert (torch.cat(outputs, dim=1) - expected).abs().max() <= 1e-12
    assert (state - states[:, -1]).abs().max() <= 1e-12


@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_does_not_depend_on_the_rows_behind_it(batch, sizes):
    """Bit equality across widths, which is what lets a rejected width leave no trace."""
    state, *rows = recurrence(8, 2, torch.float32, batch=batch, sizes=sizes)
    out, states = run_rows(state, *rows)
    for width in range(1, 8):
        narrow_out, narrow_states = run_rows(state, *(operand[:, :width] for operand in rows))
        assert torch.equal(narrow_out, out[:, :width])
        assert torch.equal(narrow_states, states[:, :width])
    # and continuing from a kept column gives the remaining rows
    for width in range(1, 8):
        rest_out, rest_states = run_rows(states[:, width - 1], *(operand[:, width:] for operand in rows))
        assert torch.equal(rest_out, out[:, width:])
        assert torch.equal(rest_states, states[:, width:])


@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
def test_a_lane_does_not_depend_on_its_neighbours(sizes):
    state, *rows = recurrence(4, 3, torch.float32, batch=4, sizes=sizes)
    out, states = run_rows(state, *rows)
    for lane in range(4):
        alone_out, alone_states = run_rows(state[lane : lane + 1], *(operand[lane : lane + 1] for operand in rows))
        assert torch.equal(alone_out, out[lane : lane + 1])
        assert torch.equal(alone_states, states[lane : lane + 1])


@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
@pytest.mark.parametrize("batch", [1, 3])
def test_replay_of_records_is_bit_equal_to_the_states(batch, sizes):
    """Every accepted count, per lane, two layers at once."""
    layers = [recurrence(8, seed, torch.float32, batch=batch, sizes=sizes) for seed in (5, 6)]
    results = [delta_rule_rows(state, q, k, v, log.exp(), beta) for state, q, k, v, log, beta in layers]
    state = torch.stack([layer[0] for layer in layers])
    corrections = torch.stack([result.corrections for result in results])
    keys, decays = torch.stack([layer[2] for layer in layers]), torch.stack([layer[4].exp() for layer in layers])
    for rows in range(1, 9):
        for shift in range(rows + 1):
            taken = (torch.arange(batch) + shift) % (rows + 1)
            found = delta_rule_replay(state, corrections, keys, decays, taken, rows)
            for lane in range(batch):
                for layer in range(2):
                    count = int(taken[lane])
                    kept = results[layer].states[count - 1][lane] if count else state[layer, lane]
                    assert torch.equal(found[layer, lane], kept), (rows, count)
