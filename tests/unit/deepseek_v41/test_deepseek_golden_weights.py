"""The golden weights are those that the golden values were computed from."""

import pytest
import torch
from deepseek_models import (
    GOLDEN_PROMPT,
    golden_spread,
    golden_tensor,
    group_sizes,
    plain_specs,
    tiny_compressed_ids,
    write_golden_checkpoint,
)

from specdec.checkpoint import Checkpoint
from specdec_deepseek_v41.geometry import TINY, Geometry


@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [
        ("layers.0.attn.wq_a.weight", (64, 128), (0.0875568633, 0.0442201250, -0.0568434046)),
        ("embed.weight", (512, 128), (0.0606910106, 1.5410035536, 1.1418775451)),
        ("norm.weight", (128,), (0.9051790744, 0.8107659166)),
    ],
)
def test_first_values(name, shape, first):
    found = golden_tensor(name, shape).flatten()[: len(first)].tolist()
    assert found == pytest.approx(first, abs=6e-11)


def test_number_of_tensors_and_parameters_by_group():
    specs = list(plain_specs())
    assert group_sizes(specs) == (588, 2_811_006)

    def parameters(*parts, but=()):
        chosen = [s for s in specs if any(p in s.name for p in parts) and not any(p in s.name for p in but)]
        return group_sizes(chosen)[1]

    outer = ("embed.weight", "head.weight", "norm.weight")
    assert sum(s.numel for s in specs if s.name in outer) == 131_200
    special = ("ffn.experts.", "engram.", "compressor.", "indexer.")
    assert parameters("layers.", but=special) == 874_900
    assert parameters("ffn.experts.", but=("mtp.",)) == 983_040
    assert parameters("engram.embed.") == 34_944
    assert parameters("engram.", but=("engram.embed.",)) == 247_808
    assert parameters("compressor.") == 41_152
    assert parameters("indexer.") == 23_648
    heads = ("main_", "mtp.2.norm", "markov_head", "confidence_head")
    assert parameters("mtp.", but=("ffn.experts.", *heads)) == 260_922
    assert (
        parameters("mtp.", but=("layers.", *heads, *("attn", "hc_", "gate", "shared_experts", "ffn_norm"))) == 147_456
    )
    assert parameters("main_", "mtp.2.norm") == 49_408
    assert parameters("markov_head") == 16_384
    assert parameters("confidence_head") == 144


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("layers.3.attn.compressor.norm.weight", (1, 0.2)),
        ("layers.1.engram.k_weight", (1, 0.2)),
        ("layers.1.hc_ffn_scale", (1, 0.2)),
        ("mtp.1.hc_attn_base", (0, 0.5)),
        ("mtp.1.ffn.gate.bias", (0, 0.1)),
        ("mtp.2.markov_head.embed.weight", (0, 3**0.5)),
        ("mtp.2.markov_head.head.weight", (0, (3 / 16) ** 0.5)),
        ("layers.1.hc_attn_fn", (0, (3 / 16) ** 0.5)),
    ],
)
def test_spread_by_name(name, spread):
    assert golden_spread(name, (512, 16)) == pytest.approx(spread)


def test_a_golden_checkpoint_keeps_every_bit(tmp_path):
    with Checkpoint.open(write_golden_checkpoint(tmp_path / "golden")) as checkpoint:
        assert Geometry.from_config(checkpoint.config) == TINY
        assert len(checkpoint.names) == 588 + 1
        name = "layers.4.engram.wkv.weight"
        assert torch.equal(checkpoint.load(name), golden_tensor(name, (640, 192)))


def test_compressed_ids_and_prompt():
    ids = tiny_compressed_ids()
    assert ids[TINY.engram_pad_token_id] == 17 and ids.dtype == torch.int32
    assert [int(ids[token]) for token in GOLDEN_PROMPT[:3]] == [80, 339, 214]
    assert [int(ids[token]) for token in GOLDEN_PROMPT[-3:]] == [66, 325, 200]
