"""The Qwen3.8 round against plain decoding: greedy equality, draft history, lane independence."""

from __future__ import annotations

import pytest
import torch
from committed_state import assert_same_state, committed_state
from qwen_models import prepare, write_random_checkpoint
from round_driver import Driver

from specdec.checkpoint import mixtures
from specdec.errors import DeclarationError
from specdec.round.completion import Finish
from specdec.round.transaction import FirstToken
from specdec.testing.guard import CapturableGuard
from specdec.testing.scripted import ScriptedDrafter

PROMPTS = [[5, 9, 300, 17, 44, 500, 3], [411, 2, 2, 8, 77, 130, 256, 19, 73, 6, 41, 99, 350], [7], list(range(60, 125))]
BUDGET = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


@pytest.fixture(scope="module")
def reference(directory):
    """A float64 model that only ever sees whole prompts."""
    return prepare(directory, dtype="float64")


@pytest.fixture(scope="module")
def model(directory):
    """The float64 model under test; admission gives a used slot its initial state."""
    return prepare(directory, dtype="float64")


@pytest.fixture(scope="module")
def single(directory):
    """The same in float32."""
    return prepare(directory)


@pytest.fixture(scope="module")
def plain(directory):
    """Tokens of plain decoding, no drafter, one request at a time, float64."""
    outputs = []
    model = prepare(directory, dtype="float64")
    with torch.inference_mode():
        for prompt in PROMPTS:
            model.admit(0, prompt, budget=BUDGET, greedy=True)
            driver = Driver(model, drafts=False)
            driver.start([0])
            while driver.running([0]):
                driver.round([0], 0)
            outputs.append(driver.tokens(0))
    assert all(len(output) == BUDGET for output in outputs)
    return outputs


def run_greedy(model, slots: list[int], widths) -> Driver:
    for slot in slots:
        model.admit(slot, PROMPTS[slot], budget=BUDGET, greedy=True)
    driver = Driver(model)
    driver.start(slots)
    sequence = iter(widths)
    while driver.running(slots):
        driver.round(driver.running(slots), next(sequence))
    return driver


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_greedy_equals_plain_decoding(model, plain, drafts, batch):
    slots = list(range(batch))
    driver = run_greedy(model, slots, (drafts for _ in range(1000)))
    for slot in slots:
        assert driver.tokens(slot) == plain[slot]
        last = driver.completions[slot][-1]
        assert last.finish is Finish.LENGTH and last.generated == BUDGET and last.faults == 0
        assert last.consumed == len(PROMPTS[slot]) + BUDGET - 1
        assert sum(c.emitted for c in driver.completions[slot]) == BUDGET
        assert all(c.draft_rows == c.consumed - 1 for c in driver.completions[slot])
        assert all(c.offered >= c.accepted >= c.emitted - 1 for c in driver.completions[slot])


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_greedy_equals_plain_decoding_when_widths_change_every_round(model, plain, seed):
    generator = torch.Generator().manual_seed(seed)
    widths = [7, 0, 7, 3, 0, 2, *torch.randint(0, 8, (1000,), generator=generator).tolist()]
    driver = run_greedy(model, [0, 1, 2, 3], widths)
    for slot in range(4):
        assert driver.tokens(slot) == plain[slot]


def scripted(model, **admission) -> ScriptedDrafter:
    """Admits four greedy requests; a drafter whose proposals the test writes."""
    for slot, prompt in enumerate(PROMPTS):
        model.admit(slot, prompt, budget=BUDGET, greedy=True, **admission)
    return ScriptedDrafter(model.drafter, slots=4, max_draft_tokens=7)


def script_for(done: list[int], outputs: list[int], accepted: int, drafts: int) -> list[int]:
    """Drafts of which exactly ``accepted`` are the tokens plain decoding emits next."""
    future = outputs[len(done) : len(done) + drafts]
    future += [0] * (drafts - len(future))
    return [token if k < accepted else (token + 1) % 512 for k, token in enumerate(future)]


