"""NVFP4 against hand-computed values and, bit for bit, against the pure-torch pieces of b12x."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.checkpoint import nvfp4
from specdec.testing.guard import CapturableGuard

E4M3 = torch.float8_e4m3fn
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def b12x():
    """The reference's pure-torch functions. Their modules import GPU compilers, so only the functions are executed."""
    spec = importlib.util.find_spec("b12x")
    if spec is None:
        pytest.skip("b12x is not installed")
    root = Path(spec.submodule_search_locations[0])
    wanted = {
        "_lib/intrinsics.py": ("_fp4_quantize_values", "_fp4_encode_nibbles", "pack_grouped_fp4_values"),
        "moe/_shared/kernels/reference.py": (
            "_make_fp4_lut",
            "_dequant_fp4",
            "_apply_block_scales",
            "_quantize_vec_to_fp4_dequant",
        ),
    }
    space = {"torch": torch, "_FP4_MAG_LUT": MAGNITUDES}
    for file, names in wanted.items():
        tree = ast.parse((root / file).read_text())
        chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
        assert len(chosen) == len(names)
        exec(compile(ast.Module(body=chosen, type_ignores=[]), file, "exec"), space)
        space["fp4_quantize_values_torch"] = space["_fp4_quantize_values"]
    return space


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def random_blocks(shape, seed, spread=6.0):
    """Values over many magnitudes, with all-zero blocks and exact rounding ties among them."""
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(shape, generator=generator)
        * torch.exp(spread * torch.randn(shape[:-1], generator=generator))[..., None]
    )
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values[..., 0, :8] = ties
    values[..., 0, 8:16] = -ties
    values[..., 1, :16] = 0
    return values


def test_rounding_of_every_tie_and_neighbour():
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    below = {0.25: 0.0, 0.75: 0.5, 1.25: 1.0, 1.75: 1.5, 2.5: 2.0, 3.5: 3.0, 5.0: 4.0}
    above = {0.25: 0.5, 0.75: 1.0, 1.25: 1.5, 1.75: 2.0, 2.5: 3.0, 3.5: 4.0, 5.0: 6.0}
    points = torch.tensor(list(ties))
    up, down = torch.nextafter(points, torch.tensor(10.0)), torch.nextafter(points, torch.tensor(0.0))
    for sign in (1, -1):
        assert nvfp4.round_e2m1(sign * points).tolist() == [sign * value for value in ties.values()]
        assert nvfp4.round_e2m1(sign * up).tolist() == [sign * value for value in above.values()]
        assert nvfp4.round_e2m1(sign * down).tolist() == [sign * value for value in below.values()]
    assert nvfp4.round_e2m1(torch.tensor([7.0, 1e30, float("inf"), -float("inf")])).tolist() == [6, 6, 6, -6]
    assert nvfp4.round_e2m1(torch.tensor([float("nan")])).isnan().all()


def test_rounding_equals_b12x(b12x):
    values = torch.cat([torch.linspace(-8, 8, 100_001), torch.arange(-64, 65) / 8])
    assert torch.equal(bits(nvfp4.round_e2m1(values)), bits(b12x["_fp4_quantize_values"](values)))


def test_a_matrix_decoded_by_hand():
    # Codes 0…15 in order: low nibble first.
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.tensor([[0.75]]).to(E4M3)
    expected = [0.75 * 2 * sign * value for sign in (1, -1) for value in MAGNITUDES]
    assert nvfp4.dequantise(packed, scale, torch.tensor(2.0)).tolist() == [expected]


def test_dequantisation_equals_both_b12x_references(b12x):
    reference = pytest.importorskip("b12x.sequence.ple_embedding.reference")
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (40, 48), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(40, 6, generator=generator) * 448).to(E4M3)
    scale_2 = torch.tensor(0.0013)
    ours = nvfp4.dequantise(packed, scale, scale_2)
    values = b12x["_dequant_fp4"](packed, 40, 96, b12x["_make_fp4_lut"](packed.device))
    scaled = b12x["_apply_block_scales"](values, scale.float(), 40, 96, block_size=16) * scale_2
    assert torch.equal(bits(ours), bits(scaled))
    # The table lookup's reference writes +0 for code 8, hence values and not bits.
    assert torch.equal(ours, reference._dequantize_selected_nvfp4(packed, scale, scale_2, head_dim=96))


