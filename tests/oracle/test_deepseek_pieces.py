"""Pieces of the DeepSeek-V4.1 target against transformers' ``deepseek_v4``, which shares them, and against printed vectors.

The V4 class differs: it collapses streams in the same block, normalises query heads, weighs after the down projection and has no
cache rounding. The pieces are compared where the two agree; the rest is in ``test_deepseek_target``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from deepseek_models import golden_tensor, golden_tensors, write_golden_checkpoint
from deepseek_target import Driver
from double_oracle import KeepDouble
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from specdec.checkpoint import mixtures
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights
from specdec.checkpoint.writer import write_checkpoint
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.moe import DenseMixture, GatheredMixture
from specdec_deepseek_v41.attention import attend
from specdec_deepseek_v41.engram import EngramTable
from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.hyper_connection import HyperConnection, collapse, expand, load_site
from specdec_deepseek_v41.indexer import candidate_rows
from specdec_deepseek_v41.linear import Linear
from specdec_deepseek_v41.mixture import load_mixture
from specdec_deepseek_v41.rotary import RotaryTable, compressed_frequencies, plain_frequencies, rotate
from specdec_deepseek_v41.rows import Lay, Rows

CPU = torch.device("cpu")
ROWS = 70  # more than four windows of the tiny model
EXACT = 1e-12
# Enough for every compressed row of the compared contexts, so that nothing is selected.
EVERYTHING = evolve(TINY, index_topk=64, candidate_topk_blocks=32)


def hf_config() -> DeepseekV4Config:
    g = TINY
    config = DeepseekV4Config(
        vocab_size=g.vocab_size,
        hidden_size=g.hidden_size,
        moe_intermediate_size=g.moe_intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=g.num_attention_heads,
        head_dim=g.head_dim,
        q_lora_rank=g.q_lora_rank,
        o_groups=g.o_groups,
        o_lora_rank=g.o_lora_rank,
        n_routed_experts=g.n_routed_experts,
        num_experts_per_tok=g.num_experts_per_tok,
        sliding_window=g.sliding_window,
        hc_mult=g.hc_mult,
        hc_sinkhorn_iters=g.hc_sinkhorn_iters,
        hc_eps=g.hc_eps,
        rms_norm_eps=g.rms_norm_eps,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
        routed_scaling_factor=g.routed_scaling_factor,
        swiglu_limit=g.swiglu_limit,
        partial_rotary_factor=g.qk_rope_head_dim / g.head_dim,
        compress_rope_theta=g.compress_rope_theta,
        rope_parameters={
            "rope_type": "yarn",
            "factor": g.rope_factor,
            "beta_fast": g.beta_fast,
            "beta_slow": g.beta_slow,
            "original_max_position_embeddings": g.original_max_position_embeddings,
        },
    )
    config.compress_rates["heavily_compressed_attention"] = 2
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def double(build) -> nn.Module:
    """A module built and kept in float64."""
    with KeepDouble():
        return build(hf_config()).double().eval()


def fill(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Gives a module all of its weights, by its own names."""
    state = {name: tensor.double() for name, tensor in tensors.items()}
    missing = module.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys, missing
    return module


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return golden_tensors()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_golden_checkpoint(tmp_path_factory.mktemp("golden"))


@pytest.fixture
def weights(directory):
    with Checkpoint.open(directory) as checkpoint:
        yield Weights(checkpoint, prefix="", dtype=torch.float64, device=CPU)


