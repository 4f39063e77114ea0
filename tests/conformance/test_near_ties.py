"""Lower precision than float64 in the conformance suite: what counts as the same text and state, and that nothing else does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from lower_precision import RoundedQwen, rounded
from mutants import Mutant, caught
from qwen_mutants import MUTANTS

from specdec.errors import CaptureError
from specdec.testing.conformance import Bench, Conformance, RoundConformance
from specdec.testing.conformance.near_ties import PlainText, follows
from specdec.testing.conformance.precision import PRECISIONS
from specdec.testing.conformance.prompts import lively_prompts

#: Token 2 by a quarter over token 0; token 1 by one over token 3.
PLAIN = PlainText((2, 1, 3), torch.tensor([[1.0, 0.0, 1.25, 0.5], [0.0, 3.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]]))


def test_equal_tokens_follow_to_their_end(caplog: pytest.LogCaptureFixture) -> None:
    for count in range(4):
        assert follows(list(PLAIN)[:count], PLAIN, 0.0)
    assert not caplog.records
    with pytest.raises(AssertionError, match="behind plain decoding"):
        follows([2, 1, 3, 0], PLAIN, 10.0)


def test_a_near_tie_is_logged_and_ends_the_comparison(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specdec.testing.conformance"):
        assert not follows([0, 3, 3, 3, 3], PLAIN, 0.3)
    (record,) = caplog.records
    assert record.getMessage() == "near tie at token 0: 0 for 2, worse by 0.25 of 0.3"


@pytest.mark.parametrize(
    ("found", "bound", "message"),
    [
        ([0], 0.25, "token 0 is 0 and not 2 .* worse by 0.25"),
        ([0], 0.0, "near ties are below 0"),
        ([3], 0.3, "token 0 is 3"),
        ([2, 3], 0.3, "token 1 is 3 and not 1 .* worse by 1 "),
    ],
)
def test_any_other_difference_fails(found: list[int], bound: float, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        follows(found, PLAIN, bound)


def test_equal_logits_are_no_near_tie_in_float64() -> None:
    """The lowest id among equals is a rule, not rounding."""
    tied = PlainText((1,), torch.tensor([[0.0, 1.0, 1.0]]))
    with pytest.raises(AssertionError, match="token 0 is 2"):
        follows([2], tied, 0.0)


def test_slices_keep_the_rows() -> None:
    assert list(PLAIN[1:]) == [1, 3] and not follows([3], PLAIN[1:], 1.5)
    assert PLAIN.margins() == [0.25, 1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_row_of_many_is_noticed(dtype: str) -> None:
    """Values a few roundings apart pass; another row in one of a hundred places, a shifted one, a missing one and NaN do not."""
    wanted = torch.randn(100, 32, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    precision = PRECISIONS[dtype]
    assert precision.differences(wanted * (1 + torch.finfo(wanted.dtype).eps), wanted) is None
    for row in (wanted[40], torch.zeros(32), torch.full((32,), torch.nan)):
        wrong = wanted.clone()
        wrong[41] = row
        assert precision.differences(wrong, wanted) is not None
        # whatever the scale of the field
        assert precision.differences(wrong * 1e-3, wanted * 1e-3) is not None


def test_declarations_are_checked() -> None:
    for values, message in (
        ({"dtype": "float16"}, "dtype is 'float16', allowed"),
        ({"near_tie": 0.1}, "near_tie is 0.1, but float64 decides every token"),
    ):
        with pytest.raises(TypeError, match=message):
            type("Declared", (RoundedQwen,), values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RoundedQwen.checkpoint(tmp_path_factory)


def test_captured_benches_need_a_gpu(folder: Path) -> None:
    with pytest.raises(CaptureError, match="need a CUDA device"):
        Bench.prepare(RoundedQwen.recipe, folder, captured=True)


@torch.inference_mode()
def test_prompts_are_chosen_for_what_can_be_compared(folder: Path) -> None:
    """The continuations hold no near tie for longer than those of the first prompts that come."""
    bench = Bench.prepare(RoundedQwen.recipe, folder, dtype="bfloat16", slots=1)
    suite = suite_in("bfloat16")

    def decided(near_tie: float) -> int:
        prompts = lively_prompts(bench, (7, 13, 1), 40, near_tie=near_tie)
        texts = [suite.decode(bench, prompt, 40).margins() for prompt in prompts]
        return sum(next((place for place, gap in enumerate(text) if gap < 0.1), 40) for text in texts)

    assert decided(0.1) > 1.5 * decided(0.0)


def suite_in(dtype: str) -> type[RoundConformance]:
    return type("Suite", (rounded(RoundedQwen, dtype, "cpu"), RoundConformance), {})


def test_a_bound_that_decides_most_tokens_is_refused(folder: Path) -> None:
    class Generous(suite_in("bfloat16")):  # type: ignore[misc]
        near_tie = 2.0

    plain = Generous.plain_outputs(Generous.build(folder, slots=1))
    with pytest.raises(AssertionError, match="of the tokens are decided by near_tie = 2"):
        Generous().test_plain_outputs_are_worth_comparing(plain)


#: Faults of state, of what is drafted, of text, of words and of scores, which the suite notices in float64.
NAMES = [
    "recurrent_state_is_not_rolled_back",
    "convolution_window_is_not_shifted",
    "feedback_is_one_row_early",
    "history_keeps_the_drafters_own_states",
    "verification_rows_are_shifted",
    "windows_shift_by_the_width",
    "the_budget_is_not_clipped",
    "words_depend_on_the_lane",
    "drafts_and_target_share_words",
    "words_follow_the_generated_count",
    "logprobs_come_from_the_last_row",
    "prompt_rows_belong_to_the_token_before",
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if mutant.name in NAMES], ids=lambda mutant: mutant.name
)
def test_faults_are_noticed_in_lower_precision(
    mutant: Mutant, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: type[Conformance] = rounded(RoundedQwen, dtype, "cpu")
    assert caught(mutant, folder, monkeypatch, facts) is not None
