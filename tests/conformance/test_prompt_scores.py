"""Log-probabilities of prompt tokens through the generation loop, against transformers' class in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from double_oracle import KeepDouble, double_model
from options_oracle import ranked_logprobs
from prefix_runs import with_drafter
from qwen_models import hf_model, lower_group_first
from small_checkpoint import write_small_checkpoint

from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.sampling.params import SamplingParams
from specdec.serving import prompt_scores
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.prompt_scores import PromptScores
from specdec.serving.request import Emission, Progress, Request, TokenLogprobs
from specdec.testing.drafters import WrappedDrafter

SEED = 5
#: More than a page of 64 tokens, and no multiple of the groups of four.
LENGTH = 70
CHUNKS = (1, 7, LENGTH - 1, LENGTH, LENGTH + 1)
EOS = 500
TOP = 20
#: By dtype: the largest difference of a log-probability. The oracle is exact; results are rounded to float32.
CLOSE = {"float64": 2e-6, "float32": 2e-5}
PROMPT = torch.randint(0, EOS, (LENGTH,), generator=torch.Generator().manual_seed(31)).tolist()
PROMPT[20] = PROMPT[66] = EOS


@frozen(kw_only=True, eq=False)
class Scored:
    """What one run said: progress and scores by request number, and the emitted tokens."""

    progress: dict[int, list[int]]
    scores: dict[int, list[TokenLogprobs]]
    tokens: dict[int, list[int]]

    @classmethod
    def of(cls, events: Iterator[Any]) -> Scored:
        found = cls(progress={}, scores={}, tokens={})
        for event in events:
            found.add(event)
        return found

    def add(self, event: Progress | Emission) -> None:
        if isinstance(event, Progress):
            self.progress.setdefault(event.request, []).append(event.consumed)
            if event.logprobs is not None:
                self.scores.setdefault(event.request, []).extend(event.logprobs)
        else:
            self.tokens.setdefault(event.request, []).extend(event.tokens)


class PromptBench:
    """Models of one checkpoint, and what transformers' class says of prompts."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.directory = write_small_checkpoint(directory, seed=SEED)
        oracle = double_model(hf_model(SEED))

        @cache
        def logits_of(prompt: tuple[int, ...]) -> list[list[float]]:
            with torch.inference_mode(), KeepDouble(), lower_group_first():
                return oracle(torch.tensor([prompt])).logits[0].tolist()

        self._logits_of = logits_of
        self._prepare = cache(self._prepared)

    def _prepared(self, dtype: str, drafts: bool) -> LoadedModel:
        config = PreparationConfig.for_recipe(
            recipe_book().recipe("qwen3.8-flash"),
            concurrency=3,
            speculative=drafts,
            max_draft_tokens=7 if drafts else None,
            context=160,
            prefill_tokens=(max(CHUNKS),),
            snapshot_bytes=1 << 24,
            adaptive_verification=False,
        )
        return LoadedModel.prepare(recipe_book().recipe("qwen3.8-flash"), config, directory=self.directory, dtype=dtype)

    @contextmanager
    def model(self, chunk: int = LENGTH + 1, *, dtype: str = "float64", drafts: bool = True) -> Iterator[LoadedModel]:
        """A model whose prompt chunks have at most that many rows."""
        model = self._prepare(dtype, drafts)
        prepared = model.capacities
        model.capacities = evolve(prepared, prefill_rows=chunk)
        try:
            yield model
        finally:
            model.capacities = prepared

    def check(self, found: Sequence[TokenLogprobs], prompt: Sequence[int], *, top: int, dtype: str = "float64") -> None:
        """One score for each token but the first: value, ranking and values of the ranked. Raises AssertionError.

        The ranking is compared in float64 only; in float32, rounding may exchange neighbours.
        """
        close = CLOSE[dtype]
        assert [one.token for one in found] == list(prompt[1:])
        for row, one in enumerate(found):
            wanted, ranking = ranked_logprobs(self._logits_of(tuple(prompt))[row], prompt[row + 1], top)
            assert one.logprob == pytest.approx(wanted, abs=close), row
            assert [value for _, value in one.top] == pytest.approx([value for _, value in ranking], abs=close), row
            if dtype == "float64":
                assert [token for token, _ in one.top] == [token for token, _ in ranking], row


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PromptBench:
    return PromptBench(tmp_path_factory.mktemp("prompts") / "checkpoint")


def scored(prompt: Sequence[int] = PROMPT, *, top: int | None = TOP, new: int = 3, **options: Any) -> Request:
    return Request(
        prompt=prompt,
        max_new_tokens=new,
        sampling=SamplingParams(greedy=True),
        stop_ids=(),
        prompt_logprobs=top,
        **options,
    )