def rows_of(*shape: int, seed: int = 1, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def close(found: Tensor, wanted, tolerance: float = EXACT) -> None:
    assert torch.isfinite(found).all()
    difference = (found - torch.as_tensor(wanted, dtype=torch.float64)).abs().max().item()
    assert difference <= tolerance, difference


# --- hyper-connections ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_mixes_have_the_golden_values(weights):
    x = torch.arange(128, dtype=torch.float64) / 64 - 1
    streams = torch.stack([x, -x, x.square(), torch.ones_like(x)]).unsqueeze(0)
    pre, post, comb = load_site(weights.under("layers.0."), TINY, "attn").mixes(streams)
    close(pre[0], (0.3773559651, 0.3764402884, 0.4442727631, 0.7352116286), 1e-9)
    close(post[0], (1.0470314414, 0.6689126049, 1.4945195343, 0.5838506694), 1e-9)
    wanted = (
        (0.2103659279, 0.1048630466, 0.3105820367, 0.3741879889),
        (0.0676802453, 0.4085813473, 0.2723591606, 0.2513782468),
        (0.3624572897, 0.2385531905, 0.1467408579, 0.2522476619),
        (0.3594955371, 0.2480014156, 0.2703169449, 0.1221851024),
    )
    close(comb[0], wanted, 1e-9)


@torch.inference_mode()
def test_mixes_of_printed_coefficients():
    """Coefficients (i − 12) / 8, the columns of the mixing part multiplied by 1, −1, 2 and ½, without the product before them."""
    base = (torch.arange(24, dtype=torch.float64) - 12) / 8
    base[8:] = (base[8:].view(4, 4) * torch.tensor([1, -1, 2, 0.5], dtype=torch.float64)).flatten()
    nothing, ones = torch.zeros(24, 512, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    site = HyperConnection.build(fn=nothing, base=base, scale=ones, iterations=20, hc_eps=1e-6, rms_eps=1e-20)
    pre, post, comb = site.mixes(rows_of(1, 4, 128))
    close(pre[0], (0.1824265, 0.2018142, 0.2227011, 0.2450860), 1e-7)
    close(post[0], (0.5378828, 0.5884299, 0.6416426, 0.6972903), 1e-7)
    wanted = (
        (0.1654207, 0.5282139, 0.0621671, 0.2441973),
        (0.2535499, 0.2978454, 0.1571017, 0.2915020),
        (0.2985884, 0.1290358, 0.3050262, 0.2673486),
        (0.2824400, 0.0449040, 0.4757040, 0.1969511),
    )
    close(comb[0], wanted, 1e-7)


@torch.inference_mode()
@pytest.mark.parametrize("site", ["attn", "ffn"])
def test_mixes_equal_the_transformers_module(weights, golden, site):
    module = fill(
        double(hf.DeepseekV4HyperConnection),
        {part: golden[f"layers.3.hc_{site}_{part}"] for part in ("fn", "base", "scale")},
    )
    streams, y = rows_of(ROWS, 4, 128) * torch.tensor([0.1, 1.0, 5.0, 30.0]).view(1, 4, 1), rows_of(ROWS, 128, seed=2)
    with KeepDouble():
        post, comb, collapsed = (value[0] for value in module(streams.unsqueeze(0)))
    ours = load_site(weights.under("layers.3."), TINY, site).mixes(streams)
    close(ours[1], post)
    close(ours[2], comb)
    close(collapse(streams, ours[0]), collapsed)
    # stream b reads over the first index of the matrix
    wanted = post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tab,tah->tbh", comb, streams)
    close(expand(streams, y, ours[1], ours[2]), wanted)


# --- rotary embedding -----------------------------------------------------------------------------------------------------


def test_frequencies():
    plain = (1, 0.316227766, 0.1, 0.0316227766, 0.01, 0.0031622777, 0.001, 0.0003162278)
    compressed = (1, 0.1397542486, 0.0125, 0.002795085, 0.000625, 0.0001397542, 0.00003125, 0.0000069877)
    close(plain_frequencies(TINY, torch.float64), plain, 1e-9)
    close(compressed_frequencies(TINY, torch.float64), compressed, 1e-9)
    module = double(hf.DeepseekV4RotaryEmbedding)
    close(plain_frequencies(TINY, torch.float64), module.main_inv_freq)
    close(compressed_frequencies(TINY, torch.float64), module.compress_inv_freq)
    # the published sizes: the ramp runs from pair 15 to pair 25
    fast = 160000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ratio = compressed_frequencies(REAL, torch.float64) / fast
    close(ratio[:16], torch.ones(16))
    close(ratio[25:], torch.full((7,), 1 / 16))
    assert (ratio[15:25].diff() < 0).all()


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "compressed"), [("main", False), ("compress", True)])
def test_rotation_equals_the_transformers_function(kind, compressed):
    module, x = double(hf.DeepseekV4RotaryEmbedding), rows_of(ROWS, 4, 64)
    positions = torch.arange(ROWS) * 3
    with KeepDouble():
        cos, sin = module(x, positions.unsqueeze(0), layer_type=kind)
        wanted = hf.apply_rotary_pos_emb(x.unsqueeze(0), cos, sin, unsqueeze_dim=2)[0]
    table = RotaryTable.build(TINY, compressed=compressed, positions=3 * ROWS, dtype=torch.float64, device=CPU)
    rotation = table.at(positions)
    found = rotate(x.clone(), rotation.forward.unsqueeze(1))
    close(found, wanted)
    close(rotate(found, rotation.inverse.unsqueeze(1)), x)
    half = rotate(x.to(torch.bfloat16), rotation.forward.unsqueeze(1).to(torch.complex64))
    assert half.dtype is torch.bfloat16
    close(half.double(), wanted, 0.05)


