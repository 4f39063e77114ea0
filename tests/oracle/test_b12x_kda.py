"""KDA layer of GLM-5.3-Flash against b12x's decode and prefill references and against transformers' module."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from double_oracle import KeepDouble
from glm_modules import hf_config, load_stored, randomise, stored
from transformers.cache_utils import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as hf

from specdec.errors import CheckpointError
from specdec.state.store import StateStore
from specdec.testing.guard import CapturableGuard
from specdec_glm53.delta_attention import DeltaAttention
from specdec_glm53.geometry import REAL, TINY
from specdec_glm53.state import target_layout

BF16 = torch.bfloat16
SLOTS = 2
# Heads of the real width on a narrow residual. A one-hot row selects one column of the projections, and one of the up
# projections through an identity bottleneck, all exact in bfloat16, so no matrix product blurs the comparison.
INPUTS = 96
NARROW = evolve(
    REAL,
    hidden_size=INPUTS,
    linear_num_heads=8,
    num_hidden_layers=2,
    layer_types=("linear_attention", "indexed_attention"),
    mlp_layer_types=("sparse",) * 2,
)
HEADS, DIM, WIDTH = NARROW.linear_num_heads, NARROW.linear_head_dim, NARROW.linear_width


def store_of(geometry, dtype: str) -> StateStore:
    layout = target_layout(geometry, max_draft_tokens=7, dtype=dtype)
    return StateStore(layout, slots=SLOTS, pages=1, context=64, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Rows of the projections for each one-hot input, in bfloat16, and the layer's vectors."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=generator) * std).to(BF16)

    return {
        "qkv": normal(INPUTS, 3 * WIDTH),
        "f": normal(INPUTS, WIDTH, std=3.0),
        "z": normal(INPUTS, WIDTH),
        "b": normal(INPUTS, HEADS),
        "taps": normal(3 * WIDTH, NARROW.linear_conv_kernel_dim, std=0.5),
        "A_log": normal(HEADS, std=0.3).float(),
        "dt_bias": (normal(WIDTH) - 2).float(),
        "norm": (1 + 0.2 * torch.randn(DIM, generator=generator)).to(BF16),
    }


@pytest.fixture(scope="module")
def layer(weights, tmp_path_factory) -> DeltaAttention:
    identity = torch.zeros(DIM, INPUTS, dtype=BF16)
    identity[:INPUTS] = torch.eye(INPUTS, dtype=BF16)

    def up(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows.t(), (0, DIM - INPUTS)).contiguous()

    tensors = {
        "A_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
        "o_norm.weight": weights["norm"],
        "f_a_proj.weight": identity,
        "g_a_proj.weight": identity.clone(),
        "f_b_proj.weight": up(weights["f"]),
        "g_b_proj.weight": up(weights["z"]),
        "b_proj.weight": weights["b"].t().contiguous(),
        "o_proj.weight": torch.zeros(INPUTS, WIDTH, dtype=BF16),
    }
    rows = weights["qkv"].t().chunk(3)
    taps = weights["taps"].unsqueeze(1).chunk(3)
    for part, row, tap in zip("qkv", rows, taps, strict=True):
        tensors[f"{part}_proj.weight"], tensors[f"{part}_conv1d.weight"] = row.contiguous(), tap.contiguous()
    directory = tmp_path_factory.mktemp("kda")
    loaded = load_stored(directory, tensors, BF16, lambda weights: DeltaAttention.load(weights, NARROW), NARROW)
    return evolve(loaded, output=torch.eye(WIDTH, dtype=BF16))


def convolved(history: torch.Tensor, rows: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Short convolution of [T, C] rows behind [3, C] carried ones and SiLU, float32, rounded once.

    Products of bfloat16 numbers are exact; the sum runs from the oldest tap, because another order now and then gives
    bfloat16's neighbour, which every later state would carry.
    """
    extended = torch.cat([history, rows]).float()
    terms = [extended[tap : tap + rows.shape[0]] * taps[:, tap].float() for tap in range(4)]
    return F.silu(terms[0] + terms[1] + terms[2] + terms[3]).to(BF16)


