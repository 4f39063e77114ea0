"""Options of a request: what is refused, penalties and minimum length against a loop over Python numbers, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import fields
from options_oracle import plain_law, ranked_logprobs, shaped

from specdec.declaration import REQUEST_OPTIONS
from specdec.errors import UsageError
from specdec.sampling import logprobs as logprobs_module
from specdec.sampling.chain import chain_verify, sample
from specdec.sampling.law import LawParams, law
from specdec.sampling.options import EXTENDED_OPTIONS, options_in_use
from specdec.sampling.params import SamplingParams
from specdec.sampling.penalties import counts_before, forbid_stops, penalise
from specdec.serving.request import Request
from specdec.state.options import OptionTable
from specdec.state.requests import NO_STOP, RequestTable
from specdec.testing.guard import CapturableGuard

VOCAB = 12


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 100.5, -2.01, True, "1", None])
def test_penalties_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} is ") as raised:
        SamplingParams(**{name: value})
    assert "\n" not in str(raised.value) and " off" in str(raised.value)


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (5, "logit_bias is 5; it must be a mapping"),
        ("3:1", "logit_bias is '3:1'; it must be a mapping"),
        ([5], "logit_bias holds 5; it takes pairs"),
        ([(1, 2, 3)], "takes pairs"),
        ({-1: 0.5}, "names token -1; token ids are whole numbers from 0"),
        ({1.5: 0.5}, "names token 1.5"),
        ({True: 0.5}, "names token True"),
        ([(4, 1.0), (4, 2.0)], "names token 4 twice"),
        ({4: 100.5}, "of token 4 is 100.5; it must be a number from -100 to 100"),
        ({4: math.nan}, "of token 4 is nan"),
        ({4: None}, "of token 4 is None"),
    ],
)
def test_biases_that_are_none(bias: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        SamplingParams(logit_bias=bias)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens -1 must be between 0 and 8: the budget is max_new_tokens 8"),
        ({"min_new_tokens": 9}, "min_new_tokens 9 must be between 0 and 8"),
        ({"min_new_tokens": 2.0}, "min_new_tokens"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"logprobs": -1}, "logprobs -1 must be between 0 and 20"),
        ({"logprobs": 21}, "logprobs 21 must be between 0 and 20"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1 must be between 0 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs 21 must be between 0 and 20"),
        ({"output": (1,) * 8}, "output holds 8 tokens, but the budget is max_new_tokens 8"),
        ({"output": ("a",)}, "output holds 'a'"),
        ({"stop": None}, "stop is None; it must be a string or several"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"stop": ("a", "")}, "stop holds an empty string"),
        ({"stop": ("a", 3)}, "stop holds 3; it takes strings"),
        ({"stop": b"ab"}, "stop holds 97; it takes strings"),
        ({"stop": "a\udc80"}, "stop holds 'a.udc80', which is no text"),
        ({"stop": ["a"] * 17}, "stop holds 17 strings; at most 16 are supported"),
    ],
)
def test_request_options_out_of_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        Request(prompt=(1,), max_new_tokens=8, **changes)
    assert "\n" not in str(raised.value)


def test_limits_are_inclusive_and_biases_are_kept_by_token() -> None:
    for value in (-2, 2, 0.0):
        assert SamplingParams(presence_penalty=value, frequency_penalty=value).presence_penalty == value
    assert SamplingParams(repetition_penalty=0.01).shapes_logits
    pairs = SamplingParams(logit_bias={7: -100, 2: 1.5}).logit_bias
    assert pairs == ((2, 1.5), (7, -100))
    assert hash(SamplingParams(logit_bias=[[7, -100], [2, 1.5]])) == hash(SamplingParams(logit_bias=pairs))
    assert Request(prompt=(1,), max_new_tokens=8, min_new_tokens=8, logprobs=20).extended


def test_every_option_has_a_name_and_says_when_it_is_in_use() -> None:
    request_names = {"min_new_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "stop", "grammar"}
    assert {field.name for field in fields(SamplingParams)} | request_names == set(REQUEST_OPTIONS)
    assert set(EXTENDED_OPTIONS) < set(REQUEST_OPTIONS)
    assert dict(Request(prompt=(1,)).options_in_use) == {}
    off = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "top_k": 0}
    assert dict(options_in_use(SamplingParams(**off), min_new_tokens=0, ignore_eos=False, logprobs=None)) == {}
    on = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": ((3, 1.0),),
    }
    others = {"min_new_tokens": 4, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    assert dict(options_in_use(SamplingParams(**on), **others)) == {**on, **others}
    assert set(options_in_use(SamplingParams(greedy=True, top_k=3))) == {"greedy"}
    for name in EXTENDED_OPTIONS:
        values = {**on, "min_new_tokens": 2, "logprobs": 0}
        inner = {name: values[name]} if name in on else {}
        outer = {} if inner else {name: values[name]}
        assert Request(prompt=(1,), sampling=SamplingParams(**inner), **outer).extended, name
    plain = SamplingParams(temperature=2, top_k=4)
    assert not Request(prompt=(1,), sampling=plain, ignore_eos=True, prompt_logprobs=3).extended
    one, several = Request(prompt=(1,), stop="ab"), Request(prompt=(1,), stop=["ab"] + ["c"] * 15)
    assert one.stop == ("ab",) and several.stop[:2] == ("ab", "c")
    assert dict(one.options_in_use) == {"stop": ("ab",)} and not one.extended


# --- penalties and the minimum against the oracle ------------------------------------------------------------------


def random_case(seed: int, drafts: int, dtype: torch.dtype) -> dict[str, Any]:
    """Four requests with different options; lane 3 uses none."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    logits = (torch.randn(4, drafts + 1, VOCAB, generator=generator, dtype=torch.float64) * 3).to(dtype)
    logits[0, :, 3] = -math.inf
    logits[1, :, 4] = 0.0
    options: list[dict[str, Any]] = [
        {
            "presence_penalty": 1.25,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {2: 3.0, 5: -7.5},
        },
        {"frequency_penalty": -0.75, "repetition_penalty": 0.5},
        {"presence_penalty": -2.0, "logit_bias": {11: 100.0}},
        {},
    ]
    return {
        "logits": logits,
        "options": options,
        "prompts": [ids(3), ids(6), ids(1), ids(2)],
        "outputs": [ids(5), ids(2), ids(9), ids(1)],
        "drafts": torch.tensor([ids(drafts) for _ in range(4)], dtype=torch.int64).view(4, drafts),
        "minimum": [7, 0, 12, 0],
        "stops": [[1, 6], [2], [0, 11, 3], [4]],
    }