# --- attention ------------------------------------------------------------------------------------------------------------


def hf_attention(golden: dict[str, Tensor], ours: int, layer: int) -> nn.Module:
    """Layer 0 is a sliding window, layer 1 one with compressed rows of two tokens."""
    names = {
        "q_a_proj.weight": "wq_a.weight",
        "q_a_norm.weight": "q_norm.weight",
        "q_b_proj.weight": "wq_b.weight",
        "kv_proj.weight": "wkv.weight",
        "kv_norm.weight": "kv_norm.weight",
        "o_a_proj.weight": "wo_a.weight",
        "o_b_proj.weight": "wo_b.weight",
        "sinks": "attn_sink",
    }
    if layer:
        names |= {
            "compressor.kv_proj.weight": "compressor.wkv.weight",
            "compressor.gate_proj.weight": "compressor.wgate.weight",
            "compressor.kv_norm.weight": "compressor.norm.weight",
        }
    tensors = {name: golden[f"layers.{ours}.attn.{source}"] for name, source in names.items()}
    if layer:
        tensors["compressor.position_bias"] = torch.zeros(2, TINY.head_dim)
    module = fill(double(lambda config: hf.DeepseekV4Attention(config, layer)), tensors)
    module.q_b_norm = nn.Identity()
    return module


def hf_attended(module: nn.Module, x: Tensor) -> Tensor:
    """[T, H] of a whole sequence."""
    count = x.shape[0]
    positions = torch.arange(count)
    apart = positions.unsqueeze(1) - positions
    mask = torch.zeros(count, count, dtype=torch.float64).masked_fill_(
        (apart < 0) | (apart >= TINY.sliding_window), float("-inf")
    )
    with KeepDouble():
        rotary = double(hf.DeepseekV4RotaryEmbedding)
        embeddings = {kind: rotary(x, positions.unsqueeze(0), layer_type=kind) for kind in ("main", "compress")}
        return module(x.unsqueeze(0), embeddings, positions.unsqueeze(0), mask[None, None])[0][0]


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [(ROWS,), (17, 1, 30, 22)], ids=str)
@pytest.mark.parametrize(("index", "layer"), [(0, 0), (2, 1), (4, 1)], ids=["window", "layer 2", "layer 4"])
def test_attention_equals_the_transformers_module(tmp_path, golden, index, layer, chunks):
    """The window, and the window with all compressed rows that are complete at the query; fed as prompts and as verified rows."""
    config = {"model_type": "deepseek_v41", "text_config": EVERYTHING.to_config()}
    driver = Driver(write_checkpoint(tmp_path / "every", golden, config), qdq=False)
    x = rows_of(ROWS, 128)
    wanted = hf_attended(hf_attention(golden, index, layer), x)
    target, parts = driver.target, driver.target.layers[index]
    for prompt in (True, False):
        slot, start, found = int(prompt), 0, []
        for part in (y for chunk in x.split(list(chunks)) for y in ((chunk,) if prompt else chunk.split(8))):
            count = part.shape[0]
            lay = Lay.rectangle(torch.tensor([slot]), torch.arange(start, start + count).unsqueeze(0), prompt=prompt)
            rows = Rows.build(
                target.store,
                lay,
                ratios=(1, 2),
                tokens=target.tokens,
                plain=target.plain_table,
                compressed=target.compressed_table,
                like=x,
            )
            rotation = rows.compressed if layer else rows.plain
            q, qr, row = parts.attention.project(part, rotation)
            keys, bias = rows.windows(index, row), rows.bias
            if layer:
                parts.compressor(part, rows)
                selected, _ = parts.indexer(part, qr, rows, None)
                keys, bias = torch.cat([keys, selected.keys], dim=1), selected.bias
            attended = attend(q.unsqueeze(1), keys, bias, parts.attention.sink).squeeze(1)
            found.append(parts.attention.write_back(attended, rotation))
            if not prompt:
                target.store.commit(lay.lanes, torch.tensor([count]))
            start += count
        close(torch.cat(found), wanted)


