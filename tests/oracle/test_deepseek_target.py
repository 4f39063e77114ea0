"""DeepSeek-V4.1 target: golden values of the tiny model, and one row function for prompts, decoding and verification.

The golden values were computed in float64 by a program of its own that shares no code with this repository, from weights that
are a function of the tensors' names. "On" and "off" say whether caches round their rows as the release's do.
"""

from __future__ import annotations

import pytest
import torch
from deepseek_models import GOLDEN_PROMPT, write_golden_checkpoint
from deepseek_target import Driver, furthest

from specdec.round.allocation import PackedRows
from specdec.testing.guard import CapturableGuard
from specdec_deepseek_v41.geometry import TINY

PROMPT = torch.tensor(GOLDEN_PROMPT)
ON, OFF = True, False
# Printed digits, and the bound for two ways to compute one thing.
DIGITS, EXACT = 1e-9, 1e-12

LOGITS = {
    ON: {
        0: (-1.7954605799, 0.3009722574, 0.8331100941, 0.6200479582, -0.5825832754, -0.9868514070),
        40: (1.2948992073, 0.2250800477, -0.1991844103, 0.4391727997, 0.2623592236, -1.3280379147),
    },
    OFF: {
        0: (-1.8148707991, 0.2352483540, 0.8061220833, 0.6703298997, -0.5347933220, -0.9386359591),
        40: (2.0794542363, 0.0895117075, -0.1952239006, 0.5152715353, 0.0705597126, -1.6975075827),
    },
}
ARGMAX = {ON: [455, 447, 208, 403, 324], OFF: [53, 12, 41, 307, 324]}
LOG_SUM = {ON: 6.7153758416, OFF: 6.6457501856}
TOTAL = {ON: 16568.5358539884, OFF: 16538.2544592105}
FEATURES = {
    ON: (-3.7556387644, -2.4219813645, -2.7259902474, -0.8373680692),
    OFF: (-3.0028886690, -1.7598701037, -1.8437852107, -0.3406376889),
}
FEATURES_TOTAL = {ON: 38197.3087447511, OFF: 38345.5351064153}
WINDOWS = {ON: (835.675048828, 820.126708984, 811.128753662), OFF: (835.642847137, 820.127799413, 806.132814791)}
# magnitudes of compressed rows and index keys of layers 2, 4 and 6
COMPRESSED = {ON: (1026.03125, 1005.03125, 2044.453125), OFF: (1029.464343003, 1006.749937292, 2058.902767278)}
INDEX_KEYS = {ON: (492.5, 506.75, 1035.0), OFF: (501.618237271, 514.893000653, 1054.415257925)}
# magnitudes of value and score that wait for the second half of their group, layers 2 and 4
PENDING = {
    ON: (47.888102246, 49.750215456, 53.570501690, 50.708640429),
    OFF: (47.772629206, 49.749655501, 52.756312996, 51.338905917),
}
CONTINUATION = {
    ON: [324, 462, 506, 205, 246, 209, 207, 78, 443, 305, 4, 226, 71, 50, 38, 286],
    OFF: [324, 462, 506, 259, 25, 169, 113, 491, 489, 246, 243, 221, 91, 166, 55, 162],
}
FORCED = (324, 271, 1, 221, 303, 138)
# rows committed → engram history, pending value of layer 2, next logits, their argmax
AFTER = {
    1: ((325, 200, 351), None, (-1.1063279380, 0.7940285758, -1.9273134736, -0.4624016165), 8),
    2: ((200, 351, 364), 48.252986449, (-1.7907551642, 0.2662296251, -1.6200066848, -0.6411792989), 313),
    5: ((10, 14, 204), None, (-0.9950107922, 0.1050207843, -2.5338098595, -0.9217912868), 45),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_golden_checkpoint(tmp_path_factory.mktemp("golden"))


@pytest.fixture(params=[ON, OFF], ids=["on", "off"])
def qdq(request) -> bool:
    return request.param


@pytest.fixture
def driver(directory, qdq) -> Driver:
    return Driver(directory, qdq=qdq)


def close(found: torch.Tensor, wanted, tolerance: float = DIGITS) -> None:
    assert torch.isfinite(found).all()
    difference = (found - torch.as_tensor(wanted, dtype=torch.float64)).abs().max().item()
    assert difference <= tolerance, difference


# --- golden values --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_prompt_gives_the_golden_logits_and_features(driver, qdq):
    features, logits = driver.prefill(0, PROMPT)
    for row, wanted in LOGITS[qdq].items():
        close(logits[row, :6], wanted)
    assert logits[36:].argmax(-1).tolist() == ARGMAX[qdq]
    close(logits[40].logsumexp(0), LOG_SUM[qdq])
    close(logits.abs().sum(), TOTAL[qdq], 1e-7)
    close(features[40, [0, 128, 256, 383]], FEATURES[qdq])
    close(features.abs().sum(), FEATURES_TOTAL[qdq], 1e-7)
    close(driver.target.first_logits(torch.tensor([0]))[0], logits[40], EXACT)


@torch.inference_mode()
def test_prompt_leaves_the_golden_state(driver, qdq):
    driver.prefill(0, PROMPT)
    state = driver.state(0)
    close(state["window"][[0, 2, 9]].abs().sum((1, 2)), WINDOWS[qdq], 1e-8)
    for name, wanted in (("compressed", COMPRESSED), ("index_keys", INDEX_KEYS)):
        sums = torch.cat([state[f"{name}_r{ratio}"].abs().sum((1, 2)) for ratio in (2, 1)])
        close(sums, wanted[qdq], 1e-8)
    close(state["pending"].abs().sum(-1).flatten(), PENDING[qdq], 1e-8)
    assert state["engram_ids"].tolist() == [[66, 325, 200]]


@torch.inference_mode()
def test_greedy_continuation(driver, qdq):
    _, logits = driver.prefill(0, PROMPT)
    found = [int(logits[-1].argmax())]
    while len(found) < len(CONTINUATION[qdq]):
        found.append(int(driver.step(0, found[-1:], 1)[0].argmax()))
    assert found == CONTINUATION[qdq]


@torch.inference_mode()
@pytest.mark.parametrize("taken", AFTER)
def test_forced_block_and_what_follows_it(directory, taken):
    driver = Driver(directory)
    driver.prefill(0, PROMPT)
    logits = driver.step(0, FORCED, taken)
    assert logits.argmax(-1).tolist() == [462, 128, 255, 124, 136, 333]
    close(logits[0, :4], (-1.2023791155, 2.2491787611, -0.3957044081, -0.2761979337))
    close(logits[5, :4], (-0.7425394242, -0.6822161718, 0.8858714402, 0.1194427687))
    close(logits.abs().sum(), 2448.3790473806, 1e-7)
    history, pending, following, best = AFTER[taken]
    state = driver.state(0)
    assert state["engram_ids"].tolist() == [list(history)]
    assert ("pending" in state) == (pending is not None)
    if pending is not None:
        close(state["pending"][0, 0, 0].abs().sum(), pending, 1e-8)
    row = driver.step(0, [77], 0)[0]
    close(row[:4], following)
    assert int(row.argmax()) == best
    # the same inputs as one prompt
    _, fresh = driver.prefill(1, torch.tensor([*GOLDEN_PROMPT, *FORCED[:taken], 77]))
    close(row, fresh[-1], EXACT)


@torch.inference_mode()
def test_golden_values_need_the_rule_for_ties(directory, monkeypatch):
    """Zero scores are frequent; were the later row chosen among equals, rows would differ once there is something to choose."""
    driver = Driver(directory)
    _, stable = driver.prefill(0, PROMPT)
    sort = torch.sort

    def later_first(x, *, dim, descending, stable):
        found = sort(x.flip(-1), dim=dim, descending=descending, stable=stable)
        return torch.return_types.sort((found.values, x.shape[-1] - 1 - found.indices))

    monkeypatch.setattr(torch, "sort", later_first)
    _, other = driver.prefill(1, PROMPT)
    apart = (stable - other).abs().amax(-1)
    assert apart[: TINY.index_topk].max() <= EXACT and apart[22:].min() > 1e-6


# --- one function of rows -------------------------------------------------------------------------------------------------

LENGTH = 108


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
@pytest.mark.parametrize(
    "chunks", [(1,) * LENGTH, (64,), (15, 1, 1, 47, 1), (2, 3, 12, 40, 7), (33, 30)], ids=lambda c: f"{len(c)}"
)
def test_chunked_prompts_and_decoding_equal_one_prompt(driver, tokens, chunks):
    features, logits = driver.prefill(0, tokens)
    found_features, found_logits = driver.prefill(1, tokens, chunks)
    close(found_logits, logits, EXACT)
    close(found_features, features, EXACT)
    assert furthest(driver.state(1), driver.state(0)) <= EXACT
    for token in tokens:
        driver.step(2, [int(token)], 1)
    assert furthest(driver.state(2), driver.state(0)) <= EXACT


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_any_width_with_rejections_equal_one_prompt(driver, tokens, seed):
    """Rejected rows are wrong tokens, and everything that is not committed is overwritten between rounds."""
    generator = torch.Generator().manual_seed(seed)
    first = seed
    if first:
        driver.prefill(1, tokens[:first])
    features = torch.zeros(LENGTH, TINY.feature_width, dtype=torch.float64)
    logits = torch.zeros(LENGTH, TINY.vocab_size, dtype=torch.float64)
    while (start := driver.consumed[1]) < LENGTH:
        width = int(torch.randint(1, 9, (), generator=generator))
        taken = min(int(torch.randint(1, width + 1, (), generator=generator)), LENGTH - start)
        block = torch.randint(0, TINY.vocab_size, (width,), generator=generator)
        block[:taken] = tokens[start : start + taken]
        driver.target.store.poison()
        found = driver.step(1, block.tolist(), taken)
        logits[start : start + taken] = found[:taken]
        rows = driver.target.feedback_rows(torch.tensor([1]), width)[0]
        features[start : start + taken] = rows[:taken]
        close(driver.target.feedback(torch.tensor([1]))[0], rows[taken - 1], 0)
    wanted_features, wanted = driver.prefill(0, tokens)
    close(logits[first:], wanted[first:], EXACT)
    close(features[first:], wanted_features[first:], EXACT)
    assert furthest(driver.state(1), driver.state(0)) <= EXACT


@torch.inference_mode()
def test_rejected_rows_leave_nothing(driver, tokens):
    driver.prefill(0, tokens[:37])
    driver.prefill(1, tokens[:37])
    wide = driver.step(0, tokens[37:45].tolist(), 1)[0]
    narrow = driver.step(1, tokens[37:38].tolist(), 1)[0]
    close(wide, narrow, EXACT)
    assert furthest(driver.state(0), driver.state(1)) <= EXACT


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(4, 1, 7), (8, 8, 8), (1, 1, 1), (3, 0, 8)], ids=str)
def test_packed_rows_equal_whole_blocks(directory, driver, qdq, tokens, lengths):
    """Three lanes of different age; a length of zero is a lane whose request has finished. Twenty-four rows, the rest padding."""
    ages, block = (5, 40, 63), tokens[:24].view(3, 8)
    for slot, age in enumerate(ages):
        driver.prefill(slot, tokens[:age])
    before = [driver.state(slot) for slot in range(3)]
    lanes = driver.lanes(0, 1, 2, dead=[slot for slot, length in enumerate(lengths) if not length])
    whole = driver.target.verify(block, lanes)
    rows = PackedRows.pack(lanes, torch.tensor(lengths).sub(1).clamp(min=0), width=8, rows=24, spare=3)
    driver.target.store.poison()
    found = driver.target.verify_rows(rows.gather(block), rows)
    for slot, length in enumerate(lengths):
        start = int(rows.starts[slot])
        if length:
            close(found[start : start + length], whole[slot, :length], EXACT)
        # columns hold candidates now, the last prompt row's included
        after = {**driver.state(slot), **{name: before[slot][name] for name in ("features", "sampling_vector")}}
        assert furthest(after, before[slot]) == 0
    driver.commit(lanes, lengths)
    other = Driver(directory, qdq=qdq)
    for slot, (age, length) in enumerate(zip(ages, lengths, strict=True)):
        other.prefill(slot, torch.cat([tokens[:age], block[slot, :length]]))
        assert furthest(driver.state(slot), other.state(slot)) <= EXACT


