"""Weights with power-of-two scales beside them: values by hand, storage recognised from headers, experts by short names."""

import pytest
import torch

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.matrices import load_experts, load_matrix
from specdec.checkpoint.microscaling import dequantise_fp4, dequantise_fp8, quantise_fp4, quantise_fp8
from specdec.checkpoint.mixtures import build_mixture
from specdec.checkpoint.storages import holds_values_of, is_companion, storage_of
from specdec.declaration import TensorGroup, TensorInventory, TensorSpec
from specdec.errors import CheckpointError
from specdec.ops.block_quantisation import fp4_ue8m0, fp8_ue8m0
from specdec.ops.moe import DenseMixture, GatheredMixture, SharedExpert, route_softmax, swiglu

E4M3, E8M0, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def refusal(function, *args):
    with pytest.raises(CheckpointError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def both(exponents):
    """Scales 2^(byte - 127) under either dtype."""
    return exponents, exponents.view(E8M0)


@pytest.mark.parametrize("shape", [(70, 96), (64, 40), (1, 64), (33, 33)])
def test_fp8_in_squares_of_32(make_checkpoint, shape):
    rows, columns = shape
    weight = torch.randn(shape, generator=generator(1)).to(E4M3)
    exponents = torch.randint(100, 150, (-(-rows // 32), -(-columns // 32)), generator=generator(2)).to(torch.uint8)
    expected = [
        [float(weight[r, c].float()) * 2.0 ** (int(exponents[r // 32, c // 32]) - 127) for c in range(columns)]
        for r in range(rows)
    ]
    for scale in both(exponents):
        path = make_checkpoint({"w.weight": weight, "w.scale": scale}, directory=str(scale.dtype))
        with Checkpoint.open(path) as checkpoint:
            # squares and rows are one thing for a single row
            assert storage_of(checkpoint, "w.weight") == ("fp8_32" if rows > 1 else "mxfp8")
            assert torch.equal(load_matrix(checkpoint, "w.weight", F32), torch.tensor(expected))


def test_fp8_with_scales_of_each_row(make_checkpoint):
    weight = torch.randn(40, 64, generator=generator(3)).to(E4M3)
    exponents = torch.randint(100, 150, (40, 2), generator=generator(4)).to(torch.uint8)
    expected = [
        [float(weight[r, c].float()) * 2.0 ** (int(exponents[r, c // 32]) - 127) for c in range(64)] for r in range(40)
    ]
    for scale in both(exponents):
        path = make_checkpoint({"w.weight": weight, "w.scale": scale}, directory=str(scale.dtype))
        with Checkpoint.open(path) as checkpoint:
            assert storage_of(checkpoint, "w.weight") == "mxfp8"
            assert torch.equal(load_matrix(checkpoint, "w.weight", F32), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_fp4(make_checkpoint, dtype):
    packed = torch.randint(0, 256, (5, 32), generator=generator(5)).to(torch.uint8)
    exponents = torch.tensor([[127, 120], [130, 1], [2, 140], [127, 127], [125, 200]], dtype=torch.uint8)

    def value(row, column):
        code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
        return (-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (int(exponents[row, column // 32]) - 127)

    expected = torch.tensor([[value(row, column) for column in range(64)] for row in range(5)])
    for scale in both(exponents):
        path = make_checkpoint({"w.weight": packed.view(dtype), "w.scale": scale}, directory=str(scale.dtype))
        with Checkpoint.open(path) as checkpoint:
            assert storage_of(checkpoint, "w.weight") == "mxfp4"
            assert torch.equal(load_matrix(checkpoint, "w.weight", F32), expected)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.zeros(64, 64, dtype=E4M3), torch.ones(2, 2)),
        (torch.zeros(64, 64, dtype=E4M3), torch.ones(2, 1, dtype=torch.uint8)),
        (torch.zeros(64, 64, dtype=E4M3), torch.ones(1, dtype=torch.uint8)),
        (torch.zeros(64, dtype=E4M3), torch.ones(2, dtype=torch.uint8)),
        (torch.zeros(64, 32, dtype=torch.int8), torch.ones(2, 2, dtype=torch.uint8)),
        (torch.zeros(64, 8, dtype=torch.int8), torch.ones(64, 1, dtype=torch.uint8)),
        (torch.zeros(64, 64), torch.ones(2, 2, dtype=torch.uint8)),
    ],
)
def test_a_scale_that_does_not_fit_is_named(make_checkpoint, weight, scale):
    with Checkpoint.open(make_checkpoint({"w.weight": weight, "w.scale": scale})) as checkpoint:
        message = refusal(load_matrix, checkpoint, "w.weight", F32)
    assert "tensor w.weight" in message and "companions: w.scale" in message


def test_two_kinds_of_companions_are_refused(make_checkpoint):
    held = {
        "w.weight": torch.zeros(64, 64, dtype=E4M3),
        "w.scale": torch.ones(2, 2, dtype=torch.uint8),
        "w.weight_scale": torch.ones(1),
    }
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        message = refusal(load_matrix, checkpoint, "w.weight", F32)
    assert "w.weight_scale float32 [1], w.scale uint8 [2, 2]" in message


def test_headers_stand_for_declared_floats(make_checkpoint):
    specs = {"a.weight": (40, 64), "b.weight": (8, 64)}
    groups = [TensorGroup(name=name, shape=shape, dtype="bfloat16", source="test") for name, shape in specs.items()]
    inventory = TensorInventory(groups=tuple(groups))
    held = {
        "a.weight": torch.zeros(40, 64, dtype=E4M3),
        "a.scale": torch.ones(2, 2, dtype=torch.uint8),
        "b.weight": torch.zeros(8, 32, dtype=torch.int8),
        "b.scale": torch.ones(8, 2, dtype=torch.uint8),
        "c.scale": torch.ones(1),
    }
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        for name, shape in specs.items():
            assert holds_values_of(checkpoint, TensorSpec(name=name, shape=shape, dtype="bfloat16"))
            assert not holds_values_of(checkpoint, TensorSpec(name=name, shape=shape[::-1], dtype="bfloat16"))
            assert is_companion(checkpoint, name.replace("weight", "scale"), inventory)
        assert not is_companion(checkpoint, "c.scale", inventory)
        result = checkpoint.validate(inventory, any_storage=True)
    assert result.unexpected == ("c.scale",) and not result.missing_count and not result.mismatched_count


@pytest.mark.parametrize("shape", [(70, 96), (64, 40)])
def test_fp8_written_and_read(shape):
    weight = torch.randn(shape, generator=generator(6)) * torch.exp(
        3 * torch.randn(shape[0], 1, generator=generator(7))
    )
    weight[:32, :32] = 0
    for rows in (1, 32):
        values, scale = quantise_fp8(weight, rows=rows)
        assert (values.dtype, scale.dtype) == (E4M3, E8M0)
        read = dequantise_fp8(values, scale)
        # half a step of three mantissa bits, or of the subnormals
        spread = scale.float().repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(32, 1)[:, : shape[1]]
        assert ((read - weight).abs() <= torch.maximum(weight.abs() / 16, spread * 2.0**-10)).all()
        assert (weight.abs() <= 448 * spread).all()
        # a largest value that was rounded down to 224 has a smaller scale the second time, and the same value
        assert torch.equal(dequantise_fp8(*quantise_fp8(read, rows=rows)), read)


def test_rows_written_and_read_are_those_of_a_quantised_cache():
    rows = torch.randn(7, 128, generator=generator(8))
    assert torch.equal(dequantise_fp8(*quantise_fp8(rows, rows=1)), fp8_ue8m0(rows))
    codes, scale = quantise_fp4(rows)
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (7, 64), (7, 4))
    assert torch.equal(dequantise_fp4(codes, scale), fp4_ue8m0(rows))
    zero = quantise_fp4(torch.tensor([[-0.0, -1e-9, *[1.0] * 30]]))[0]
    assert zero.view(torch.uint8)[0, 0] == 0


def test_what_cannot_be_written():
    for function in (quantise_fp8, quantise_fp4):
        with pytest.raises(ValueError, match="finite"):
            function(torch.full((32, 32), torch.nan))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise_fp4(torch.zeros(32, 40))
    with pytest.raises(ValueError, match="one matrix"):
        quantise_fp8(torch.zeros(2, 32, 32))
    with pytest.raises(ValueError, match="do not fit"):
        dequantise_fp8(torch.zeros(64, 64, dtype=E4M3), torch.ones(1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        dequantise_fp4(torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.uint8))


SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def stored_experts(count=4, hidden=64, inner=32):
    """Experts under short names, and [E, out, in] of each projection."""
    held, dense = {}, {}
    for number, (projection, short) in enumerate(SHORT.items()):
        shape = (hidden, inner) if short == "w2" else (inner, hidden)
        drawn = [torch.randn(shape, generator=generator(10 * number + expert)) for expert in range(count)]
        for expert, weight in enumerate(drawn):
            codes, scale = quantise_fp4(weight)
            held |= {f"ffn.experts.{expert}.{short}.weight": codes, f"ffn.experts.{expert}.{short}.scale": scale}
        dense[projection] = torch.stack([fp4_ue8m0(weight) for weight in drawn])
    return held, dense


def test_experts_stay_packed_under_their_short_names(make_checkpoint):
    held, dense = stored_experts()
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, "ffn.experts", 4)
        assert experts.storage == "mxfp4" and list(experts.projections) == list(SHORT)
        for projection, values in dense.items():
            assert experts[projection].weight.dtype == torch.uint8 and experts[projection].scale.dtype == E8M0
            assert experts[projection].shape == values.shape
            assert torch.equal(experts[projection].dense(torch.bfloat16).float(), values)
        assert "beyond the 3 experts" in refusal(load_experts, checkpoint, "ffn.experts", 3)
        assert "no tensor ffn.experts.4.w1.weight" in refusal(load_experts, checkpoint, "ffn.experts", 5)


def test_short_names_of_plain_experts(make_checkpoint):
    held = {
        f"e.{n}.{short}.weight": torch.full((2, 2), float(ord(short[1]) + n))
        for n in (0, 1)
        for short in SHORT.values()
    }
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, "e", 2)
    assert {name: experts[name].weight[:, 0, 0].tolist() for name in SHORT} == {
        "gate_proj": [49.0, 50.0],
        "up_proj": [51.0, 52.0],
        "down_proj": [50.0, 51.0],
    }


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_packed_experts_compute_what_their_values_do(make_checkpoint, monkeypatch, limit):
    monkeypatch.setattr("specdec.checkpoint.mixtures.DENSE_LIMIT_BYTES", limit)
    held, dense = stored_experts()
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, "ffn.experts", 4)
    router, m = torch.randn(4, 64, generator=generator(90)), torch.randn(5, 64, generator=generator(91))
    zero = torch.zeros(8, 64)
    mixture = build_mixture(
        experts,
        router=router,
        route=lambda logits: route_softmax(logits, 2),
        activation=swiglu,
        shared=SharedExpert(gate=zero, up=zero, down=zero.T.contiguous()),
        quantised_activations=False,
        where="test",
    )
    assert isinstance(mixture, DenseMixture if limit else GatheredMixture)
    expected = torch.zeros_like(m)
    ids, weights = route_softmax(m @ router.T, 2)
    for row in range(5):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up, down = (dense[name][expert] for name in SHORT)
            expected[row] += weight * (down @ swiglu(gate @ m[row], up @ m[row]))
    assert torch.allclose(mixture(m), expected, rtol=1e-5, atol=1e-4)