@torch.inference_mode()
def test_queries_may_share_their_rows():
    """What the drafter does: several queries a lane over one set of rows."""
    q, keys, sink = rows_of(3, 5, 4, 64), rows_of(3, 11, 64, seed=2), rows_of(4, seed=3)
    bias = torch.zeros(3, 1, 11, dtype=torch.float64)
    bias[1, :, 6:] = float("-inf")
    found = attend(q, keys, bias, sink)
    logits = torch.einsum("gnhd,gsd->gnhs", q, keys) / 8 + bias.unsqueeze(1)
    weights = logits.exp() / (logits.exp().sum(-1, keepdim=True) + sink.exp().view(4, 1))
    close(found, torch.einsum("gnhs,gsd->gnhd", weights, keys))


# --- selection ------------------------------------------------------------------------------------------------------------


def test_candidate_blocks_take_the_lower_block_at_equal_scores():
    """Blocks of two, three of them: the newest is always one, whatever it scores."""
    lowest = float("-inf")
    scores = torch.tensor([[0.0, -1, 3, -2, 0, 0, 0, -9, -5, lowest, lowest, lowest]])
    found = candidate_rows(scores, torch.tensor([[9]]), size=2, count=3)
    assert found is not None and found[0].view(6, 2)[:, 0].tolist() == [True, True, False, False, True, False]
    assert candidate_rows(scores, torch.tensor([[9]]), size=2, count=6) is None
    # eleven rows: the last block has one
    found = candidate_rows(scores[:, :11], torch.tensor([[9]]), size=2, count=3)
    assert found is not None and found.shape == (1, 11)


# --- mixture of experts ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["dense", "gathered"])
def load(request, monkeypatch):
    """``load_mixture`` for one form of the block."""
    monkeypatch.setattr(mixtures, "DENSE_LIMIT_BYTES", (1 << 40) if request.param else 0)

    def loaded(weights: Weights):
        block = load_mixture(weights, TINY, experts=TINY.n_routed_experts, top_k=TINY.num_experts_per_tok)
        assert isinstance(block, DenseMixture if request.param else GatheredMixture)
        return block

    return loaded


@torch.inference_mode()
def test_mixture_has_the_golden_values(weights, load):
    x = torch.arange(128, dtype=torch.float64) / 64 - 1
    block = load(weights.under("layers.0.ffn."))
    ids, _ = block.route(F.linear(3 * x.unsqueeze(0), block.router))
    assert ids.tolist() == [[3, 0]]
    found = block(3 * x.unsqueeze(0))[0]
    close(found[:4], (3.4239338115, -4.0598458966, -3.1871701351, 0.7690974169), 1e-9)
    close(found.abs().sum(), 199.7297272074, 1e-8)


@torch.inference_mode()
def test_mixture_equals_the_transformers_module(weights, golden, load):
    prefix = "layers.5.ffn."
    shared = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stacked = {
        part: torch.stack([golden[f"{prefix}experts.{expert}.{part}.weight"] for expert in range(8)])
        for part in ("w1", "w3", "w2")
    }
    tensors = {
        "gate.weight": golden[f"{prefix}gate.weight"],
        "gate.e_score_correction_bias": golden[f"{prefix}gate.bias"],
        "experts.gate_up_proj": torch.cat([stacked["w1"], stacked["w3"]], dim=1),
        "experts.down_proj": stacked["w2"],
        **{
            f"shared_experts.{name}.weight": golden[f"{prefix}shared_experts.{part}.weight"]
            for name, part in shared.items()
        },
    }
    module = fill(double(lambda config: hf.DeepseekV4SparseMoeBlock(config, 0)), tensors)
    # a good part of the gates and ups is beyond the limit of ten
    x = rows_of(ROWS, 128, spread=6.0)
    with KeepDouble():
        wanted = module(x.unsqueeze(0))[0]
    close(load(weights.under(prefix))(x), wanted, 1e-10)