@torch.inference_mode()
def test_unwritten_pages_are_never_read(driver, tokens):
    _, wanted = driver.prefill(0, tokens[:70])
    for name, values in driver.target.store.tensors.items():
        if "_r" in name:
            values.fill_(float("nan"))
    _, found = driver.prefill(1, tokens[:70], (13,))
    close(found, wanted, EXACT)
    close(driver.step(1, tokens[70:75].tolist(), 5), driver.prefill(2, tokens[:75])[1][70:], EXACT)


@torch.inference_mode()
def test_a_row_inside_a_group_writes_no_entry(driver, tokens):
    """Only the row that completes a group does: two rows of a call that wrote one entry would leave either's values."""
    driver.prefill(0, tokens[:40])
    store = driver.target.store
    ahead = store.page_table[0, :1], slice(20, 24)
    for name in ("compressed_r2", "index_keys_r2"):
        store[name][:, ahead[0], ahead[1]] = float("nan")
    written = []
    for block, taken in (([5], 1), ([6, 7], 0), ([6, 7], 2), ([8, 9, 10, 11], 4)):
        driver.step(0, block, taken)
        written.append(store["compressed_r2"][:, ahead[0], ahead[1]].isfinite().all(-1)[0, 0].tolist())
    assert written == [
        [False, False, False, False],
        [True, False, False, False],
        [True, False, False, False],
        [True, True, True, False],
    ]