# --- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "plain"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_b51_prompt_scores_equal_the_oracle(bench: PromptBench, dtype: str, chunk: int, drafts: bool) -> None:
    """Chunks around the prompt's length and small ones, drafter on and off; the text is that of a request without scores."""
    with bench.model(chunk, dtype=dtype, drafts=drafts) as model:
        found = Scored.of(Generator(model).run([scored()]))
        plain = Scored.of(Generator(model).run([scored(top=None)]))
    bench.check(found.scores[0], PROMPT, top=TOP, dtype=dtype)
    assert not plain.scores
    assert (found.progress, found.tokens) == (plain.progress, plain.tokens)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_beside_other_requests(bench: PromptBench, chunk: int) -> None:
    """Prompts are scored between the rounds of others, and one after another; each asks for its own number of alternatives."""
    prompts = [PROMPT, PROMPT[:33], PROMPT[5:], PROMPT[40:43], PROMPT[::-1]]
    tops = [3, None, 0, 20, 1]
    with bench.model(chunk) as model:
        generator = Generator(model, width=4)
        for number, prompt in enumerate(prompts):
            generator.submit(scored(prompt, top=tops[number], new=4 + 5 * number))
        found = Scored.of(generator.run())
        for number, prompt in enumerate(prompts):
            if tops[number] is None:
                assert number not in found.scores
            else:
                bench.check(found.scores[number], prompt, top=tops[number])
            alone = Scored.of(Generator(model, width=4).run([scored(prompt, top=None, new=4 + 5 * number)]))
            assert found.tokens[number] == alone.tokens[0]


@pytest.mark.parametrize("chunk", [7, LENGTH + 1])
@pytest.mark.parametrize("drafts", [True, False], ids=["drafter", "plain"])
def test_checkpoints_of_a_prompt_change_no_score(bench: PromptBench, chunk: int, drafts: bool) -> None:
    """A scored prompt is consumed from its first token though a checkpoint has all of it, and leaves checkpoints itself."""
    with bench.model(chunk, drafts=drafts) as model:
        cache_of = prefix_cache(model)
        generator = Generator(model, prefix_cache=cache_of)
        runs = [Scored.of(generator.run([scored(top=top)])) for top in (5, 5, None, 5)]
        lookups = cache_of.statistics.lookups
        cache_of.clear()
        cold = Scored.of(Generator(model).run([scored(top=5)]))
        for number in (0, 1, 3):
            bench.check(runs[number].scores[number], PROMPT, top=5)
            assert runs[number].progress[number][0] == min(chunk, 64), "it went on from a checkpoint"
        assert not runs[2].scores and runs[2].progress[2] == [LENGTH], "the scored runs left no checkpoint"
        assert lookups == cache_of.statistics.full_hits == 1
        assert [list(run.tokens.values()) for run in runs] == [list(cold.tokens.values())] * 4
        assert all(pool.free == pool.pages for pool in model.pools)


def test_what_has_no_score(bench: PromptBench) -> None:
    """A prompt of one token; earlier output of a resumed request; alternatives that nobody asked for."""
    with bench.model(16) as model:
        found = Scored.of(Generator(model).run([scored([4])]))
        assert found.scores[0] == [] and len(found.tokens[0]) == 3
        whole = Scored.of(Generator(model).run([scored(new=30)]))
        # 70 prompt tokens and 22 of output: chunks of the prompt, one across its end, and one of output only
        resumed = Scored.of(Generator(model).run([scored(new=30, output=whole.tokens[0][:23], top=0)]))
    assert resumed.progress[0] == [16, 32, 48, 64, 80, 92]
    bench.check(resumed.scores[0], PROMPT, top=0)
    assert resumed.tokens[0] == whole.tokens[0][23:]


