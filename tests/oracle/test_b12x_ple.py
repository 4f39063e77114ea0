"""N-gram embedding against b12x's references: hash and table lookup bit for bit, gate and convolution to rounding."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from double_oracle import KeepDouble
from qwen_models import prepare, random_tensors, random_weight, write_random_checkpoint

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec_qwen38.geometry import REAL, TINY, Geometry
from specdec_qwen38.ngram_embedding import NgramTable
from specdec_qwen38.weights import Weights

hashing = pytest.importorskip("b12x.sequence.ple_hash.reference")
lookup = pytest.importorskip("b12x.sequence.ple_embedding.reference")
layer = pytest.importorskip("b12x.sequence.ple.reference")

# Rows of the real-size table for sequences with empty history: first heads, and the last one.
REAL_VECTORS = [
    ([1000], [1876085, 31308566, 59776718, 71834192, 97499724, 100188615, 134972424, 142751402], 304819575),
    ([1000, 2000, 3000], [17238551, 37786998], 302034413),
    ([1000, 248044, 2000], [10043113, 32614787], 318741251),
]


def reference_geometry(geometry: Geometry, ordinal: int = 0) -> dict[str, torch.Tensor]:
    """Multipliers, table sizes and offsets as b12x derives them."""
    sizes, offsets = hashing.ple_table_geometry(
        base_size=geometry.ngram_vocab_size_base, dense_layer_ordinal=ordinal, total_heads=geometry.ngram_heads
    )
    multipliers = hashing.ple_multipliers(
        vocab_size=geometry.vocab_size,
        max_order=geometry.ngram_size,
        dense_layer_ordinal=ordinal,
        seed=geometry.seed,
    )
    return {"multipliers": multipliers, "prime_sizes": sizes, "table_offsets": offsets}


def table_of(geometry: Geometry, rows: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> NgramTable:
    """A table with our constants; rows only where they are looked up."""
    return NgramTable(
        rows=torch.empty(0, geometry.ngram_head_dim) if rows is None else rows,
        scale=scale,
        multipliers=torch.tensor(geometry.ple_multipliers(0)),
        primes=torch.tensor(geometry.ple_primes(0)),
        offsets=torch.tensor(geometry.ple_offsets(0)),
        end_of_text=torch.tensor(geometry.eos_token_id),
        orders=geometry.ngram_size,
        heads=geometry.heads_per_ngram,
    )


def reference_rows(geometry: Geometry, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: [B, n − 1 + T], history first → [B, T, heads]."""
    carried = geometry.ngram_size - 1
    batch, count = tokens.shape[0], tokens.shape[1] - carried
    return hashing.ple_hash_packed_reference(
        tokens[:, carried:].flatten(),
        torch.arange(batch + 1) * count,
        tokens[:, :carried].contiguous(),
        eos_token_id=geometry.eos_token_id,
        heads_per_order=geometry.heads_per_ngram,
        **reference_geometry(geometry),
    ).view(batch, count, -1)


