"""Random words of real rounds: one range per committed position, the request's own, whatever ran before or beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sampling_oracle
import torch
from attrs import frozen
from markov import MarkovModel, random_table
from options_bench import PROMPTS, Bench
from round_driver import Driver

from specdec.sampling import philox, sampler

VOCAB = 9
WORDS = 7 + 2
TABLES = random_table(VOCAB, 5, dtype=torch.float32), random_table(VOCAB, 6, dtype=torch.float32)
OPTIONS: dict[str, Any] = {"temperature": 2.0, "frequency_penalty": 0.5, "logit_bias": {2: 1.0}}


def markov() -> MarkovModel:
    return MarkovModel.build(*TABLES)


# --- ranges --------------------------------------------------------------------------------------------------------


@frozen(kw_only=True, eq=False)
class Drawn:
    """First words per lane of one Philox evaluation: target and draft domain, [2][B], with the lanes' seeds."""

    seeds: list[int]
    target: list[int]
    draft: list[int]
    count: int


@torch.inference_mode()
@pytest.mark.parametrize("schedule", range(3))
def test_ranges_of_a_long_random_schedule_never_overlap(monkeypatch: pytest.MonkeyPatch, schedule: int) -> None:
    """Widths, batches, ceilings, dead lanes and requests that come and go; 300 rounds. Every live range is looked at."""
    drawn: list[Drawn] = []
    words = philox.philox_words

    def recording(seed: torch.Tensor, offset: torch.Tensor, count: int, *rest: Any) -> torch.Tensor:
        target, draft = offset.tolist()
        drawn.append(Drawn(seeds=seed[0].tolist(), target=target, draft=draft, count=count))
        return words(seed, offset, count, *rest)

    monkeypatch.setattr(sampler, "philox_words", recording)
    generator = torch.Generator().manual_seed(schedule)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    model, driver = markov(), None
    used: dict[int, list[tuple[int, int]]] = {}
    live: dict[int, int] = {}
    driver = Driver(model)
    consumed: dict[int, int] = {}
    for number in range(300):
        fresh = [slot for slot in range(4) if slot not in live]
        if fresh and pick(0, 3) == 0:
            slot = fresh[0]
            seed = 1000 + number
            prompt = [pick(0, VOCAB) for _ in range(pick(1, 6))]
            model.admit(slot, prompt, budget=pick(1, 40), seed=seed, **OPTIONS)
            live[slot], consumed[seed] = seed, len(prompt)
            (completion,) = driver.start([slot], extended=bool(pick(0, 2)))
            lanes, first = [slot], True
        elif live:
            slots = sorted(live)
            lanes = [*slots, *[4] * pick(0, 2)]
            driver.round(slots, pick(0, 8), lanes=lanes, extended=bool(pick(0, 2)))
            first = False
        else:
            continue
        record = drawn.pop()
        assert not drawn and record.count == WORDS
        for lane, slot in enumerate(lanes):
            if slot not in live:
                continue
            seed, position = live[slot], consumed[live[slot]] - first
            assert record.seeds[lane] == seed
            assert record.target[lane] == position * WORDS
            assert record.draft[lane] == position * WORDS + 2**60
            used.setdefault(seed, []).append((record.target[lane], record.target[lane] + WORDS))
            completion = driver.completions[slot][-1]
            consumed[seed] = completion.consumed
            if completion.finish or pick(0, 40) == 0:  # an abort now and then
                model.arena.requests.retire(slot)
                del live[slot]
    assert len(used) > 20 and sum(map(len, used.values())) > 250
    for ranges in used.values():
        ordered = sorted(ranges)
        assert ranges == ordered
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
        assert ordered[-1][1] < 2**60


# --- seeds -----------------------------------------------------------------------------------------------------------


def outputs(model: Any, requests: dict[int, dict[str, Any]], drafts: int, *, budget: int = 16) -> dict[int, list[int]]:
    """Tokens by slot. requests: options by slot; ``prompt`` among them."""
    for slot, options in requests.items():
        values = {"prompt": [slot], **options}
        model.admit(slot, values.pop("prompt"), budget=budget, **values)
    driver, slots = Driver(model), list(requests)
    driver.start(slots, extended=True)
    while running := driver.running(slots):
        driver.round(running, drafts, extended=True)
    return {slot: driver.tokens(slot) for slot in slots}


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_same_seed_same_text_again_and_with_a_neighbour(drafts: int) -> None:
    one: dict[str, Any] = {"prompt": [3, 1], "seed": 42, **OPTIONS}
    model = markov()
    first = outputs(model, {0: one}, drafts)[0]
    torch.manual_seed(99)
    assert outputs(model, {0: one}, drafts)[0] == first
    assert outputs(model, {1: {"seed": 7, "presence_penalty": 1.0}, 3: one}, drafts)[3] == first
    assert outputs(markov(), {2: one}, drafts)[2] == first
    assert outputs(model, {0: {**one, "seed": 43}}, drafts)[0] != first