@pytest.mark.parametrize("at_once", [1, 3 * 512, 5 * 512 + 511])
def test_few_rows_of_logits_exist_at_once(bench: PromptBench, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Slices that do not divide the chunk; rows that score nothing are not computed."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(prompt_scores, "LOGITS_AT_ONCE", at_once)
    with bench.model(29) as model:
        compute = model.target.prefill_logits

        def recording(rows: int, first: int = 0) -> torch.Tensor:
            asked.append((rows, first))
            return compute(rows, first)

        monkeypatch.setattr(model.target, "prefill_logits", recording)
        bench.check(Scored.of(Generator(model).run([scored()])).scores[0], PROMPT, top=TOP)
        assert max(rows for rows, _ in asked) == max(at_once // 512, 1)
        assert sum(rows for rows, _ in asked) == LENGTH - 1
        asked.clear()
        Scored.of(Generator(model).run([scored(top=None)]))
        assert not asked


# --- delivery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
def test_every_score_is_delivered_once_wherever_the_caller_stops(bench: PromptBench, caching: bool) -> None:
    """The caller leaves ``step`` after its first, second, third … event, other requests before and behind."""
    with bench.model(7) as model:
        generator = Generator(model, prefix_cache=prefix_cache(model) if caching else None)
        prompts = {generator.submit(scored(prompt, top=2)): prompt for prompt in (PROMPT[:9], PROMPT, PROMPT[30:])}
        found = Scored.of(iter(()))
        for patience in range(1, 200):
            events = generator.step()
            for _, event in zip(range(patience % 13), events, strict=False):
                found.add(event)
            events.close()
            if not generator._waiting and not generator._residents:
                break
        assert len(found.progress[1]) > 9, "the prompt was consumed in one go"
        for number, prompt in prompts.items():
            bench.check(found.scores[number], prompt, top=2)
        generator._prefixes.cache.clear()


def test_a_chunk_that_failed_is_scored_when_it_is_repeated(bench: PromptBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that were read and never delivered are not lost."""
    with bench.model(20) as model:
        generator = Generator(model)
        generator.submit(scored(top=1))
        found = Scored.of(iter(()))
        with monkeypatch.context() as patch:
            absorb, calls = model.drafter.prefill, iter((False, True))

            def failing(*arguments: Any) -> None:
                if next(calls):
                    raise OSError("out of luck")
                absorb(*arguments)

            patch.setattr(model.drafter, "prefill", failing)
            steps = generator.step()
            found.add(next(steps))
            with pytest.raises(OSError, match="out of luck"):
                next(steps)
        assert len(found.scores[0]) == 20
        for event in generator.run():
            found.add(event)
    bench.check(found.scores[0], PROMPT, top=1)


def test_scores_of_a_cancelled_prompt_are_not_the_next_ones(bench: PromptBench) -> None:
    with bench.model(20) as model:
        generator = Generator(model)
        first, second = generator.submit(scored(top=4)), generator.submit(scored(PROMPT[::-1], top=2))
        found = Scored.of(iter(()))
        for event in generator.step():
            found.add(event)
            if isinstance(event, Progress) and event.consumed == 40 and event.request == first:
                generator.cancel(first)
        for event in generator.run():
            found.add(event)
    assert len(found.scores[first]) == 40
    bench.check(found.scores[second], PROMPT[::-1], top=2)


# --- buffers -----------------------------------------------------------------------------------------------------------


class Overwriting(WrappedDrafter):
    """Absorbs a chunk, then uses all hidden states that ``rows()`` names, and its own feedback argument, as scratch."""

    def __init__(self, inner: Any, rows: Callable[[], torch.Tensor]) -> None:
        super().__init__(inner)
        self.rows = rows

    def prefill(
        self, feedback: torch.Tensor, tokens: torch.Tensor, slot: torch.Tensor, start: int | torch.Tensor
    ) -> None:
        """Leaves nothing of what it was given."""
        super().prefill(feedback, tokens, slot, start)
        for buffer in (feedback, self.rows()):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(start)))


class SharedRows:
    """Makes a target compute its prompt logits from the feedback rows that it handed out: right until these are overwritten."""

    def __init__(self, target: Any, patch: pytest.MonkeyPatch, *, shared: bool) -> None:
        self.last = torch.empty(0)
        prefill = target.prefill

        def keeping(*arguments: Any) -> torch.Tensor:
            self.last = prefill(*arguments)
            return self.last

        def late(rows: int, first: int = 0) -> torch.Tensor:
            streams = self.last[first : first + rows].unflatten(1, (target.geometry.hc_count, -1))
            return F.linear(target.final_mixer.mix(streams)[0], target.head)

        patch.setattr(target, "prefill", keeping)
        if shared:
            patch.setattr(target, "prefill_logits", late)


@pytest.mark.parametrize("late", [False, True], ids=["before the drafter", "after the drafter"])
@pytest.mark.parametrize("shared", [False, True], ids=["rows of their own", "shared rows"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_b51_a_drafter_that_overwrites_hidden_states_changes_no_score(
    bench: PromptBench, monkeypatch: pytest.MonkeyPatch, chunk: int, shared: bool, late: bool
) -> None:
    """Either of two is enough: the target keeps rows of its own, or scores are read before the drafter runs. A variant with
    neither, which is the fault, is caught; so the overwriting is real."""
    if late:
        read, take = PromptScores.read, PromptScores.take
        pending: list[Any] = []
        monkeypatch.setattr(PromptScores, "read", lambda *arguments: pending.append(arguments))

        def after(self: PromptScores) -> Any:
            read(*pending.pop())
            return take(self)

        monkeypatch.setattr(PromptScores, "take", after)
    with bench.model(chunk) as model:
        rows = SharedRows(model.target, monkeypatch, shared=shared)
        overwriting = with_drafter(model, Overwriting(model.drafter, lambda: rows.last))
        found = Scored.of(Generator(overwriting).run([scored(top=3)])).scores[0]
    if late and shared:
        with pytest.raises(AssertionError):
            bench.check(found, PROMPT, top=3)
    else:
        bench.check(found, PROMPT, top=3)


@torch.inference_mode()
def test_rows_of_a_chunk_are_gone_after_the_next_round(bench: PromptBench) -> None:
    with bench.model(16) as model:
        target = model.target
        Scored.of(Generator(model).run([scored(PROMPT[:20], new=1)]))
        assert target.prefill_logits(4).shape == (4, 512), "the last chunk of the prompt, and no round after it"
        for rows, first in ((5, 0), (1, 4), (0, 0), (1, -1)):
            with pytest.raises(ValueError, match="prompt chunk of 4; rows 0 to 3 are there"):
                target.prefill_logits(rows, first)
        Scored.of(Generator(model).run([scored(PROMPT[:20], new=3)]))
        with pytest.raises(RuntimeError, match="score a chunk right after its prefill"):
            target.prefill_logits(1)