def table_of(case: dict[str, Any]) -> RequestTable:
    table = RequestTable(slots=4, stop_ids=4, device=torch.device("cpu"), extended=True, vocab_size=VOCAB)
    for slot in range(4):
        table.admit(
            slot,
            request=slot,
            epoch=1,
            consumed=9,
            budget=99,
            sampling=SamplingParams(**case["options"][slot]),
            stop_ids=tuple(case["stops"][slot]),
            prompt=case["prompts"][slot],
            output=case["outputs"][slot],
            min_new_tokens=case["minimum"][slot],
        )
    return table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", range(8))
def test_every_row_has_the_logits_of_plain_decoding(drafts: int, dtype: torch.dtype) -> None:
    for seed in range(6):
        case = random_case(seed, drafts, dtype)
        table = table_of(case)
        # lane 4 is dead, lanes in another order than slots
        order = torch.tensor([2, 0, 4, 3, 1])
        placed = [0 if slot == 4 else slot for slot in order.tolist()]
        found = table.shaped(table.lanes(order), case["logits"][placed], case["drafts"][placed])
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for lane, slot in enumerate(order.tolist()):
            if slot == 4:
                assert torch.equal(found[lane], case["logits"][0].to(found.dtype))
                continue
            for row in range(drafts + 1):
                output = case["outputs"][slot] + case["drafts"][slot, :row].tolist()
                expected = shaped(
                    case["logits"][slot, row].tolist(),
                    case["prompts"][slot],
                    output,
                    min_new_tokens=case["minimum"][slot],
                    stops=case["stops"][slot],
                    **case["options"][slot],
                )
                torch.testing.assert_close(
                    found[lane, row].to(torch.float64),
                    torch.tensor(expected, dtype=torch.float64),
                    rtol=1e-6,
                    atol=1e-5,
                )
        assert torch.equal(found[3], case["logits"][3].to(found.dtype)), "a lane without options keeps its logits"


