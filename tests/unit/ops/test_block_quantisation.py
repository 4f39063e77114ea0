"""Block quantisation against values worked out by hand and against exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from specdec.ops.block_quantisation import fp4_e4m3, fp4_ue8m0, fp8_ue8m0, power_of_two_scale, round_e4m3
from specdec.testing.guard import CapturableGuard

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = sorted({Fraction(m) * Fraction(2) ** (e - 3) for e in range(-6, 9) for m in range(16)})[:127]
FORMATS = [(fp8_ue8m0, E4M3, 32), (fp4_ue8m0, E2M1, 32), (fp4_e4m3, E2M1, 16)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def nearest(value, grid):
    """The nearest value of a grid of magnitudes, ties to the even place, beyond its end the last."""
    best = min(range(len(grid)), key=lambda code: (abs(grid[code] - abs(value)), code % 2))
    return grid[best] if value >= 0 else -grid[best]


def expected(values, function):
    """One block by the definition, in rational numbers."""
    largest = max(abs(Fraction(value)) for value in values)
    if function is fp4_e4m3:
        scale = nearest(max(largest, 6 * Fraction(1, 2**9)) / 6, E4M3)
    else:
        top, least = (448, Fraction(1e-4)) if function is fp8_ue8m0 else (6, 6 * Fraction(2) ** -126)
        scale, largest = Fraction(1), max(largest, least)
        while largest > top * scale:
            scale *= 2
        while largest <= top * scale / 2:
            scale /= 2
    grid = E4M3 if function is fp8_ue8m0 else E2M1
    return [float(nearest(Fraction(value) / scale, grid) * scale) for value in values]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_worked_out_by_hand(dtype):
    x = 0.1 * (torch.arange(32, dtype=torch.float64) - 16) + 0.013
    x = x.to(dtype)
    eight = fp8_ue8m0(x).tolist()
    assert eight[:6] == [-1.625, -1.5, -1.375, -1.25, -1.125, -1.125] and eight[-3:] == [1.375, 1.375, 1.5]
    for function in (fp4_ue8m0, fp4_e4m3):
        four = function(x).tolist()
        assert four[:8] == [-1.5] * 4 + [-1.0] * 4 and four[-3:] == [1.5] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "grid", "size"), FORMATS)
def test_every_value_is_the_nearest_one_of_its_block(function, grid, size, dtype):
    generator = torch.Generator().manual_seed(5)
    spread = torch.exp(3 * torch.randn(60, 1, generator=generator, dtype=torch.float64))
    values = (torch.randn(60, size, generator=generator, dtype=torch.float64) * spread).to(dtype)
    values[0], values[1, 1:], values[2] = 0, 0, values[2] * 1e-6
    # largest values at which a power-of-two scale changes, ties of the grids, and the ends of the formats
    values[3, 0], values[4, 0], values[5, 0] = 448, 448.5 if dtype != torch.bfloat16 else 450, 6
    values[6] = 0
    values[6, :8] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    values[7] = -values[6]
    found = function(values.reshape(6, 10 * size)).reshape(60, size)
    assert found.dtype == dtype
    for row, wanted in zip(found.double().tolist(), values.double().tolist(), strict=True):
        assert row == expected(wanted, function)


@pytest.mark.parametrize(("function", "grid", "size"), FORMATS)
def test_bfloat16_holds_every_result(function, grid, size):
    generator = torch.Generator().manual_seed(6)
    found = function(torch.randn(100, size, generator=generator) * 50)
    assert torch.equal(found.bfloat16().float(), found)


@pytest.mark.parametrize(("function", "grid", "size"), FORMATS)
def test_quantising_twice_changes_nothing(function, grid, size):
    generator = torch.Generator().manual_seed(7)
    once = function(torch.randn(500, size, generator=generator))
    # scales that are no powers of two may round differently the second time
    assert torch.equal(function(once), once) or function is fp4_e4m3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_scale_is_exact_at_every_power(dtype):
    for limit in (448.0, 6.0):
        for exponent in range(-100, 100):
            at = torch.tensor(limit * 2.0**exponent, dtype=dtype)
            beyond = torch.nextafter(at, at * 2)
            assert power_of_two_scale(torch.stack((at, beyond)), limit).tolist() == [
                2.0**exponent,
                2.0 ** (exponent + 1),
            ]


def test_float64_is_rounded_once():
    # through float32 this would become the tie 1.0625, and then 1.0
    value = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert round_e4m3(value).item() == 1.125
    assert round_e4m3(torch.tensor([1.0625, 2.0**-10, 3 * 2.0**-10, 448.0], dtype=torch.float64)).tolist() == [
        1.0, 0.0, 2.0**-8, 448.0,
    ]  # fmt: skip


@pytest.mark.parametrize(("function", "grid", "size"), FORMATS)
def test_a_round_may_hold_it_and_a_wrong_width_is_refused(function, grid, size):
    values = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(1))
    kept = values.clone()
    with CapturableGuard() as guard:
        guard.allow(function(values))
    assert torch.equal(values, kept)
    with pytest.raises(ValueError, match=f"multiple of {size}"):
        function(values[:, : size + 1])


@pytest.mark.parametrize(("function", "grid", "size"), FORMATS)
def test_nan_stays_where_it_is(function, grid, size):
    values = torch.ones(2, size)
    values[0, 3] = math.nan
    found = function(values)
    assert found[0, 3].isnan() and torch.equal(found[1], function(torch.ones(size)))