def neighbours(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Values that differ: the same, rounded to bfloat16 after another summation order, is now and then its neighbour."""
    gap = (found.float() - wanted.float()).abs()
    assert (gap <= 2**-6 * wanted.float().abs() + 1e-4).all()
    return int((gap > 0).sum())


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(2))
def test_rounds_equal_the_decode_reference(layer, weights, seed):
    """Two requests through rounds of width 1 to 8: every state column, every gated output row, accepted counts of any size."""
    reference = pytest.importorskip("b12x.sequence.gdn_decode.reference")
    generator = torch.Generator().manual_seed(seed)
    store, slots = store_of(NARROW, "bfloat16"), torch.tensor([1, 0])
    columns = store.fields["kda_state"].extent
    state = torch.randn(SLOTS * columns, HEADS, DIM, DIM, generator=generator) * 0.3  # [value, key]
    store["kda_state"][0, :SLOTS] = state.transpose(-1, -2).view(SLOTS, columns, HEADS, DIM, DIM)
    cells = slots.unsqueeze(1) * columns + torch.arange(columns)
    history = [torch.zeros(3, 3 * WIDTH, dtype=BF16) for _ in range(SLOTS)]
    accepted = torch.ones(SLOTS, dtype=torch.int64)
    worst, differing, total = 0.0, 0, 0
    for width in (8, 1, 3, 8, 2):
        ids = torch.randint(0, INPUTS, (SLOTS, width), generator=generator)
        flat = ids.flatten()
        x = F.one_hot(flat, INPUTS).to(BF16)
        ours = layer(x, store, 0, slots, store.column_index(slots, "kda_state"), prompt=False)
        mixed = [convolved(history[lane], weights["qkv"][ids[lane]], weights["taps"]) for lane in range(SLOTS)]
        expected = reference.decode_kda(
            torch.cat(mixed),
            weights["f"][flat].view(-1, HEADS, DIM),
            weights["b"][flat],
            weights["z"][flat].view(-1, HEADS, DIM),
            weights["A_log"],
            weights["dt_bias"].view(HEADS, DIM),
            weights["norm"],
            state,
            torch.arange(SLOTS + 1) * width,
            accepted,
            cells,
            SLOTS,
            SLOTS * width,
            heads=HEADS,
            lower_bound=NARROW.linear_lower_bound,
            eps=NARROW.rms_norm_eps,
        ).flatten(1)
        held = store["kda_state"][0, :SLOTS].reshape(-1, HEADS, DIM, DIM).transpose(-1, -2)
        worst = max(worst, ((held - state).abs().max() / state.abs().max()).item())
        differing, total = differing + neighbours(ours, expected), total + ours.numel()
        accepted = torch.randint(1, width + 1, (SLOTS,), generator=generator)
        store.commit(slots, accepted)
        for lane in range(SLOTS):
            rows = torch.cat([history[lane], weights["qkv"][ids[lane]]])
            history[lane] = rows[accepted[lane] : accepted[lane] + 3]
    assert worst <= 1e-6
    assert differing / total < 2e-3


@torch.inference_mode()
@pytest.mark.parametrize("pieces", [(50,), (1, 3, 46), (17, 33)])
def test_a_prompt_equals_the_prefill_reference(layer, weights, pieces):
    reference = pytest.importorskip("b12x.sequence.kda_prefill.reference")
    rows = sum(pieces)
    ids = torch.randint(0, INPUTS, (rows,), generator=torch.Generator().manual_seed(5))
    store, slot = store_of(NARROW, "bfloat16"), torch.tensor([1])
    store.reset(1)
    outputs = []
    for piece in ids.split(pieces):
        column = store.column_index(slot, "kda_state")
        outputs.append(layer(F.one_hot(piece, INPUTS).to(BF16), store, 0, slot, column, prompt=True))
    mixed = convolved(torch.zeros(3, 3 * WIDTH, dtype=BF16), weights["qkv"][ids], weights["taps"])
    pool, one, none = torch.zeros(2, HEADS, DIM, DIM), torch.tensor([1]), torch.tensor([0])
    raw = reference.prefill_kda(
        *(part.view(rows, HEADS, DIM) for part in mixed.chunk(3, dim=-1)),
        weights["f"][ids].view(rows, HEADS, DIM),
        weights["b"][ids],
        weights["A_log"],
        weights["dt_bias"].view(HEADS, DIM),
        pool,
        torch.tensor([0, rows]),
        none,
        one,
        none,
        torch.tensor([-1]),
        1,
        rows,
        null_state_index=0,
    )
    norm = hf.Glm5NextTextRMSNormGated(DIM, eps=NARROW.rms_norm_eps)
    norm.weight.data.copy_(weights["norm"])
    expected = norm(raw, weights["z"][ids].view(rows, HEADS, DIM)).flatten(1)
    held = store["kda_state"][0, 1, 0].transpose(-1, -2)
    assert ((held - pool[1]).abs().max() / pool[1].abs().max()).item() <= 5e-6
    assert neighbours(torch.cat(outputs), expected) <= 4e-3 * expected.numel()
    assert torch.equal(store["kda_conv"][0, 1, :3], weights["qkv"][ids[-3:]])


# --- the whole layer, projections included ------------------------------------------------------------------------------

TOLERANCES = {"float64": 1e-11, "float32": 1e-5}


@pytest.fixture(scope="module")
def module() -> hf.Glm5NextTextLinearAttention:
    return randomise(hf.Glm5NextTextLinearAttention(hf_config(), 0), 1)


@pytest.fixture(params=list(TOLERANCES))
def dtype(request) -> str:
    return request.param


def tiny_layer(module, directory, dtype: str) -> DeltaAttention:
    return load_stored(directory, stored(module), getattr(torch, dtype), lambda w: DeltaAttention.load(w, TINY))


def expected_rows(module, x: torch.Tensor) -> torch.Tensor:
    """The module's outputs [T, H] for a whole sequence without a cache."""
    with KeepDouble() if x.dtype is torch.float64 else nullcontext():
        result = module.to(x.dtype)(x.unsqueeze(0))[0]
    module.float()
    return result


@torch.inference_mode()
def test_random_acceptance_equals_the_transformers_module(module, dtype, tmp_path):
    """A prompt in pieces, then verifications in which rejected rows hold other inputs; two lanes of different progress."""
    ours = tiny_layer(module, tmp_path, dtype)
    generator = torch.Generator().manual_seed(7)
    store = store_of(TINY, dtype)
    number, linear = getattr(torch, dtype), 3  # any of the linear layers holds the state

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(number)

    consumed, found = [[], []], [[], []]
    for slot, pieces in enumerate([(1, 40, 23), (5, 2, 2)]):
        where = torch.tensor([slot])
        for size in pieces:
            x = normal(size, TINY.hidden_size)
            consumed[slot].append(x)
            column = store.column_index(where, "kda_state")
            found[slot].append(ours(x, store, linear, where, column, prompt=True))
    slots = torch.tensor([0, 1])
    for width in (8, 1, 5, 2, 8, 3, 1, 8):
        x = normal(2, width, TINY.hidden_size)
        column = store.column_index(slots, "kda_state")
        y = ours(x.flatten(0, 1), store, linear, slots, column, prompt=False).view(2, width, -1)
        taken = torch.randint(1, width + 1, (2,), generator=generator)
        store.commit(slots, taken)
        for slot in range(2):
            consumed[slot].append(x[slot, : taken[slot]])
            found[slot].append(y[slot, : taken[slot]])
        store.poison()
    for slot in range(2):
        expected = expected_rows(module, torch.cat(consumed[slot]))
        gap = (torch.cat(found[slot]) - expected).abs().max() / expected.abs().max()
        assert gap.item() <= TOLERANCES[dtype]


@torch.inference_mode()
def test_state_equals_the_transformers_cache(module, tmp_path):
    """Recurrent matrices in [key, value] order and the raw convolution rows; transformers keeps one row more."""
    ours, store, slot = tiny_layer(module, tmp_path, "float32"), store_of(TINY, "float32"), torch.tensor([1])
    x = torch.randn(37, TINY.hidden_size, generator=torch.Generator().manual_seed(8))
    ours(x, store, 0, slot, store.column_index(slot, "kda_state"), prompt=True)
    cache = DynamicCache(config=hf_config())
    module(x.unsqueeze(0), cache=cache)
    recurrent = cache.get_recurrent_state(0, state_idx=0)[0]
    raw = cache.get_conv_state(0, state_idx=0)[0]
    assert (store["kda_state"][0, 1, 0] - recurrent).abs().max() <= 1e-5
    assert (store["kda_conv"][0, 1, :3] - raw[:, -3:].t()).abs().max() <= 1e-5


@torch.inference_mode()
def test_half_precision_stays_near_the_module(module, tmp_path):
    ours, store, slot = tiny_layer(module, tmp_path, "bfloat16"), store_of(TINY, "bfloat16"), torch.tensor([0])
    x = torch.randn(40, TINY.hidden_size, generator=torch.Generator().manual_seed(9)).to(BF16)
    found = ours(x, store, 0, slot, store.column_index(slot, "kda_state"), prompt=True)
    expected = expected_rows(module, x.float())
    assert found.dtype is BF16
    assert ((found.float() - expected).norm() / expected.norm()).item() <= 0.02


@torch.inference_mode()
@pytest.mark.parametrize("form", ["verification", "prompt"])
def test_a_row_of_work_is_capturable(module, tmp_path, form):
    ours, store = tiny_layer(module, tmp_path, "float32"), store_of(TINY, "float32")
    slots = torch.tensor([0]) if form == "prompt" else torch.tensor([0, 1])
    x = torch.randn(slots.shape[0] * 6, TINY.hidden_size)
    with CapturableGuard():
        ours(x, store, 0, slots, store.column_index(slots, "kda_state"), prompt=form == "prompt")


def test_a_missing_or_misshapen_tensor_is_named(module, tmp_path):
    tensors = stored(module)
    short = dict(tensors, A_log=tensors["A_log"][:2].clone())
    with pytest.raises(CheckpointError, match=r"A_log has shape \[2\], the configuration needs \[4\]"):
        load_stored(tmp_path / "short", short, torch.float32, lambda w: DeltaAttention.load(w, TINY))
    del tensors["k_conv1d.weight"]
    with pytest.raises(CheckpointError, match=r"k_conv1d\.weight"):
        load_stored(tmp_path / "missing", tensors, torch.float32, lambda w: DeltaAttention.load(w, TINY))