def test_packing_equals_b12x(b12x):
    weight = random_blocks((3, 32, 64), seed=4, spread=1.0)
    packed, scale, scale_2 = nvfp4.quantise(weight)
    for expert in range(3):
        effective = (scale[expert].float() / scale_2[expert].reciprocal()).clamp(min=1e-30).repeat_interleave(16, -1)
        values = b12x["_fp4_quantize_values"](weight[expert] / effective)
        values = torch.where(scale[expert].float().repeat_interleave(16, -1) == 0, 0.0, values)
        theirs = b12x["pack_grouped_fp4_values"](values[None])[..., 0]
        assert torch.equal(packed[expert], theirs)


@pytest.mark.parametrize("input_scale", [0.0021, 1.0, 0.5, 3.7e-4, 11.3])
def test_activation_quantisation_equals_b12x(b12x, input_scale):
    a = random_blocks((9, 5, 96), seed=5, spread=3.0).to(torch.bfloat16)
    s_in = torch.tensor(input_scale)
    ours = nvfp4.quantise_activation(a, s_in)
    assert ours.dtype == torch.float32 and ours.shape == a.shape
    inverse = float(s_in.reciprocal())
    for row, mine in zip(a.reshape(-1, 96), ours.reshape(-1, 96), strict=True):
        theirs = b12x["_quantize_vec_to_fp4_dequant"](row.float(), inverse, block_size=16, fp8_e4m3_max=448.0)
        assert torch.equal(bits(mine), bits(theirs * s_in))


def test_weight_quantisation_equals_b12x(b12x):
    weight = random_blocks((24, 96), seed=6, spread=0.7)
    packed, scale, scale_2 = nvfp4.quantise(weight)
    ours = nvfp4.dequantise(packed, scale, scale_2)
    inverse = float(scale_2.reciprocal())
    for row, mine in zip(weight, ours, strict=True):
        theirs = b12x["_quantize_vec_to_fp4_dequant"](row, inverse, block_size=16, fp8_e4m3_max=448.0)
        assert torch.equal(mine, theirs * scale_2)


def test_activation_quantisation_by_hand():
    # Block maximum 12 under input scale 1: block scale 2, so values are halved, rounded and doubled.
    a = torch.tensor([[12.0, 1.0, -3.0, 5.2, 7.0, 0.4] + [0.0] * 10 + [0.0] * 16])
    expected = [12.0, 1.0, -3.0, 6.0, 8.0, 0.0] + [0.0] * 26
    assert nvfp4.quantise_activation(a, torch.tensor(1.0)).tolist() == [expected]


def test_activation_scales_may_differ_by_row():
    a = random_blocks((6, 4, 32), seed=7, spread=1.0)
    scales = torch.rand(6, 4) + 0.1
    together = nvfp4.quantise_activation(a, scales)
    for i in range(6):
        for j in range(4):
            assert torch.equal(together[i, j], nvfp4.quantise_activation(a[i, j], scales[i, j]))


def test_decoding_and_quantising_activations_may_run_inside_a_round():
    a, s_in = random_blocks((4, 3, 32), seed=9), torch.rand(4, 3) + 0.1
    stored = nvfp4.quantise(random_blocks((2, 4, 32), seed=10))
    expected = nvfp4.quantise_activation(a, s_in), nvfp4.dequantise(*stored)
    with CapturableGuard() as guard:
        result = nvfp4.quantise_activation(a, s_in), nvfp4.dequantise(*stored)
        guard.allow(*result)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, expected, strict=True))


def test_large_activations_saturate_instead_of_overflowing():
    quantised = nvfp4.quantise_activation(torch.full((16,), 1e6), torch.tensor(1.0))
    assert quantised.tolist() == [448.0 * 6.0] * 16


