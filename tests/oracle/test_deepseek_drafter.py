"""The DSpark drafter against the golden values of the tiny model: windows, proposals, retained laws and confidences in float64.

The values are known to nine or more digits and were computed by an independent program from weights that are a function of their
names. Proposals are float64; confidences leave the drafter in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from deepseek_models import GOLDEN_PROMPT, write_golden_checkpoint
from deepseek_target import Driver, furthest
from serving_runs import run_all, tokens_of
from small_checkpoint import byte_tokenizer
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.interfaces import Capacities
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.allocated import AllocatedRound
from specdec.round.allocation import PackedRows
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Request
from specdec.testing import CapturableGuard
from specdec_deepseek_v41.drafter import DsparkDrafter

ANCHOR = 324
#: Window sums of the three stages after the prompt.
WINDOWS = {
    True: (842.933105469, 803.709777832, 797.860656738),
    False: (836.189331059, 807.293035675, 796.532887218),
}
#: (rounding, block length) → greedy proposals and confidences.
DRAFTS = {
    (True, 1): ([271], [0.525510130]),
    (True, 5): ([271, 1, 221, 303, 138], [0.625056994, 0.264217020, 0.530694278, 0.330010244, 0.153232995]),
    (True, 7): (
        [271, 1, 221, 303, 335, 221, 303],
        [0.683362245, 0.254943877, 0.166076085, 0.070620400, 0.035046928, 0.023516704, 0.045420195],
    ),
    (False, 1): ([271], [0.626907613]),
    (False, 5): ([271, 1, 221, 303, 138], [0.711640829, 0.623483727, 0.558468265, 0.322266078, 0.149074267]),
    (False, 7): (
        [432, 81, 274, 274, 274, 274, 274],
        [0.743033931, 0.462712767, 0.278994048, 0.145305673, 0.093547791, 0.092235918, 0.128724672],
    ),
}
#: Probability of each proposal at temperature 1, rounding on, block of five.
LAW = [0.042425092, 0.125198762, 0.065992698, 0.082797446, 0.076096187]
#: Committed rows of a forced verification → inputs consumed, proposals and confidences with anchor 77, block of five.
AFTER = {
    1: (42, [395, 510, 274, 274, 19], [0.421117638, 0.084777913, 0.050542719, 0.043111189, 0.017489252]),
    2: (43, [395, 262, 305, 339, 510], [0.766642364, 0.084015193, 0.042950866, 0.054124367, 0.014561243]),
    5: (46, [74, 303, 194, 129, 454], [0.883998990, 0.066604449, 0.086509152, 0.119087607, 0.048780316]),
}
FORCED = [324, 271, 1, 221, 303, 138]
CONTINUATION = [324, 462, 506, 205, 246, 209, 207, 78, 443, 305, 4, 226, 71, 50, 38, 286]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden_checkpoint(tmp_path_factory.mktemp("golden"))


class Greedy:
    """A proposer that takes the greatest logit and keeps its probability."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.probs: list[list[float]] = []

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        token = logits.argmax(-1)
        self.tokens.append(token.tolist())
        self.probs.append(logits.softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1).tolist())
        return token

    def place(self, depth: int, tokens: Tensor) -> None:
        raise AssertionError("this drafter draws")


class Model:
    """Target and drafter with three slots."""

    def __init__(self, directory: Path, *, qdq: bool = True, length: int = 7) -> None:
        self.driver = Driver(directory, qdq=qdq)
        capacities = Capacities(
            slots=3, context=120, pages=6, max_draft_tokens=7, dtype="float64", prefill_rows=120, draft_tokens=length
        )
        with Checkpoint.open(directory) as checkpoint:
            self.drafter = DsparkDrafter(checkpoint, self.driver.target, capacities, qdq=qdq)

    def prefill(self, slot: int, tokens: Sequence[int], chunks: Sequence[int] = ()) -> None:
        for size in [*chunks, len(tokens) - sum(chunks)]:
            start = self.driver.consumed[slot]
            chunk = torch.tensor(tokens[start : start + size])
            features, _ = self.driver.prefill(slot, chunk)
            self.drafter.prefill(features, chunk, torch.tensor([slot]), start)

    def lanes(self, anchors: dict[int, int]):
        for slot, anchor in anchors.items():
            self.driver.table.integers[slot, 1] = anchor
        return self.driver.lanes(*anchors)

    def draft(self, anchors: dict[int, int], length: int) -> tuple[Greedy, Tensor]:
        proposer = Greedy()
        forecasts = self.drafter.propose(self.lanes(anchors), length, proposer)
        assert forecasts is not None and forecasts.dtype == torch.float32
        return proposer, forecasts

    def round(self, slot: int, rows: Sequence[int], taken: int) -> None:
        """Verifies rows of one lane and commits ``taken`` of them, in the order of a round."""
        lanes = self.lanes({slot: rows[0]})
        self.driver.target.verify(torch.tensor([list(rows)]), lanes)
        emitted = torch.tensor([taken])
        self.drafter.absorb(lanes, torch.full((1, len(rows)), -1), emitted)
        self.drafter.commit(lanes, emitted)
        self.driver.commit(lanes, [taken])


