"""Sparse attention against b12x's QSA references: compressed keys, ring, selection, ties, attention; form against form."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.ops.rope import RopeTable
from specdec.state.store import StateStore
from specdec_qwen38.geometry import TINY, Geometry
from specdec_qwen38.sparse_attention import RopedRows, SparseAttention
from specdec_qwen38.state import drafter_layout
from specdec_qwen38.weights import Weights

pytest.importorskip("b12x.attention.qsa.reference")
from qsa_oracle import QsaOracle, layer_weights

SLOTS = 2
INPUTS = TINY.hidden_size
# selector budget, attended positions, and the form these sizes lead to
FORMS = {
    "everything": (64, 64, (False, False)),
    "masked": (64, 128, (True, False)),
    "gathered": (64, 192, (True, True)),
    "narrow": (16, 192, (True, True)),
}


def geometry_of(budget: int) -> Geometry:
    return evolve(TINY, indexer_budget=budget)


class Layer:
    """Our layer on a store of its own, pages handed out in a scattered order."""

    def __init__(self, directory, geometry: Geometry, weights, tokens: int, dtype: torch.dtype) -> None:
        self.geometry, self.tokens, self.dtype = geometry, tokens, dtype
        device = torch.device("cpu")
        write_checkpoint(directory, weights, geometry.to_config())
        with Checkpoint.open(directory) as checkpoint:
            self.attention = SparseAttention.load(Weights(checkpoint, geometry, prefix="", dtype=dtype, device=device))
        pages = tokens // 64
        layout = drafter_layout(geometry, max_draft_tokens=7, dtype=str(dtype).removeprefix("torch."))
        self.store = StateStore(layout, slots=SLOTS, pages=SLOTS * pages, context=tokens - 8, device=device)
        for slot in range(SLOTS):
            self.store.set_pages(slot, range(SLOTS * pages - slot, 0, -SLOTS))
        self.rope = RopeTable.build(
            positions=tokens, rotated=geometry.rotary_dim, theta=geometry.rope_theta, dtype=dtype, device=device
        )

    def plan(self, slots, starts, rows: int, valid=None) -> RopedRows:
        return RopedRows.of(
            self.store,
            self.geometry,
            self.rope,
            slots=torch.tensor(slots),
            positions=torch.tensor(starts).unsqueeze(1) + torch.arange(rows),
            tokens=self.tokens,
            valid=valid,
        )

    def __call__(self, ids: torch.Tensor, slots, starts, *, valid=None, **changes) -> torch.Tensor:
        """ids: [B, T] → [B, T, H]. ``changes`` overrule the plan."""
        plan = attrs.evolve(self.plan(slots, starts, ids.shape[1], valid), **changes)
        m = F.one_hot(ids.flatten(), INPUTS).to(self.dtype)
        return self.attention(m, plan, 0).view(*ids.shape, -1)


def script(count: int, generator: torch.Generator, *, first: int):
    """Prompt chunks and then windows of width 1 to 8 of which a prefix stands: (start, rows, kept, prompt)."""
    start = 0
    for size in (1, 2, first):
        yield start, size, size, True
        start += size
    while start + 8 <= count:
        width = int(torch.randint(1, 9, (), generator=generator))
        kept = int(torch.randint(1, width + 1, (), generator=generator))
        yield start, width, kept, False
        start += kept


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
# the float32 layer is compared with the float64 reference; in bfloat16 the softmax weights are rounded in other places
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6), ("bfloat16", 2**-6)])
def test_layer_through_prompts_and_windows_with_rejections(tmp_path, form, dtype, tolerance):
    budget, tokens, (select, gather) = FORMS[form]
    g, dtype = geometry_of(budget), getattr(torch, dtype)
    exact = torch.bfloat16 if dtype is torch.bfloat16 else torch.float64
    weights = layer_weights(g, 4)
    layer = Layer(tmp_path, g, weights, tokens, dtype)
    oracle = QsaOracle(g, weights, tokens, exact)
    generator = torch.Generator().manual_seed(budget + tokens)
    accepted, worst, dropped = 1, 0.0, 0
    plan = layer.plan([1], [0], 1)
    assert (plan.select, plan.gather) == (select, gather)
    layer.store["raw_tags"].fill_(-1)
    for start, rows, kept, prompt in script(tokens, generator, first=tokens // 2):
        ids = torch.randint(0, INPUTS, (rows,), generator=generator)
        ours = layer(ids.unsqueeze(0), [1], [start])[0]
        expected = oracle.interval(ids, start, accepted=accepted, prompt=prompt)
        worst = max(worst, error(ours, expected))
        accepted = 1 if prompt else kept
        # rows whose own group is complete and was not picked
        positions = torch.arange(start, start + rows)
        dropped += int((~(oracle.selected == positions.unsqueeze(1)).any(1)).sum())
        assert torch.equal(layer.store["raw_tags"][0, 1], oracle.tags)
        if dtype is exact:
            # raw keys are copies of inputs, exact in every dtype
            assert torch.equal(layer.store["raw_keys"][0, 1], oracle.ring)
        groups = (start + kept) // g.indexer_compress_ratio
        keys = layer.store.read_pages("group_keys", 0, layer.store.page_rows(torch.tensor([1]), tokens), 1)[0]
        wanted = oracle.group_keys[oracle.table[0]].flatten(0, 1)
        if dtype is torch.bfloat16:
            assert torch.equal(keys[:groups], wanted[:groups])
        else:
            assert groups == 0 or error(keys[:groups], wanted[:groups]) <= tolerance
    assert worst <= tolerance
    assert (dropped > 0) == select
    assert layer.store.faults[1].item() == 0


@torch.inference_mode()
def test_two_lanes_at_different_positions(tmp_path):
    g = geometry_of(16)
    weights = layer_weights(g, 5)
    layer = Layer(tmp_path, g, weights, 192, torch.float64)
    oracles = [QsaOracle(g, weights, 192, torch.float64) for _ in range(SLOTS)]
    generator = torch.Generator().manual_seed(1)
    starts, accepted = [70, 33], [1, 1]
    for slot, count in enumerate(starts):
        ids = torch.randint(0, INPUTS, (count,), generator=generator)
        layer(ids.unsqueeze(0), [slot], [0])
        oracles[slot].interval(ids, 0, accepted=1, prompt=True)
    for width in (8, 1, 4, 8, 8, 2, 7):
        ids = torch.randint(0, INPUTS, (SLOTS, width), generator=generator)
        ours = layer(ids, [0, 1], starts)
        for slot in range(SLOTS):
            expected = oracles[slot].interval(ids[slot], starts[slot], accepted=accepted[slot], prompt=False)
            assert error(ours[slot], expected) <= 1e-12
        accepted = torch.randint(1, width + 1, (SLOTS,), generator=generator).tolist()
        starts = [start + kept for start, kept in zip(starts, accepted, strict=True)]


@torch.inference_mode()
@pytest.mark.parametrize("form", ["masked", "narrow"])
def test_zero_scores_take_the_lower_group(tmp_path, form):
    """Selector queries opposite to every selector key: all scores are exactly zero and only the tie rule decides."""
    budget, tokens, _ = FORMS[form]
    g = geometry_of(budget)
    weights = layer_weights(g, 6)
    dim, rotated = g.indexer_head_dim, g.rotary_dim
    index = weights["indexer.index_qk_proj.weight"].view(-1, dim, INPUTS) * 0.01
    # along an axis that rope leaves alone; odd inputs agree with the keys, even ones oppose them
    sign = torch.where(torch.arange(INPUTS) % 2 == 1, 1.0, -1.0)
    index[:-1, rotated] += sign
    index[-1, rotated] += 1
    weights["indexer.index_qk_proj.weight"] = index.view(-1, INPUTS)
    layer = Layer(tmp_path, g, weights, tokens, torch.float64)
    oracle = QsaOracle(g, weights, tokens, torch.float64)
    generator = torch.Generator().manual_seed(2)
    count = tokens - 8
    ids = torch.randint(0, INPUTS, (count,), generator=generator)
    ours = layer(ids.unsqueeze(0), [0], [0])[0]
    expected = oracle.interval(ids, 0, accepted=1, prompt=True)
    assert error(ours, expected) <= 1e-12
    tied = (ids % 2 == 0) & (torch.arange(count) >= budget + g.indexer_compress_ratio)
    lowest = torch.arange(budget, dtype=torch.int32)
    assert tied.sum() > 20
    assert (oracle.selected[tied, :budget].sort(-1).values == lowest).all()
    untied = (ids % 2 == 1) & (torch.arange(count) >= budget + g.indexer_compress_ratio)
    assert (oracle.selected[untied, :budget].sort(-1).values != lowest).any()
    # and which groups are read matters: half of them give other rows
    halved = Layer(tmp_path, geometry_of(budget // 2), weights, tokens, torch.float64)
    assert ((halved(ids.unsqueeze(0), [0], [0])[0] - ours)[tied].abs().amax(-1) > 0.01).all()


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_dense_and_gathered_form_agree(tmp_path, form):
    budget, tokens, _ = FORMS[form]
    g = geometry_of(budget)
    weights = layer_weights(g, 7)
    generator = torch.Generator().manual_seed(3)
    select = FORMS[form][2][0]
    layers = [Layer(tmp_path / name, g, weights, tokens, torch.float64) for name in ("dense", "gathered")]
    for start, rows, _, _ in script(tokens, generator, first=11):
        ids = torch.randint(0, INPUTS, (1, rows), generator=generator)
        dense = layers[0](ids, [0], [start], select=select, gather=False)
        gathered = layers[1](ids, [0], [start], select=select, gather=True)
        assert (dense - gathered).abs().max() <= 1e-12
    for name in ("kv", "group_keys", "raw_keys", "raw_tags"):
        # page 0 is trash
        assert torch.equal(layers[0].store[name][:, 1:], layers[1].store[name][:, 1:])


@torch.inference_mode()
def test_masked_rows_write_nothing(tmp_path):
    g = geometry_of(16)
    weights = layer_weights(g, 8)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, INPUTS, (SLOTS, 40), generator=generator)
    layers = [Layer(tmp_path / name, g, weights, 192, torch.float64) for name in ("masked", "short")]
    for layer in layers:
        for slot in range(SLOTS):
            layer(ids[slot : slot + 1, :30], [slot], [0])
    window = torch.randint(0, INPUTS, (SLOTS, 8), generator=generator)
    valid = torch.arange(8) < torch.tensor([[3], [0]])
    m = F.one_hot(window.flatten(), INPUTS).double()
    layers[0].attention.write(m, layers[0].plan([0, 1], [30, 30], 8, valid), 0)
    layers[1].attention.write(m[:3], layers[1].plan([0], [30], 3), 0)
    for name in ("raw_keys", "raw_tags"):
        assert torch.equal(layers[0].store[name][:, :SLOTS], layers[1].store[name][:, :SLOTS])
    for name in ("kv", "group_keys"):
        assert torch.allclose(layers[0].store[name][:, 1:], layers[1].store[name][:, 1:], rtol=0, atol=1e-13)
    assert layers[0].store.faults.eq(0).all()


@torch.inference_mode()
@pytest.mark.parametrize("start", range(60, 68))
def test_steps_of_one_plan_equal_one_row_calls(tmp_path, start):
    """Seven recursive rows planned at once, in two lanes, against seven calls; a rejected tail is in the ring before."""
    g = geometry_of(16)
    weights = layer_weights(g, 10)
    generator = torch.Generator().manual_seed(start)
    layers = [Layer(tmp_path / name, g, weights, 192, torch.float32) for name in ("steps", "calls")]
    starts, count = [start, start - 5], 7
    prompt = torch.randint(0, INPUTS, (SLOTS, start), generator=generator)
    ids = torch.randint(0, INPUTS, (SLOTS, count), generator=generator)
    for layer in layers:
        for slot in range(SLOTS):
            layer(prompt[slot : slot + 1, : starts[slot]], [slot], [0])
        layer(ids.flip(0), [0, 1], [first - 1 for first in starts])
        layer(prompt[:, :1], [0, 1], [first - 1 for first in starts])
    steps = layers[0].plan([0, 1], starts, count).steps()
    for j, step in enumerate(steps):
        m = F.one_hot(ids[:, j], INPUTS).float()
        alone = layers[1](ids[:, j : j + 1], [0, 1], [first + j for first in starts])[:, 0]
        assert torch.equal(layers[0].attention(m, step, 0), alone)
    assert j == count - 1
    for name in ("raw_keys", "raw_tags"):
        assert torch.equal(layers[0].store[name][:, :SLOTS], layers[1].store[name][:, :SLOTS])
    for name in ("kv", "group_keys"):
        assert torch.equal(layers[0].store[name][:, 1:], layers[1].store[name][:, 1:])
    assert all(layer.store.faults.eq(0).all() for layer in layers)


@torch.inference_mode()
@pytest.mark.parametrize("start", range(40, 48))
def test_a_stale_tag_is_a_fault_exactly_where_the_reference_refuses(tmp_path, start):
    g = geometry_of(16)
    weights = layer_weights(g, 9)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, INPUTS, (start + 1,), generator=generator)
    for age in (1, 2, 3, 4):
        layer = Layer(tmp_path, g, weights, 64, torch.float64)
        oracle = QsaOracle(g, weights, 64, torch.float64)
        layer(ids[:start].unsqueeze(0), [0], [0])
        oracle.interval(ids[:start], 0, accepted=1, prompt=True)
        stale = (start - age) % oracle.tags.shape[0]
        layer.store["raw_tags"][0, 0, stale] -= 16
        oracle.tags[stale] -= 16
        # needed only where this row completes a group that reaches back to the stale member
        needed = start % 4 == 3 and age <= 3
        with pytest.raises(RuntimeError, match="tagged history") if needed else nullcontext():
            oracle.interval(ids[start:], start, accepted=1, prompt=False)
        layer(ids[start:].unsqueeze(0), [0], [start])
        assert layer.store.faults[0].item() == int(needed)