def test_default_outer_scale():
    weight = torch.zeros(2, 4, 16)
    weight[1, 2, 3] = -26.88
    scale_2 = nvfp4.quantise(weight)[2]
    assert scale_2.tolist() == [1.0, pytest.approx(0.01)]
    assert nvfp4.dequantise(*nvfp4.quantise(weight))[1, 2, 3].item() == pytest.approx(-26.88, rel=1e-6)


def test_zeros_are_stored_as_code_zero():
    weight = torch.full((1, 32), -1e-6)
    weight[0, 16] = 6.0
    packed, scale, _ = nvfp4.quantise(weight)
    assert scale.float()[0, 0] == 0 and packed[0, :8].tolist() == [0] * 8
    assert packed[0, 8:].tolist() == [7] + [0] * 7


def test_quantisation_error_is_within_half_a_step():
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(64, 256, generator=generator)
    packed, scale, scale_2 = nvfp4.quantise(weight)
    effective = (scale.float() * scale_2).repeat_interleave(16, -1)
    # The widest gap between E2M1 values is 2 (from 4 to 6); E4M3 rounding may put the maximum 1/16 above 6.
    assert ((nvfp4.dequantise(packed, scale, scale_2) - weight).abs() <= 1.01 * effective).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 2), magnitude=st.floats(-30, 30))
def test_quantising_twice_changes_nothing(seed, spread, magnitude):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 6, 16, generator=generator) * torch.exp(spread * torch.randn(4, 6, 1, generator=generator))
    weight = (weight * 2.0**magnitude).reshape(1, 4, 96)
    packed, scale, scale_2 = nvfp4.quantise(weight)
    kept = scale.float() >= 3 * 2.0**-9  # the documented domain
    again, scale_again, _ = nvfp4.quantise(nvfp4.dequantise(packed, scale, scale_2), scale_2)
    assert torch.equal(scale_again.float()[kept], scale.float()[kept])
    assert torch.equal(again.unflatten(-1, (-1, 8))[kept], packed.unflatten(-1, (-1, 8))[kept])
    assert torch.equal(nvfp4.quantise(nvfp4.dequantise(packed, scale, scale_2))[0], again)


def test_every_code_and_scale_survives_requantisation():
    """All E4M3 scales of the documented domain, with every code in a block whose largest code is 6."""
    scales = torch.arange(0x03, 0x7F, dtype=torch.uint8).view(E4M3)
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]], dtype=torch.uint8)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).expand(len(scales), 8)
    scale_2 = torch.tensor(0.00317)
    again, scale_again, _ = nvfp4.quantise(nvfp4.dequantise(packed, scales[:, None], scale_2), scale_2)
    assert torch.equal(again, packed)
    assert torch.equal(scale_again.view(torch.uint8)[:, 0], scales.view(torch.uint8))


@pytest.mark.parametrize("amount", [1e-45, 1e-38, 3e38])
def test_extreme_weights_stay_finite(amount):
    weight = torch.full((1, 16), amount)
    decoded = nvfp4.dequantise(*nvfp4.quantise(weight))
    assert decoded.isfinite().all() and (decoded - weight).abs().max() <= amount


def test_refusals():
    good = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise(torch.zeros(2, 20))
    with pytest.raises(ValueError, match="NaN"):
        nvfp4.quantise(torch.full((2, 16), float("nan")))
    with pytest.raises(ValueError, match="one for each matrix"):
        nvfp4.quantise(good, torch.ones(2))
    with pytest.raises(ValueError, match="smallest normal"):
        nvfp4.quantise(good, torch.tensor(0.0))
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise_activation(torch.zeros(3, 8), torch.tensor(1.0))
    packed, scale, scale_2 = nvfp4.quantise(good)
    with pytest.raises(ValueError, match="uint8"):
        nvfp4.dequantise(packed.int(), scale, scale_2)
    with pytest.raises(ValueError, match="one scale per 16"):
        nvfp4.dequantise(packed, scale[:1], scale_2)
    with pytest.raises(ValueError, match="one per matrix"):
        nvfp4.dequantise(packed, scale, torch.ones(3))