@pytest.mark.parametrize("qdq", [True, False])
@pytest.mark.parametrize("chunks", [(), (1, 15, 1, 7), (40,)])
@torch.inference_mode()
def test_windows_after_the_prompt(golden: Path, qdq: bool, chunks: tuple[int, ...]) -> None:
    model = Model(golden, qdq=qdq)
    model.prefill(1, GOLDEN_PROMPT, chunks)
    sums = [float(model.drafter.store["window"][stage, 1, :16].abs().sum()) for stage in range(3)]
    assert sums == pytest.approx(WINDOWS[qdq], abs=1e-8)
    assert int(model.drafter.store["rows"][0, 1]) == 41


@pytest.mark.parametrize(("qdq", "length"), DRAFTS)
@torch.inference_mode()
def test_drafts_and_confidences(golden: Path, qdq: bool, length: int) -> None:
    model = Model(golden, qdq=qdq, length=length)
    model.prefill(0, GOLDEN_PROMPT)
    proposer, forecasts = model.draft({0: ANCHOR}, length)
    tokens, confidences = DRAFTS[qdq, length]
    assert [token for (token,) in proposer.tokens] == tokens
    assert forecasts[0].tolist() == pytest.approx(confidences, abs=2e-7)
    if qdq and length == 5:
        assert [prob for (prob,) in proposer.probs] == pytest.approx(LAW, abs=1e-9)


@pytest.mark.parametrize(("length", "drafts"), [(7, 1), (7, 3), (5, 4)])
@torch.inference_mode()
def test_fewer_drafts_than_the_block_are_its_first_ones(golden: Path, length: int, drafts: int) -> None:
    """A round of few drafts runs the whole prepared block: its drafts are not those of a shorter block."""
    model = Model(golden, length=length)
    model.prefill(0, GOLDEN_PROMPT)
    proposer, forecasts = model.draft({0: ANCHOR}, drafts)
    tokens, confidences = DRAFTS[True, length]
    assert [token for (token,) in proposer.tokens] == tokens[:drafts]
    assert forecasts[0].tolist() == pytest.approx(confidences[:drafts], abs=2e-7)


@pytest.mark.parametrize("taken", AFTER)
@torch.inference_mode()
def test_drafts_after_a_forced_verification(golden: Path, taken: int) -> None:
    """Windows of committed rows only, whatever was verified behind them."""
    model = Model(golden, length=5)
    model.prefill(2, GOLDEN_PROMPT)
    model.round(2, FORCED, taken)
    consumed, tokens, confidences = AFTER[taken]
    assert model.driver.consumed[2] == consumed
    proposer, forecasts = model.draft({2: 77}, 5)
    assert [token for (token,) in proposer.tokens] == tokens
    assert forecasts[0].tolist() == pytest.approx(confidences, abs=2e-7)