# --- quantised storage ----------------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def quantised_matrix(name: str, rows: int, columns: int, *, fp4: bool = False, by_row: bool = False):
    """Stored tensors of a random quantised weight, and its values in float64."""
    drawn = golden_tensor(name, (rows, columns))
    scale = (120 + (drawn[:: 1 if fp4 or by_row else 32, ::32].abs() * 4).int() % 4).to(torch.uint8)
    powers = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    if not (fp4 or by_row):
        powers = powers.repeat_interleave(32, 0)[:rows]
    if fp4:
        codes = (drawn.abs() * 1000).int() % 16
        stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        values = E2M1[codes.long()]
    else:
        stored = (drawn * 100).to(torch.float8_e4m3fn)
        values = stored.double()
    tensors = {f"{name}.weight": stored, f"{name}.scale": scale}
    return tensors, values * powers[:, :columns]


def reader(tmp_path, tensors: dict[str, Tensor]) -> Weights:
    write_checkpoint(tmp_path / "quantised", tensors, {"model_type": "deepseek_v41"})
    checkpoint = Checkpoint.open(tmp_path / "quantised")
    return Weights(checkpoint, prefix="", dtype=torch.float64, device=CPU)


@torch.inference_mode()
def test_a_quantised_linear_quantises_what_it_reads(tmp_path):
    (first, a), (second, b) = (quantised_matrix(name, 64, 96) for name in ("a", "b"))
    linear = Linear.load(reader(tmp_path, first | second), {"a.weight": 64, "b.weight": 64}, 96)
    x = rows_of(5, 96)
    close(linear(x), F.linear(fp8_ue8m0(x), torch.cat([a, b])))
    assert (linear(x) - F.linear(x, torch.cat([a, b]))).abs().max() > 1e-3


@torch.inference_mode()
def test_engram_rows_of_a_quantised_table(tmp_path):
    tensors, values = quantised_matrix("embed", 40, 64, by_row=True)
    table = EngramTable.load(reader(tmp_path, tensors), 40, 64)
    ids = torch.tensor([[3, 39, 0], [7, 7, 12]])
    assert torch.equal(table.rows(ids), values[ids].flatten(1))


@torch.inference_mode()
def test_a_quantised_mixture_weighs_before_it_quantises(tmp_path, load):
    g, tensors, values = TINY, {}, {}
    shapes = {"w1": (32, 128), "w3": (32, 128), "w2": (128, 32)}
    for part, (rows, columns) in shapes.items():
        for owner in (*(f"experts.{expert}" for expert in range(8)), "shared_experts"):
            stored, values[owner, part] = quantised_matrix(
                f"{owner}.{part}", rows, columns, fp4=owner != "shared_experts"
            )
            tensors |= stored
    tensors["gate.weight"], tensors["gate.bias"] = golden_tensor("gate.weight", (8, 128)), torch.zeros(8)
    block = load(reader(tmp_path, tensors))
    x = rows_of(6, 128)
    scores = torch.log1p(torch.exp(F.linear(x, tensors["gate.weight"]))).sqrt()

    def expert(owner: str, row: Tensor, weight: Tensor | float, *, first: bool = True) -> Tensor:
        read = fp8_ue8m0(row)
        gate, up = F.linear(read, values[owner, "w1"]), F.linear(read, values[owner, "w3"])
        inner = F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
        if first:
            return F.linear(fp8_ue8m0(inner * weight), values[owner, "w2"])
        return F.linear(fp8_ue8m0(inner), values[owner, "w2"]) * weight

    def expected(*, first: bool) -> Tensor:
        found = []
        for row, score in zip(x, scores, strict=True):
            ids = score.argsort(descending=True)[: g.num_experts_per_tok].tolist()
            total = score[ids].sum()
            parts = [expert(f"experts.{e}", row, 1.5 * score[e] / total, first=first) for e in ids]
            found.append(sum(parts) + expert("shared_experts", row, 1.0))
        return torch.stack(found)

    wanted = expected(first=True)
    close(block(x), wanted, 1e-10 * wanted.abs().max().item())
    assert (block(x) - expected(first=False)).abs().max() > 1e-5 * wanted.abs().max()