def assert_equals_teacher_forced(reference, model, slot: int, sequence: list[int]) -> None:
    """State after consuming ``sequence`` equals one prompt pass over it."""
    reference.admit(slot, sequence)
    assert_same_state(committed_state(model, slot, len(sequence)), committed_state(reference, slot, len(sequence)))


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(1, 8))
def test_state_after_every_accepted_count_equals_a_teacher_forced_pass(model, reference, plain, drafts):
    for accepted in range(drafts + 1):
        drafter = scripted(model)
        driver = Driver(model, drafter=drafter)
        slots = [0, 1, 2, 3]
        driver.start(slots)
        # one round with this accepted count, one zero-draft round, the same count again
        for width, count in ((drafts, accepted), (0, 0), (drafts, accepted)):
            drafter.write({s: script_for(driver.tokens(s), plain[s], count, width) for s in slots})
            for completion in driver.round(slots, width):
                assert (completion.offered, completion.accepted, completion.emitted) == (width, count, count + 1)
        for slot in slots:
            output = driver.tokens(slot)
            assert output == plain[slot][: len(output)]
        slot = accepted % 4
        output = driver.tokens(slot)
        assert_equals_teacher_forced(reference, model, slot, PROMPTS[slot] + output[:-1])


@torch.inference_mode()
def test_eight_wide_to_one_and_full_acceptance_to_zero_drafts(model, reference, plain):
    drafter = scripted(model)
    driver = Driver(model, drafter=drafter)
    slots = [0, 1, 2, 3]
    driver.start(slots)
    for width, count in ((7, 7), (0, 0), (7, 7), (3, 3), (0, 0), (2, 2), (7, 0), (0, 0)):
        drafter.write({s: script_for(driver.tokens(s), plain[s], count, width) for s in slots})
        completions = driver.round(slots, width)
        assert [c.accepted for c in completions] == [count] * 4
        for slot in slots:
            output = driver.tokens(slot)
            assert output == plain[slot][: len(output)]
    for slot in slots:
        assert_equals_teacher_forced(reference, model, slot, PROMPTS[slot] + driver.tokens(slot)[:-1])


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [(65,), (1, 64), (16, 16, 16, 16, 1), (63, 1, 1), (3, 61, 1), (1,) * 65])
def test_draft_history_is_the_same_for_every_chunking(model, reference, chunks):
    model.admit(3, PROMPTS[3], chunks=chunks)
    assert_equals_teacher_forced(reference, model, 3, PROMPTS[3])
    assert model.drafter.store["rows"][0, 3] == len(PROMPTS[3]) - 1


@torch.inference_mode()
@pytest.mark.parametrize("accepted", range(8))
def test_first_stop_id_and_budget_clip_inside_accepted_drafts(model, reference, plain, accepted):
    for slot in range(4):
        for stop_at in (1, accepted + 1, accepted + 2):
            drafter = scripted(model, stops=(plain[slot][stop_at],))
            driver = Driver(model, drafter=drafter)
            first = plain[slot].index(plain[slot][stop_at])
            driver.start([slot])
            if first == 0:
                assert driver.completions[slot][-1].finish is Finish.STOP
                continue
            drafter.write({slot: script_for(driver.tokens(slot), plain[slot], accepted, 7)})
            completion = driver.round([slot], 7)[0]
            expected = plain[slot][: min(first + 1, accepted + 2)]
            assert driver.tokens(slot) == expected
            assert completion.finish is (Finish.STOP if first <= accepted + 1 else Finish.NONE)
            assert completion.consumed == len(PROMPTS[slot]) + len(expected) - 1
            assert completion.pending == expected[-1]
            assert completion.draft_rows == completion.consumed - 1
            assert_equals_teacher_forced(reference, model, slot, PROMPTS[slot] + expected[:-1])


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
def test_round_is_capturable(single, drafts):
    model = single
    for slot in range(3):
        model.admit(slot, PROMPTS[slot], top_k=20, top_p=0.95, seed=slot)
    driver = Driver(model)
    driver.start([0, 1, 2])
    driver.round([0, 1, 2], drafts, lanes=[0, 1, 2, 4])
    runner = driver._rounds[(4, drafts)]
    runner.staging.write([0, 1, 2], [drafts] * 3, driver.number)
    with CapturableGuard() as guard:
        runner.run()
    assert guard.operations > 100
    assert all(c.emitted >= 1 for c in driver._read([0, 1, 2]))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [0, 5])