@torch.inference_mode()
def test_widths_alternate_and_windows_equal_a_prompts(golden: Path) -> None:
    """Rounds of width one and wider ones with partial commits, past the window: state equals one prompt pass."""
    model = Model(golden)
    text = [(37 * index + 11) % 512 for index in range(80)]
    model.prefill(0, text[:11])
    for width, taken in [(6, 2), (1, 1), (8, 8), (1, 1), (1, 1), (8, 1), (5, 4), (8, 5), (2, 2), (8, 3)]:
        start = model.driver.consumed[0]
        # rejected rows are other tokens than those that follow
        rows = [*text[start : start + taken], *[3] * (width - taken)]
        model.round(0, rows, taken)
        consumed = model.driver.consumed[0]
        model.drafter.store.reset(1)
        model.driver.target.store.reset(1)
        model.driver.consumed[1] = 0
        model.driver.target.store.set_pages(1, [3, 4])
        model.prefill(1, text[:consumed])
        found = model.drafter.store["window"][:, :2, :16]
        torch.testing.assert_close(found[:, 0], found[:, 1], rtol=1e-12, atol=1e-12)
        assert model.drafter.store["rows"][0, :2].flatten().tolist() == [consumed] * 2
        assert model.drafter.faults(torch.tensor([0, 1])).tolist() == [0, 0]


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_packed_rounds_of_any_width_equal_one_prompt(golden: Path, seed: int) -> None:
    """Two requests, lengths and commits at random, the first rounds before the window is full, everything that is not committed
    overwritten: all fields of target and drafter, and drafts and forecasts, are those of one prompt."""
    model, generator = Model(golden), torch.Generator().manual_seed(seed)
    target, drafter = model.driver.target, model.drafter
    text = torch.randint(0, 512, (2, 60), generator=generator)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for slot, length in enumerate((1 + seed, 14)):
        model.prefill(slot, text[slot, :length].tolist())
    for _ in range(12):
        lengths = [draw(1, 8), draw(0, 8)]
        taken = [draw(1, lengths[0]), draw(min(lengths[1], 1), lengths[1])]
        taken = [min(count, 60 - at) for count, at in zip(taken, model.driver.consumed, strict=False)]
        block = torch.randint(0, 512, (2, 8), generator=generator)
        for slot, count in enumerate(taken):
            at = model.driver.consumed[slot]
            block[slot, :count] = text[slot, at : at + count]
        for store in (target.store, drafter.store):
            store.poison()
        lanes = model.driver.lanes(0, 1, dead=[slot for slot in (0, 1) if not lengths[slot]])
        rows = PackedRows.pack(lanes, torch.tensor(lengths).sub(1).clamp(min=0), width=8, rows=17, spare=3)
        target.verify_rows(rows.gather(block), rows)
        emitted = torch.tensor(taken)
        drafter.absorb(lanes, torch.full((2, 8), -1), emitted)
        drafter.commit(lanes, emitted)
        model.driver.commit(lanes, taken)
    assert min(model.driver.consumed[:2]) > 30
    fresh = Model(golden)
    for slot in (0, 1):
        consumed = model.driver.consumed[slot]
        fresh.prefill(slot, text[slot, :consumed].tolist())
        assert furthest(model.driver.state(slot), fresh.driver.state(slot)) <= 1e-12
        ours, theirs = (each.drafter.store["window"][:, slot, :16] for each in (model, fresh))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert int(drafter.store["rows"][0, slot]) == consumed
        (drafts, forecasts), (wanted, expected) = (each.draft({slot: 9}, 7) for each in (model, fresh))
        assert drafts.tokens == wanted.tokens
        torch.testing.assert_close(forecasts, expected, rtol=1e-6, atol=1e-7)


@torch.inference_mode()
def test_a_block_reads_the_window_and_nothing_else(golden: Path) -> None:
    """Candidates behind the committed rows and rows before the first input do not reach a proposal."""
    model = Model(golden)
    model.prefill(0, GOLDEN_PROMPT[:5])
    before = model.draft({0: 9}, 7)
    window = model.drafter.store["window"]
    window[:, 0, 16:] = torch.nan
    window[:, 0, :11] = 1e3
    after = model.draft({0: 9}, 7)
    assert torch.equal(before[1], after[1]) and before[0].probs == after[0].probs


@pytest.mark.parametrize("consumed", [1, 2, 15, 16, 17])
@torch.inference_mode()
def test_a_block_reads_every_row_of_its_window(golden: Path, consumed: int) -> None:
    """Shorter, as long as and longer than the window of sixteen: each of the min(N, 16) rows of each stage moves the forecasts,
    the first input's among them, and no row before it does."""
    model = Model(golden, length=5)
    model.prefill(0, GOLDEN_PROMPT[:consumed])
    window = model.drafter.store["window"]
    before = model.draft({0: ANCHOR}, 5)[1]
    for stage in range(3):
        for row in range(16):
            kept = window[stage, 0, row].clone()
            window[stage, 0, row] += torch.linspace(-1, 1, 64, dtype=torch.float64)
            moved = not torch.equal(model.draft({0: ANCHOR}, 5)[1], before)
            assert moved == (row >= 16 - consumed), (stage, row)
            window[stage, 0, row] = kept