@torch.inference_mode()
@pytest.mark.parametrize("seeded", list(itertools.product([False, True], repeat=3)), ids=str)
def test_batches_that_mix_seeded_and_unseeded_requests(seeded: tuple[bool, ...]) -> None:
    """A request without a seed has the default one: every lane equals its solo run and emits tokens of its law."""
    requests = {
        slot: {"prompt": [slot + 2, 5], **OPTIONS, **({"seed": 100 + slot} if given else {})}
        for slot, given in enumerate(seeded)
    }
    together = outputs(markov(), requests, 3)
    for slot, options in requests.items():
        assert together[slot] == outputs(markov(), {slot: options}, 3)[slot]
        assert len(together[slot]) == 16 and len(set(together[slot])) > 2


# --- aborted and resumed -----------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("greedy", [False, True])
def test_resumed_requests_continue_as_if_nothing_had_happened(
    tmp_path_factory: pytest.TempPathFactory, drafts: int, greedy: bool
) -> None:
    """A request is dropped after some rounds, the last of which nobody read, and admitted again with what was read so far."""
    bench = Bench.build(tmp_path_factory.mktemp("resume"))
    model, budget = bench.model, 20
    options: dict[str, Any] = {
        "seed": 77,
        "greedy": greedy,
        "frequency_penalty": 0.75,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.25,
        "min_new_tokens": 15,
        "stops": (0, 9),
        **({} if greedy else {"temperature": 1.5}),
    }

    def run(output: list[int], slot: int, *, rounds: int | None = None) -> list[list[int]]:
        """Emissions from where the output ends."""
        model.admit(slot, PROMPTS[0], budget=budget, output=tuple(output), **options)
        driver = Driver(model)
        if not output:
            driver.start([slot], extended=True)
        while (not driver.completions or driver.running([slot])) and (rounds is None or driver.number < rounds):
            driver.round([slot], drafts, extended=True)
        return [list(completion.tokens) for completion in driver.completions[slot]]

    whole = run([], 0)
    assert len(whole) > 4
    for kept in range(1, len(whole)):
        # one more round than was read runs and is lost
        assert run([], 1, rounds=kept + 1) == whole[: kept + 1]
        read = [token for tokens in whole[:kept] for token in tokens]
        if len(read) < budget:
            slot = kept % 4
            assert run(read, slot) == whole[kept:], f"after {kept} emissions"
            counts = model.arena.requests.options.counts[slot].tolist()
            everything = [token for tokens in whole for token in tokens]
            assert counts == [everything.count(token) for token in range(16)]


@torch.inference_mode()
def test_earlier_output_as_prompt_draws_the_word_of_the_same_position() -> None:
    """Without drafts a round draws one token with the first word of its position, and so does a first token one position
    later: the text goes on unchanged where no option counts the output."""
    sampled: dict[str, Any] = {"seed": 5, "temperature": 1.5}
    whole = outputs(markov(), {0: {"prompt": [3, 1], **sampled}}, 0)[0]
    for cut in range(1, 15):
        rest = outputs(markov(), {0: {"prompt": [3, 1, *whole[:cut]], **sampled}}, 0, budget=16 - cut)[0]
        assert whole[:cut] + rest == whole


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_every_draft_was_drawn_from_the_law_that_was_kept(dtype: torch.dtype, temperature: float) -> None:
    """Drawing again by hand, from the kept row and the draft domain's words, gives the draft; the law is the drafter's at that
    temperature, whatever penalties the request has."""
    model = MarkovModel.build(TABLES[0], TABLES[1].to(dtype))
    options: dict[str, Any] = {"temperature": temperature, "frequency_penalty": 2.0, "logit_bias": {4: 50.0}}
    for slot in range(4):
        model.admit(slot, [slot, 3], seed=900 + slot, **options)
    driver, slots, drafts = Driver(model), [0, 1, 2, 3], 5
    driver.start(slots, extended=True)
    for _ in range(6):
        consumed = [driver.completions[slot][-1].consumed for slot in slots]
        pending = [driver.completions[slot][-1].pending for slot in slots]
        driver.round(slots, drafts, extended=True)
        runner = driver._rounds[(4, drafts)]
        for slot in slots:
            token = pending[slot]
            for depth in range(drafts):
                kept = runner.draft_probs[slot, depth].numpy()
                scaled = TABLES[1].to(dtype)[token].double() / temperature
                torch.testing.assert_close(torch.from_numpy(kept).double(), scaled.softmax(-1), rtol=1e-5, atol=1e-7)
                word = sampling_oracle.word(900 + slot, consumed[slot] * WORDS + 2**60 + depth)
                token = int(runner.draft_tokens[slot, depth])
                assert sampling_oracle.draw(kept, sampling_oracle.uniform(word)) == token
