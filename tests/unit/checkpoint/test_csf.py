"""CSF scale coding: against a decoder written byte by byte, hand-built streams, and what damaged streams are told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.checkpoint import Checkpoint, csf, nvfp4
from specdec.checkpoint.matrices import load_experts, load_matrix, storage_of
from specdec.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
FIXED, EXCEPTIONS = "weight_scale.nvfp4_csf_fixed", "weight_scale.nvfp4_csf_exceptions"


def words(*values):
    return torch.tensor(values, dtype=torch.int64).to(torch.uint32)


def decoded_by_hand(fixed, exceptions):
    """The bytes of every row, from the description of the format alone."""
    rows = []
    for slab in fixed.tolist():
        bases, stream = slab[:16], slab[16:]
        length = len(stream) // 16
        for row, base in enumerate(bases):
            pairs = stream[row * length : (row + 1) * length]
            rows.append([base + nibble for pair in pairs for nibble in (pair % 16, pair // 16)])
    columns = len(rows[0])
    for word in exceptions.tolist():
        position, byte = word % 2**24, word // 2**24
        rows[position // columns][position % columns] = byte
    return rows


def as_bytes(scale):
    return scale.view(torch.uint8).tolist()


@st.composite
def scales(draw):
    """Bytes around a centre of each row, some of them anywhere."""
    slabs, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread, strays = draw(st.sampled_from([1, 5, 16, 40, 256])), draw(st.sampled_from([0.0, 0.05, 0.5]))
    shape = 16 * slabs, 2 * pairs
    centre = torch.randint(0, 256, (shape[0], 1), generator=generator)
    near = (centre + torch.randint(0, spread, shape, generator=generator)).clamp(max=255)
    anywhere = torch.randint(0, 256, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < strays, anywhere, near).to(torch.uint8)


@settings(max_examples=200, deadline=None)
@given(scales())
def test_round_trip_is_bit_exact(stored):
    fixed, exceptions = csf.encode(stored.view(E4M3))
    assert fixed.shape == (stored.shape[0] // 16, 16 * (1 + stored.shape[1] // 2)) and fixed.dtype == torch.uint8
    assert exceptions.dtype == torch.uint32
    assert decoded_by_hand(fixed, exceptions) == stored.tolist()
    assert as_bytes(csf.decode(fixed, exceptions)) == stored.tolist()


@settings(max_examples=100, deadline=None)
@given(scales())
def test_the_base_is_the_lowest_start_that_covers_most(stored):
    fixed, exceptions = csf.encode(stored.view(E4M3))
    uncovered = 0
    for row, values in enumerate(stored.tolist()):
        covered = [sum(start <= value < start + 16 for value in values) for start in range(241)]
        assert int(fixed[row // 16, row % 16]) == covered.index(max(covered))
        uncovered += len(values) - max(covered)
    assert exceptions.numel() == uncovered


def test_a_hand_built_stream():
    # Row r has base r, and offsets 1, 2 in its first byte, 15, 0 in its second.
    slab = list(range(16)) + [0x21, 0x0F] * 16
    fixed = torch.tensor([slab], dtype=torch.uint8)
    rows = [[base + 1, base + 2, base + 15, base] for base in range(16)]
    assert as_bytes(csf.decode(fixed, words())) == rows
    # Row 0 column 3 becomes 0x7E; row 15 column 0 becomes 0xFF, whose word needs all 32 bits.
    rows[0][3], rows[15][0] = 0x7E, 0xFF
    assert as_bytes(csf.decode(fixed, words(0x7E000003, 0xFF00003C))) == rows


def test_every_byte_of_the_type_survives():
    stored = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    fixed, exceptions = csf.encode(stored.view(E4M3))
    assert exceptions.numel() == 16 * 240 and set(fixed[0, :16].tolist()) == {0}
    assert as_bytes(csf.decode(fixed, exceptions)) == stored.tolist()


def test_the_highest_base_reaches_the_highest_byte():
    stored = torch.full((16, 2), 255, dtype=torch.uint8)
    fixed, exceptions = csf.encode(stored.view(E4M3))
    assert exceptions.numel() == 0 and set(fixed[0, :16].tolist()) == {240} and set(fixed[0, 16:].tolist()) == {0xFF}
    assert as_bytes(csf.decode(fixed, exceptions)) == stored.tolist()


def test_coding_changes_no_input():
    stored = torch.arange(64, dtype=torch.uint8).reshape(16, 4)
    fixed, exceptions = csf.encode(stored.view(E4M3))
    before = fixed.clone(), exceptions.clone()
    csf.decode(fixed, exceptions).view(torch.uint8).zero_()
    assert torch.equal(fixed, before[0]) and exceptions.tolist() == before[1].tolist()
    assert torch.equal(stored, torch.arange(64, dtype=torch.uint8).reshape(16, 4))


def fixed_of(rows=16, columns=4, base=7):
    stream = torch.zeros(rows // 16, 16 * (1 + columns // 2), dtype=torch.uint8)
    stream[:, :16] = base
    return stream


@pytest.mark.parametrize(
    ("fixed", "exceptions", "said"),
    [
        (fixed_of().to(torch.int32), words(), "needs uint8 and uint32"),
        (fixed_of(), torch.zeros(0, dtype=torch.int32), "needs uint8 and uint32"),
        (fixed_of().flatten(), words(), r"shapes \[48\] and \[0\]"),
        (fixed_of()[:, :40], words(), r"\[1, 40\]"),
        (fixed_of()[:, :16], words(), r"\[1, 16\]"),
        (fixed_of()[:0], words(), r"\[0, 48\]"),
        (fixed_of(), words(3).reshape(1, 1), r"\[1, 1\]"),
        (fixed_of(base=241), words(), "base 241 is above 240"),
        (fixed_of(), words(0x0100_0004, 0x0100_0003), "increasing order"),
        (fixed_of(), words(0x0100_0003, 0x0200_0003), "increasing order"),
        (fixed_of(), words(0x0100_0040), "position 64 of 64 scales"),
        (fixed_of(), words(0x0100_0000, 0xFFFF_FFFF), "position 16777215 of 64 scales"),
    ],
)
def test_damaged_streams_are_refused(fixed, exceptions, said):
    with pytest.raises(ValueError, match=said) as caught:
        csf.decode(fixed, exceptions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(15, 4), (16, 3), (8, 2), (0, 4), (1 << 13, 1 << 12)])
def test_sizes_without_a_coding_are_refused(shape):
    with pytest.raises(ValueError, match=r"R a multiple of 16, C even"):
        csf.encode(torch.zeros(shape, dtype=torch.uint8).view(E4M3))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        csf.encode(torch.zeros(shape))


def coded_weight(rows=16, columns=64, seed=0):
    """Stored tensors of one weight with coded scales, its plain scales, and its value."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight *= torch.logspace(0, -3, rows).unsqueeze(1)  # some exceptions, and rows with bases of their own
    packed, scale, scale_2 = nvfp4.quantise(weight)
    fixed, exceptions = csf.encode(scale)
    held = {"weight": packed, FIXED: fixed, EXCEPTIONS: exceptions, "weight_scale_2": scale_2}
    return held, scale, nvfp4.dequantise(packed, scale, scale_2)