def random_tokens(geometry: Geometry, batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens over the whole vocabulary; three in ten are end-of-text, in the history too."""
    tokens = torch.randint(0, geometry.vocab_size, (batch, count), generator=generator)
    return torch.where(torch.rand(batch, count, generator=generator) < 0.3, geometry.eos_token_id, tokens)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("geometry", [TINY, REAL], ids=["tiny", "real"])
def test_hash_constants(geometry, ordinal):
    expected = reference_geometry(geometry, ordinal)
    assert geometry.ple_multipliers(ordinal) == tuple(expected["multipliers"].tolist())
    assert geometry.ple_primes(ordinal) == tuple(expected["prime_sizes"].tolist())
    assert geometry.ple_offsets(ordinal) == tuple(expected["table_offsets"].tolist())


@pytest.mark.parametrize("geometry", [TINY, REAL], ids=["tiny", "real"])
def test_rows_equal_the_reference(geometry):
    generator = torch.Generator().manual_seed(5)
    table = table_of(geometry)
    for count in (1, 2, 3, 8, 40):
        tokens = random_tokens(geometry, 12, geometry.ngram_size - 1 + count, generator)
        assert torch.equal(table.row_ids(tokens), reference_rows(geometry, tokens))


@pytest.mark.parametrize(("prompt", "first", "last"), REAL_VECTORS)
def test_real_size_rows(prompt, first, last):
    history = [REAL.eos_token_id] * (REAL.ngram_size - 1)
    ids = table_of(REAL).row_ids(torch.tensor([history + prompt]))[0, -1].tolist()
    assert ids[: len(first)] == first
    assert ids[-1] == last


def test_a_current_end_of_text_sees_its_predecessors_and_hides_them():
    eos = TINY.eos_token_id
    rows = table_of(TINY).row_ids(torch.tensor([[eos, eos, 1, 2, eos, 3, 4], [eos, eos, 1, 9, eos, 3, 4]]))
    assert (rows[0] == rows[1]).all(-1).tolist() == [True, False, False, True, True]


@pytest.fixture(scope="module")
def lookups():
    """Tokens with history, and a table as random float values."""
    generator = torch.Generator().manual_seed(11)
    tokens = random_tokens(TINY, 3, TINY.ngram_size - 1 + 20, generator)
    values = torch.randn(TINY.ple_table_rows(0), TINY.ngram_head_dim, generator=generator)
    return tokens, values


def embed_reference(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, mode: str) -> torch.Tensor:
    """Hash, gather and dequantise in one reference call: [B·T, embed]."""
    carried = TINY.ngram_size - 1
    batch, count = tokens.shape[0], tokens.shape[1] - carried
    return lookup.fused(
        weight,
        scale,
        tokens[:, carried:].flatten(),
        torch.arange(batch + 1) * count,
        tokens[:, :carried].contiguous(),
        quant_mode=mode,
        num_seqs=batch,
        num_tokens=batch * count,
        eos_token_id=TINY.eos_token_id,
        heads_per_order=TINY.heads_per_ngram,
        shard_start=0,
        embedding_dim=TINY.ple_embed_dim,
        **reference_geometry(TINY),
    )


def loaded(tmp_path, tensors: dict[str, torch.Tensor]) -> NgramTable:
    """The table read from a checkpoint that holds only it, in bfloat16 activations."""
    write_checkpoint(tmp_path, {f"e.{name}": tensor for name, tensor in tensors.items()}, TINY.to_config())
    with Checkpoint.open(tmp_path) as checkpoint:
        weights = Weights(checkpoint, TINY, prefix="e.", dtype=torch.bfloat16, device=torch.device("cpu"))
        return NgramTable.load(weights, 0)


def sharded(values: torch.Tensor) -> dict[str, torch.Tensor]:
    shards = values.chunk(TINY.split_ngram_parts)
    assert len(shards) == TINY.split_ngram_parts
    return {f"ngram_embedding.shard_{i}.weight": shard for i, shard in enumerate(shards)}


def test_bfloat16_table(lookups, tmp_path):
    tokens, values = lookups
    weight = values.to(torch.bfloat16)
    expected = embed_reference(tokens, weight, None, "bf16")
    for name, tensors in (("whole", {"ngram_embedding.weight": weight}), ("shards", sharded(weight))):
        table = loaded(tmp_path / name, tensors)
        assert torch.equal(table.embed(table.row_ids(tokens), torch.bfloat16), expected)


def test_float8_table_with_one_scale(lookups, tmp_path):
    tokens, values = lookups
    scale = torch.tensor([0.0123], dtype=torch.bfloat16)
    weight = (values / scale.float()).to(torch.float8_e4m3fn)
    expected = embed_reference(tokens, weight, scale, "fp8_e4m3_per_tensor")
    # the product has more bits than bfloat16: a second rounding on the way would show
    exact = weight.double() * scale.double()
    assert (exact.to(torch.bfloat16).double() != exact).any()
    table = loaded(tmp_path, {**sharded(weight), "ngram_embedding.weight_scale": scale})
    assert table.rows.dtype is torch.float8_e4m3fn
    assert torch.equal(table.embed(table.row_ids(tokens), torch.bfloat16), expected)


class Layer:
    """The reference of one whole layer over a whole sequence, with the weights of a random checkpoint."""

    def __init__(self, seed: int) -> None:
        prefix = "model.language_model.layers.1.ple."
        tensors = random_tensors(seed)
        self.weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        shards = [
            self.weights.pop(f"ple_embedding.ngram_embedding.shard_{i}.weight") for i in range(TINY.split_ngram_parts)
        ]
        self.table = torch.cat(shards)

    def __call__(self, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """residual: [T, S, H]; tokens: [T]. Returns the contribution [T, S, H]."""
        w = {name: tensor.to(residual.dtype) for name, tensor in self.weights.items()}
        history = torch.full((TINY.ngram_size - 1,), TINY.eos_token_id)
        rows = reference_rows(TINY, torch.cat([history, tokens]).unsqueeze(0))[0]
        embedded = self.table.to(residual.dtype)[rows].flatten(1)
        contribution, _ = layer.ple_projected_sequence_reference(
            residual,
            F.linear(embedded, w["key_proj.weight"]).view_as(residual),
            F.linear(embedded, w["value_proj.weight"]),
            k_norm_weight=w["norm_key.weight"],
            q_norm_weight=w["norm_query.weight"],
            u_norm_weight=w["norm_conv.weight"],
            conv_weight=w["conv1d.weight"],
            eps=TINY.rms_norm_eps,
            dilation=TINY.ngram_size,
        )
        return contribution


SEED = 9


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny"), SEED)


@torch.inference_mode()
# b12x keeps float32 up to the gate where ours rounds each operation, hence the bfloat16 bound
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6), ("bfloat16", 2**-6)])
def test_layer_through_chunks_and_windows_with_rejections(directory, dtype, tolerance):
    generator = torch.Generator().manual_seed(2)
    count = 60
    tokens = torch.randint(0, TINY.vocab_size, (count,), generator=generator)
    tokens[[9, 30, 31]] = TINY.eos_token_id
    residual = random_weight("matrix", (count, TINY.hc_count, TINY.hidden_size), generator) * 10
    residual = residual.to(getattr(torch, dtype))
    reference_layer = Layer(SEED)
    with KeepDouble() if dtype == "float64" else nullcontext():
        expected = reference_layer(residual, tokens)
    target = prepare(directory, dtype=dtype, slots=1).target
    ngrams, store, slots = target.layers[1].ngrams, target.store, torch.tensor([0])
    outputs, start = [], 0
    for size in (1, 4, 13):
        piece = slice(start, start + size)
        outputs.append(ngrams(residual[piece], tokens[piece].unsqueeze(0), store, 0, slots, prompt=True))
        history = torch.cat([store.read_window("ngram_tokens", 0, slots), tokens[piece].unsqueeze(0)], dim=1)
        store.write_window("ngram_tokens", 0, slots, history[:, size:])
        start += size
    while start < count:
        width = min(int(torch.randint(1, 9, (), generator=generator)), count - start)
        taken = int(torch.randint(1, width + 1, (), generator=generator))
        window, rows = tokens[start : start + width].clone(), residual[start : start + width].clone()
        window[taken:] = torch.randint(0, TINY.vocab_size, (width - taken,), generator=generator)
        rows[taken:] = -rows[taken:]
        outputs.append(ngrams(rows, window.unsqueeze(0), store, 0, slots, prompt=False)[:taken])
        store.write_candidates("ngram_tokens", 0, slots, window.unsqueeze(0))
        store.commit(slots, torch.tensor([taken]))
        start += taken
    error = (torch.cat(outputs).double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance
