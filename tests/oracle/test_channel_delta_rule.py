"""Delta rule with channel decays: rows and chunks against b12x's recurrences, form against form, extremes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from double_oracle import KeepDouble
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.ops.channel_delta_rule import channel_delta_rule_chunks, channel_delta_rule_rows

# heads, key width, value width
SMALL, FULL = (3, 16, 8), (4, 128, 128)
# −g of the gate: sigmoid times five. Its smallest, ordinary and largest values.
GATES = {"hardly forgets": -12.0, "ordinary": 0.0, "at the bound": 12.0}


def recurrence(rows: int, seed: int, dtype: torch.dtype, *, batch: int = 2, sizes=SMALL, gate: float = 0.0):
    """State and operands of ``rows`` steps; gate: mean of the gate's logits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, dim, width = sizes
    q, k = F.normalize(normal(batch, rows, heads, dim), dim=-1), F.normalize(normal(batch, rows, heads, dim), dim=-1)
    operands = (
        normal(batch, heads, dim, width),
        q * dim**-0.5,
        k,
        normal(batch, rows, heads, width),
        -5 * torch.sigmoid(gate + 2 * normal(batch, rows, heads, dim)),
        torch.sigmoid(normal(batch, rows, heads)),
    )
    return tuple(operand.to(dtype) for operand in operands)


def close(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference; NaN and infinity are never close."""
    assert torch.isfinite(found).all()
    return (found - wanted).abs().max().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("gate", GATES.values(), ids=list(GATES))
def test_both_forms_equal_the_recurrence_of_b12x(gate, dtype, tolerance):
    reference = pytest.importorskip("b12x.sequence.kda_prefill.reference")
    rows, heads, dim = 70, FULL[0], FULL[1]
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, raw = (normal(rows, heads, dim) for _ in range(4))
    raw, beta, rate, bias = raw + gate, normal(rows, heads), normal(heads) * 0.3, normal(heads, dim)
    state = normal(heads, dim, dim)
    with KeepDouble(torch.bfloat16):  # nothing the reference does is rounded
        wide = [x.double() for x in (q, k, v, raw, beta, rate, bias)]
        expected, last, middle = reference.recurrent_kda(
            *wide, lower_bound=-5.0, initial_state=state.double().transpose(-1, -2), checkpoint_offset=7
        )
    operands = (
        state.unsqueeze(0),
        (q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5).unsqueeze(0),
        (k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)).unsqueeze(0),
        v.unsqueeze(0),
        -5 * torch.sigmoid(rate.exp().unsqueeze(-1) * (raw + bias)).unsqueeze(0),
        torch.sigmoid(beta).unsqueeze(0),
    )
    out, states = channel_delta_rule_rows(*operands)
    assert close(out[0].double(), expected.double()) <= tolerance
    assert close(states[0, -1].double(), last.transpose(-1, -2)) <= tolerance * 10
    assert close(states[0, 6].double(), middle.transpose(-1, -2)) <= tolerance * 10
    out, found = channel_delta_rule_chunks(*operands)
    assert close(out[0].double(), expected.double()) <= tolerance
    assert close(found[0].double(), last.transpose(-1, -2)) <= tolerance * 10


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_equal_rows_whatever_the_length_and_the_cut(data):
    rows = data.draw(st.integers(1, 70), label="rows")
    gate = data.draw(st.sampled_from(list(GATES.values())), label="gate")
    chunk = data.draw(st.sampled_from([1, 3, 16, 64]), label="chunk")
    cut = data.draw(st.integers(0, rows), label="cut")
    operands = recurrence(rows, rows, torch.float64, gate=gate)
    kept = [operand.clone() for operand in operands]
    expected, states = channel_delta_rule_rows(*operands)
    state, outputs = operands[0], []
    for piece in (slice(0, cut), slice(cut, rows)):
        if piece.start < piece.stop:
            out, state = channel_delta_rule_chunks(state, *(x[:, piece] for x in operands[1:]), chunk=chunk)
            outputs.append(out)
    assert close(torch.cat(outputs, dim=1), expected) <= 1e-12
    assert close(state, states[:, -1]) <= 1e-12
    assert all(torch.equal(before, after) for before, after in zip(kept, operands, strict=True))


def test_prompts_longer_than_what_is_computed_at_once():
    operands = recurrence(600, 9, torch.float64)
    expected, states = channel_delta_rule_rows(*operands)
    out, last = channel_delta_rule_chunks(*operands)
    assert close(out, expected) <= 1e-12
    assert close(last, states[:, -1]) <= 1e-12


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("decay", [-5.0, -4.999, 0.0], ids=["bound", "near the bound", "no decay"])
def test_sixty_four_rows_at_one_decay_stay_finite_in_float32(decay, chunk):
    """exp(−G_j) alone would be exp(320): infinite. Half the channels keep everything beside the other half's decay."""
    state, q, k, v, log_decay, beta = recurrence(64, 1, torch.float32)
    log_decay = torch.full_like(log_decay, decay)
    log_decay[..., ::2] = 0
    expected, states = channel_delta_rule_rows(state, q, k, v, log_decay, beta)
    out, last = channel_delta_rule_chunks(state, q, k, v, log_decay, beta, chunk=chunk)
    assert close(out, expected) <= 5e-6
    assert close(last, states[:, -1]) <= 5e-6


@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_does_not_depend_on_the_rows_behind_it(batch, sizes):
    """Bit equality across widths, which is what lets a rejected width leave no trace."""
    state, *rows = recurrence(8, 2, torch.float32, batch=batch, sizes=sizes)
    out, states = channel_delta_rule_rows(state, *rows)
    for width in range(1, 8):
        narrow_out, narrow_states = channel_delta_rule_rows(state, *(operand[:, :width] for operand in rows))
        assert torch.equal(narrow_out, out[:, :width])
        assert torch.equal(narrow_states, states[:, :width])
        # and continuing from a kept column gives the remaining rows
        rest_out, rest_states = channel_delta_rule_rows(states[:, width - 1], *(operand[:, width:] for operand in rows))
        assert torch.equal(rest_out, out[:, width:])
        assert torch.equal(rest_states, states[:, width:])


@pytest.mark.parametrize("sizes", [SMALL, FULL], ids=["small", "full"])
def test_a_lane_does_not_depend_on_its_neighbours(sizes):
    state, *rows = recurrence(4, 3, torch.float32, batch=4, sizes=sizes)
    out, states = channel_delta_rule_rows(state, *rows)
    for lane in range(4):
        one = slice(lane, lane + 1)
        alone_out, alone_states = channel_delta_rule_rows(state[one], *(operand[one] for operand in rows))
        assert torch.equal(alone_out, out[one])
        assert torch.equal(alone_states, states[one])