@torch.inference_mode()
@pytest.mark.parametrize("taken", [1, 4, 8])
def test_snapshot_between_verification_and_commit(driver, tokens, taken):
    """The state as if some of the rows were consumed, taken before all of them are; restored elsewhere it goes on alike."""
    driver.prefill(0, tokens[:61])
    lanes = driver.lanes(0)
    driver.target.verify(tokens[61:69].unsqueeze(0), lanes)
    snapshot = driver.target.snapshot(torch.tensor([0]), torch.tensor([taken]))
    driver.commit(lanes, [8])
    store = driver.target.store
    # the committed part of the pages is the restoring side's to provide
    for name, values in store.tensors.items():
        if "_r" in name:
            values[:, store.page_table[1]] = values[:, store.page_table[0]]
    driver.target.restore(torch.tensor([1]), snapshot, torch.tensor([61 + taken]))
    driver.consumed[1] = 61 + taken
    driver.prefill(2, tokens[: 61 + taken])
    assert furthest(driver.state(1), driver.state(2)) <= EXACT
    slots = torch.tensor([1, 2])
    first = driver.target.first_logits(slots)
    close(first[0], first[1], EXACT)
    found, wanted = (driver.step(slot, tokens[90:96].tolist(), 3) for slot in (1, 2))
    close(found, wanted, EXACT)
    assert furthest(driver.state(1), driver.state(2)) <= EXACT