def test_float64_is_exact_to_the_last_bits() -> None:
    case = random_case(3, 3, torch.float64)
    table = table_of(case)
    found = table.shaped(table.lanes(torch.tensor([0])), case["logits"][:1], case["drafts"][:1])
    options, stops = case["options"][0], case["stops"][0]
    for row in range(4):
        output = case["outputs"][0] + case["drafts"][0, :row].tolist()
        expected = shaped(
            case["logits"][0, row].tolist(), case["prompts"][0], output, min_new_tokens=7, stops=stops, **options
        )
        np.testing.assert_allclose(found[0, row].numpy(), expected, rtol=1e-15)


def test_drafts_outside_the_vocabulary_count_nowhere() -> None:
    counts = torch.zeros(1, 4, dtype=torch.int32)
    found = counts_before(counts, torch.tensor([[-1, 2, 4, 9, 2]]))
    assert found[0].tolist() == [[0] * 4, [0] * 4, *[[0, 0, 1, 0]] * 3, [0, 0, 2, 0]]
    assert counts.sum() == 0


@pytest.mark.parametrize("minimum", range(5))
def test_stop_ids_are_forbidden_row_by_row(minimum: int) -> None:
    """Two tokens are emitted: row j decides the third, fourth … token, which a stop may be from token minimum + 1 on."""
    stops = torch.tensor([[1, NO_STOP, 3, 99]])
    found = forbid_stops(torch.zeros(1, 4, 5), stops=stops, emitted=torch.tensor([2]), minimum=torch.tensor([minimum]))
    for row in range(4):
        banned = [token for token in range(5) if found[0, row, token] == -math.inf]
        assert banned == ([1, 3] if 2 + row < minimum else [])


def test_nan_and_infinite_logits_stay_visible() -> None:
    """Whatever the options do to such a row, its law is not a law."""
    bad = torch.zeros(3, 1, 5)
    bad[0, 0, 1], bad[1, 0, 2], bad[2, 0, 1] = math.nan, math.inf, math.inf
    zeros = torch.zeros(3)
    rows = penalise(
        bad,
        prompt=torch.ones(3, 5, dtype=torch.bool),
        counts=torch.ones(3, 1, 5, dtype=torch.int32),
        presence=zeros + 1,
        frequency=zeros + 1,
        repetition=zeros + 2,
        bias=torch.full((3, 5), -100.0),
    )
    one = torch.tensor([9, 9, 9])
    rows = forbid_stops(rows, stops=torch.tensor([[1]]).repeat(3, 1), emitted=one * 0, minimum=one)
    params = LawParams.of([SamplingParams(), SamplingParams(greedy=True), SamplingParams(min_p=0.5)])
    assert law(rows, params).isnan().all()


# --- counting --------------------------------------------------------------------------------------------------------


def test_counts_grow_by_emitted_tokens_only_and_neutral_slots_come_back_neutral() -> None:
    table = OptionTable(slots=3, vocab_size=5, device=torch.device("cpu"))
    table.admit(0, SamplingParams(frequency_penalty=1.0, logit_bias={1: 2.0}), [0, 0, 3], [])
    table.admit(2, SamplingParams(presence_penalty=1.0), [4], [1, 1])
    assert table.prompt[[0, 2]].tolist() == [[True, False, False, True, False], [False] * 4 + [True]]
    assert table.counts[[0, 2]].tolist() == [[0] * 5, [0, 2, 0, 0, 0]]
    slots = torch.tensor([2, 0, 3, 3])
    tokens = torch.tensor([[1, 1, 2, 0], [4, 3, 2, 1], [2, 2, 2, 2], [-1, -1, -1, -1]])
    table.commit(slots, tokens, torch.tensor([3, 1, 0, 0]))
    assert table.counts.tolist() == [[0, 0, 0, 0, 1], [0] * 5, [0, 4, 1, 0, 0], [0] * 5]
    table.commit(slots[:1], torch.tensor([[-1]]), torch.tensor([0]))
    assert table.counts[2].tolist() == [0, 4, 1, 0, 0]
    table.admit(2, SamplingParams(), [1, 2], [])
    table.retire(0)
    fresh = OptionTable(slots=3, vocab_size=5, device=torch.device("cpu"))
    for name in ("prompt", "counts", "bias", "factors"):
        assert torch.equal(getattr(table, name), getattr(fresh, name)), name
    assert table.nbytes == 4 * (9 * 5 + 12)


def test_a_table_without_options_refuses_them() -> None:
    table = RequestTable(slots=1, stop_ids=1, device=torch.device("cpu"))
    common: dict[str, Any] = {"request": 0, "epoch": 0, "consumed": 1, "budget": 9, "stop_ids": ()}
    table.admit(0, sampling=SamplingParams(top_k=3), **common)
    for options in (
        {"sampling": SamplingParams(logit_bias={0: 1})},
        {"sampling": SamplingParams(), "min_new_tokens": 1},
    ):
        with pytest.raises(ValueError, match="extended=True"):
            table.admit(0, **options, **common)


# --- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_against_the_oracle(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 4, VOCAB, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[1, 2, 5] = -math.inf
    logits[2, 1, 3:7] = 6.0  # equal logits rank by id
    tokens = torch.randint(0, VOCAB, (3, 4), generator=generator)
    tokens[0, 3] = -1
    found = logprobs_module.ranked_logprobs(logits, tokens, 5)
    assert found.chosen.dtype == found.values.dtype == torch.float32
    for lane in range(3):
        for row in range(4):
            token = max(int(tokens[lane, row]), 0)
            chosen, top = ranked_logprobs(logits[lane, row].tolist(), token, 5)
            assert found.tokens[lane, row].tolist() == [t for t, _ in top]
            np.testing.assert_allclose(found.values[lane, row].numpy(), [v for _, v in top], rtol=2e-6, atol=2e-6)
            np.testing.assert_allclose(found.chosen[lane, row].item(), chosen, rtol=2e-6, atol=2e-6)


def test_logprob_frames_alternate_and_leave_other_slots_alone() -> None:
    frames = logprobs_module.LogprobFrames(slots=2, width=3, vocab_size=6, device=torch.device("cpu"))
    assert frames.count == 6, "a small vocabulary has no twenty tokens"
    assert frames.nbytes == 6 * 3 * (4 + 6 * (4 + 8))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 2, 8, generator=generator)  # two ids are padding
    logits[..., 6:] = 50.0
    tokens = torch.tensor([[1, 2], [3, 4]])
    frames.write(torch.tensor([3 + 1, 3 + 0]), logits, tokens)
    (one,) = frames.read(1, [1])
    for column, row, token in zip(one, logits[0], tokens[0].tolist(), strict=False):
        chosen, top = ranked_logprobs(row[:6].tolist(), token, 6)
        assert column[0] == pytest.approx(chosen, abs=1e-6)
        assert [t for t, _ in column[1]] == [t for t, _ in top]
    assert all(column == (0.0, [(0, 0.0)] * 6) for column in frames.read(0, [1])[0])
    assert frames.read(1, [0])[0][0][0] == pytest.approx(ranked_logprobs(logits[1, 0, :6].tolist(), 3, 6)[0], abs=1e-6)


# --- what the chain makes of masks ---------------------------------------------------------------------------------


def test_no_uniform_emits_a_token_of_probability_zero() -> None:
    """Masked rows with uniforms at both ends of (0, 1] and beside every step of the cumulative law."""
    generator = torch.Generator().manual_seed(4)
    lowest, below_one = 2.0**-33, 1.0 - 2.0**-24
    for drafts in range(4):
        logits = torch.randn(64, drafts + 1, VOCAB, generator=generator)
        mask = torch.rand(64, drafts + 1, VOCAB, generator=generator) < 0.7
        mask[..., 5] = False
        logits = logits.masked_fill(mask, -math.inf)
        requests = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(min_p=0.3), SamplingParams(top_p=0.5)]
        probs = law(logits, LawParams.of([requests[lane % 4] for lane in range(64)]))
        assert (probs[mask] == 0).all()
        draft_logits = torch.randn(64, drafts, VOCAB, generator=generator)
        draft_probs = draft_logits.softmax(-1)
        tokens = torch.randint(0, VOCAB, (64, drafts), generator=generator)
        steps = probs[:, 0].cumsum(-1)
        edges = torch.stack(
            [torch.nextafter(steps, torch.zeros(())), steps, torch.nextafter(steps, torch.ones(()) * 2)]
        )
        values = [torch.full((64,), v) for v in (1.0, below_one, lowest, 0.5)]
        values += list(edges.clamp(lowest, 1.0).permute(0, 2, 1).reshape(-1, 64))
        for u in values:
            outcome = chain_verify(tokens, draft_probs, probs, u.unsqueeze(1).repeat(1, drafts + 2))
            for lane in range(64):
                for row in range(int(outcome.accepted[lane]) + 1):
                    token = int(outcome.tokens[lane, row])
                    # -1 is an empty residual: the draft law covers the target's, and no token is emitted
                    assert token >= 0 or bool(outcome.empty[lane])
                    assert token < 0 or probs[lane, row, token] > 0
            drawn = sample(probs[:, 0], u)
            assert (probs[:, 0].gather(1, drawn.unsqueeze(1)) > 0).all()


def test_a_filter_that_biases_decide_follows_the_filtered_law() -> None:
    """The law of shaped logits is the law of the oracle's shaped logits, filters included."""
    case = random_case(11, 3, torch.float32)
    table = table_of(case)
    filters = {"temperature": 0.8, "min_p": 0.02, "top_k": 6, "top_p": 0.9}
    rows = table.shaped(table.lanes(torch.tensor([0, 1])), case["logits"][:2], case["drafts"][:2])
    found = law(rows, LawParams.of([SamplingParams(**filters)] * 2))
    for lane in range(2):
        for row in range(4):
            output = case["outputs"][lane] + case["drafts"][lane, :row].tolist()
            logits = shaped(
                case["logits"][lane, row].tolist(),
                case["prompts"][lane],
                output,
                min_new_tokens=case["minimum"][lane],
                stops=case["stops"][lane],
                **case["options"][lane],
            )
            np.testing.assert_allclose(found[lane, row].numpy(), plain_law(logits, **filters), atol=3e-6)


# --- captured -------------------------------------------------------------------------------------------------------


def test_everything_a_round_runs_is_capturable() -> None:
    case = random_case(0, 5, torch.float32)
    table = table_of(case)
    frames = logprobs_module.LogprobFrames(slots=4, width=8, vocab_size=VOCAB, device=torch.device("cpu"))
    slots, emitted = torch.tensor([0, 1, 2, 3]), torch.tensor([6, 1, 0, 3])
    tokens = torch.cat([case["drafts"], torch.full((4, 1), -1)], dim=1)
    assert table.options is not None
    with torch.inference_mode(), CapturableGuard() as guard:
        lanes = table.lanes(slots)
        table.shaped(lanes, case["logits"], case["drafts"])
        table.options.commit(lanes.slots, tokens, emitted)
        frames.write(lanes.requested, case["logits"], tokens)
        guard.allow(lanes)