def test_other_forms_of_the_round_are_capturable(directory, monkeypatch, drafts, dtype):
    """Gathered experts, half precision, and the first token."""
    monkeypatch.setattr(mixtures, "DENSE_LIMIT_BYTES", 0)
    model = prepare(directory, dtype=dtype, slots=2)
    for slot in range(2):
        model.admit(slot, PROMPTS[slot], top_k=20, top_p=0.95, seed=slot)
    first = FirstToken(target=model.target, drafter=model.drafter, arena=model.arena, batch=2)
    first.staging.write([0, 1], [0, 0], 0)
    with CapturableGuard():
        first.run()
    driver = Driver(model)
    driver.number = 1
    assert all(c.emitted >= 1 and c.faults == 0 for c in driver.round([0, 1], drafts))
    runner = driver._rounds[(2, drafts)]
    runner.staging.write([0, 1], [drafts] * 2, driver.number)
    with CapturableGuard():
        runner.run()


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 5])
def test_round_that_keeps_a_page_boundary_is_capturable(single, drafts):
    model = single
    model.admit(0, list(range(60)), top_k=20, seed=1)
    driver = Driver(model)
    driver.start([0])
    driver.round([0], drafts)
    runner = driver._rounds[(1, drafts)]
    runner.staging.write([0], [drafts], driver.number)
    with CapturableGuard() as guard:
        runner.run(boundary=True)
        # what the host reads after the round outlives it on purpose
        guard.allow(runner.boundary_state)
    assert set(runner.boundary_state) == {"target", "drafter"}


def test_a_field_that_a_plugin_forgets_is_named(single):
    """State that no commit mentions cannot reach text: the round that would use it raises."""
    model = single
    model.admit(0, PROMPTS[0], greedy=True)
    driver = Driver(model)
    with torch.inference_mode():
        driver.start([0])
        commit, store = model.target.store.commit_records, model.target.store
        store.commit_records = lambda *names: None
        try:
            with pytest.raises(DeclarationError, match=r"delta_keys \(0 times\)"):
                driver.round([0], 3)
            store.commit_records = lambda *names: commit(*names, *names)
            with pytest.raises(DeclarationError, match=r"delta_decays \(2 times\)"):
                driver.round([0], 3)
        finally:
            del store.commit_records


@torch.inference_mode()
def test_same_seed_gives_same_tokens_in_any_lane_and_batch(single):
    def sampled(layout: list[int | None], slots: list[int], drafts: int) -> list[list[int]]:
        """layout: lane order as request numbers or None for a dead lane; slots: slot of each request in lane order."""
        model = single
        live = [request for request in layout if request is not None]
        for request, slot in zip(live, slots, strict=True):
            model.admit(slot, PROMPTS[request], budget=24, top_k=20, top_p=0.95, seed=1000 + request)
        driver = Driver(model)
        driver.start(slots)
        order = iter(slots)
        lanes = [4 if request is None else next(order) for request in layout]
        while any(not c[-1].finish for c in driver.completions.values()):
            driver.round(slots, drafts, lanes=lanes)
        return {request: driver.tokens(slot) for request, slot in zip(live, slots, strict=True)}

    for drafts in (0, 5):
        alone = {request: sampled([request], [0], drafts)[request] for request in range(4)}
        for layout, slots in (
            ([0, 1, 2, 3], [0, 1, 2, 3]),
            ([3, 2, 1, 0], [0, 1, 2, 3]),
            ([2, None, 0, None], [3, 1]),
            ([None, 1], [2]),
            ([1, 3], [3, 0]),
        ):
            for request, tokens in sampled(layout, slots, drafts).items():
                assert tokens == alone[request], (drafts, layout, request)