@torch.inference_mode()
def test_short_contexts_need_no_selection(directory, qdq):
    """A context that the top-k covers skips the scores; the same rows as with a context that is larger."""
    small, large = Driver(directory, qdq=qdq, context=4), Driver(directory, qdq=qdq, context=120)
    wanted = large.prefill(0, PROMPT[:4])[1]
    close(small.prefill(0, PROMPT[:4])[1], wanted, EXACT)


@torch.inference_mode()
def test_prompts_longer_than_a_span(driver, tokens, monkeypatch):
    _, wanted = driver.prefill(0, tokens)
    monkeypatch.setattr("specdec_deepseek_v41.target.SPAN", 19)
    _, found = driver.prefill(1, tokens, (50,))
    close(found, wanted, EXACT)
    assert furthest(driver.state(1), driver.state(0)) <= EXACT


@torch.inference_mode()
def test_other_precisions_stay_near(driver, directory, qdq):
    """Experts, rows and blocks are chosen discontinuously: bfloat16 flips some choices in every row, float32 hardly any."""
    wanted = driver.prefill(0, PROMPT)[1]
    single, half = (Driver(directory, qdq=qdq, dtype=dtype).prefill(0, PROMPT)[1] for dtype in ("float32", "bfloat16"))
    assert single.dtype is half.dtype is torch.float32
    assert (single - wanted).abs().amax(-1).median() <= 1e-5
    correlation = torch.nn.functional.cosine_similarity(half.double(), wanted, dim=-1)
    assert correlation.median() > 0.9
    unrelated = torch.nn.functional.cosine_similarity(half.double().roll(1, 0), wanted, dim=-1)
    assert unrelated.mean() < 0.3


@torch.inference_mode()
def test_a_round_is_capturable(driver, tokens):
    for slot in range(3):
        driver.prefill(slot, tokens[: 20 + slot])
    lanes = driver.lanes(0, 1, 2)
    rows = PackedRows.pack(lanes, torch.tensor([3, 0, 7]), width=8, rows=16, spare=3)
    block, taken = tokens[:24].view(3, 8), torch.tensor([2, 1, 5])
    packed = rows.gather(block)
    with CapturableGuard() as guard:
        guard.allow(driver.target.verify(block, lanes))
        guard.allow(driver.target.verify_rows(packed, rows))
        guard.allow(driver.target.snapshot(lanes.slots, taken))
        driver.target.commit(lanes, taken)
        guard.allow(driver.target.first_logits(lanes.slots))