@torch.inference_mode()
def test_lanes_do_not_see_each_other(golden: Path) -> None:
    model = Model(golden)
    for slot, length in enumerate((41, 3, 20)):
        model.prefill(slot, GOLDEN_PROMPT[:length])
    together, forecasts = model.draft({2: 5, 0: ANCHOR, 1: 8}, 5)
    for lane, (slot, anchor) in enumerate({2: 5, 0: ANCHOR, 1: 8}.items()):
        alone, own = model.draft({slot: anchor}, 5)
        assert [tokens[lane] for tokens in together.tokens] == [token for (token,) in alone.tokens]
        torch.testing.assert_close(forecasts[lane], own[0], rtol=1e-6, atol=1e-7)


@torch.inference_mode()
def test_a_forecast_looks_at_no_later_token(golden: Path) -> None:
    """Another token at depth d changes forecasts behind d and none up to it."""
    model = Model(golden, length=5)
    model.prefill(0, GOLDEN_PROMPT)

    def forecasts(tokens: list[int]) -> list[float]:
        proposer = Greedy()
        proposer.draw = lambda depth, logits: torch.tensor([tokens[depth]])  # type: ignore[method-assign]
        found = model.drafter.propose(model.lanes({0: ANCHOR}), 5, proposer)
        assert found is not None
        return found[0].tolist()

    drawn = DRAFTS[True, 5][0]
    plain = forecasts(drawn)
    assert plain == pytest.approx(DRAFTS[True, 5][1], abs=2e-7)
    for depth in range(5):
        other = list(drawn)
        other[depth] += 7
        changed = forecasts(other)
        assert changed[: depth + 1] == plain[: depth + 1]
        assert all(ours != theirs for ours, theirs in zip(changed[depth + 1 : depth + 2], plain[depth + 1 :]))


@torch.inference_mode()
def test_a_history_that_does_not_follow_the_target_is_a_fault(golden: Path) -> None:
    model = Model(golden)
    model.prefill(0, GOLDEN_PROMPT)
    model.driver.consumed[0] += 1
    model.draft({0: ANCHOR}, 1)
    assert model.drafter.faults(torch.tensor([0])).tolist() == [1]


@torch.inference_mode()
def test_width_one_runs_no_stage(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft forward without drafts, but the consumed row is absorbed."""
    model = Model(golden)
    model.prefill(0, GOLDEN_PROMPT)
    monkeypatch.setattr(type(model.drafter), "_run_block", None)
    assert model.drafter.propose(model.lanes({0: ANCHOR}), 0, Greedy()) is None
    model.round(0, [ANCHOR], 1)
    assert int(model.drafter.store["rows"][0, 0]) == 42


@torch.inference_mode()
def test_draft_programs_are_capturable(golden: Path) -> None:
    model = Model(golden)
    for slot in range(3):
        model.prefill(slot, GOLDEN_PROMPT[: 10 + slot])
    lanes = model.lanes({0: 5, 1: 6, 2: 7})
    proposer = Greedy()
    proposer.draw = lambda depth, logits: logits.argmax(-1)  # type: ignore[method-assign]
    emitted, tokens = torch.tensor([1, 3, 0]), torch.full((3, 8), -1)
    with CapturableGuard():
        model.drafter.propose(lanes, 7, proposer)
        model.drafter.absorb(lanes, tokens, emitted)
        model.drafter.snapshot(lanes.slots, emitted)
        model.drafter.commit(lanes, emitted)


@pytest.fixture(scope="module")
def served(golden: Path) -> Path:
    """With a tokenizer, which serving asks for and nothing here uses."""
    byte_tokenizer().save(str(golden / "tokenizer.json"))
    return golden


@pytest.mark.parametrize("drafts", [5, 7])
def test_served_greedy_output_is_the_golden_continuation(served: Path, drafts: int) -> None:
    """Blocks of five and seven through allocated rounds: the golden tokens, forecasts and drafts of the first round."""
    recipe = recipe_book().recipe("deepseek-v4.1-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=1, max_draft_tokens=drafts, context=80, adaptive_verification=False
    )
    model = LoadedModel.prepare(recipe, config, directory=served, dtype="float64")
    request = Request(prompt=tuple(GOLDEN_PROMPT), sampling=SamplingParams(greedy=True), max_new_tokens=16, stop_ids=())
    (emissions,) = run_all(Generator(model), [request]).values()
    assert tokens_of(emissions) == CONTINUATION
    # the first emission is the prompt's; its token is the anchor of the first block
    assert emissions[1].forecasts == pytest.approx(DRAFTS[True, drafts][1], abs=2e-7)
    assert emissions[1].completion.verified == (5 if drafts == 5 else 6), "a seventh survival of 7e-8 is not verified"
    assert isinstance(model.rounds[1, drafts + 1], AllocatedRound)