def under(prefix, held):
    return {f"{prefix}.{name}": tensor for name, tensor in held.items()}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_weight_with_coded_scales_loads_as_the_plain_one(make_checkpoint, shape):
    held, _, value = coded_weight()
    held["weight_scale_2"] = held["weight_scale_2"].reshape(shape)
    with Checkpoint.open(make_checkpoint(under("w", held))) as checkpoint:
        assert checkpoint.stored(f"w.{EXCEPTIONS}").dtype == "uint32"
        assert checkpoint.spec(f"w.{EXCEPTIONS}").dtype == "uint32"
        assert storage_of(checkpoint, "w.weight") == "nvfp4"
        assert torch.equal(load_matrix(checkpoint, "w.weight", torch.float32), value)


def test_experts_with_coded_scales_stay_packed_whatever_the_form_of_their_scalars(make_checkpoint):
    stored, plain = {}, {}
    for expert in range(3):
        for projection, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
            held, scale, value = coded_weight(*shape, seed=7 * expert + len(projection))
            held["input_scale"] = torch.tensor(0.01 * (expert + 1))
            if expert == 1:  # exporters differ, sometimes within one file
                held |= {name: held[name].reshape(1) for name in ("weight_scale_2", "input_scale")}
            if expert == 2:  # plain beside coded
                del held[FIXED], held[EXCEPTIONS]
                held["weight_scale"] = scale
            stored |= under(f"mlp.experts.{expert}.{projection}", held)
            plain[projection, expert] = scale, value
    with Checkpoint.open(make_checkpoint(stored)) as checkpoint:
        experts = load_experts(checkpoint, "mlp.experts", 3)
    assert experts.storage == "nvfp4"
    for projection in ("gate_proj", "up_proj", "down_proj"):
        loaded = experts[projection]
        assert loaded.scale.dtype == E4M3 and loaded.scale_2.shape == loaded.input_scale.shape == (3,)
        for expert in range(3):
            scale, value = plain[projection, expert]
            assert as_bytes(loaded.scale[expert]) == as_bytes(scale)
            assert torch.equal(loaded.dense(torch.float32)[expert], value)


def test_a_scalar_that_is_none_is_named(make_checkpoint):
    held, *_ = coded_weight()
    held["input_scale"] = torch.ones(2)
    path = make_checkpoint(under("mlp.experts.0.up_proj", held))
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match=r"input_scale: expected float32 \[\]"),
    ):
        load_experts(checkpoint, "mlp.experts", 1, projections=("up_proj",))


def test_damaged_streams_name_file_and_tensor(make_checkpoint):
    held, *_ = coded_weight()
    held[FIXED] = held[FIXED].clone()
    held[FIXED][0, 3] = 250
    with Checkpoint.open(make_checkpoint(under("w", held))) as checkpoint, pytest.raises(CheckpointError) as caught:
        load_matrix(checkpoint, "w.weight", torch.float32)
    message = str(caught.value)
    assert "model.safetensors: tensor w.weight_scale: damaged streams: CSF base 250 is above 240" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "change",
    [
        {FIXED: None},
        {EXCEPTIONS: None},
        {"weight_scale_2": None},
        {"weight_scale": torch.ones(16, 4).to(E4M3)},
        {FIXED: torch.zeros(1, 32, dtype=torch.uint8)},
        {EXCEPTIONS: torch.zeros(0, dtype=torch.int32)},
        {EXCEPTIONS: torch.zeros(1, 1, dtype=torch.int32).view(torch.uint32)},
        {"weight_scale_2": torch.ones(2)},
        {"weight": torch.zeros(16, 24, dtype=torch.uint8)},
    ],
)
def test_streams_that_do_not_fit_their_weight_are_no_known_storage(make_checkpoint, change):
    held = {name: tensor for name, tensor in (coded_weight()[0] | change).items() if tensor is not None}
    with Checkpoint.open(make_checkpoint(under("w", held))) as checkpoint, pytest.raises(CheckpointError) as caught:
        load_matrix(checkpoint, "w.weight", torch.float32)
    message = str(caught.value)
    assert "tensor w.weight: no known storage" in message and "\n" not in message
    assert all(f"w.{name}" in message for name in held)
