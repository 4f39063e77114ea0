"""Facts, fixtures and helpers of the suite, and the test that standard tests cannot be weakened in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.accepted import embedded_checkpoint
from specdec.drafting.recursive import RecursiveDrafter
from specdec.interfaces import Drafter
from specdec.recipes import recipe_book
from specdec.testing.conformance.bench import Bench, altered_verification, replaced
from specdec.testing.conformance.draws import Proposals
from specdec.testing.conformance.driver import Driver
from specdec.testing.conformance.explanations import Explainer, undeclared
from specdec.testing.conformance.near_ties import PlainText, follows
from specdec.testing.conformance.precision import PRECISIONS, Precision
from specdec.testing.conformance.prompts import lively_prompts
from specdec.testing.conformance.states import assert_same_state, committed
from specdec.testing.scripted import ScriptedDrafter

#: Where to go on when text differs.
WHICH_STATE = "test_feedback_is_the_row_of_the_last_consumed_token tells which state is wrong after a single round"
#: Names that the completeness check itself needs; no subclass may replace them.
_UNTOUCHABLE = ("test_standard_tests_are_not_weakened", "standard_tests")


@frozen(kw_only=True, eq=False)
class DraftStep:
    """One recursive step of a drafter in one round. residual: what it was conditioned on; output: what the next step
    gets."""

    residual: Tensor
    output: Tensor


@contextmanager
def recorded_steps(drafter: RecursiveDrafter[Any]) -> Iterator[list[DraftStep]]:
    """Inside the block every call of the drafter's ``step`` leaves its feedback and its output in the list."""
    steps: list[DraftStep] = []
    step = drafter.step

    def recorded(feedback: Tensor, tokens: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        output, logits = step(feedback, tokens, plan)
        steps.append(DraftStep(residual=feedback.clone(), output=output.clone()))
        return output, logits

    with replaced(drafter, "step", recorded):
        yield steps


class Conformance:
    """What a plugin says about itself, and what the tests share. Inherit ``RoundConformance``, not this class.

    Facts, all class attributes:

    ``recipe``
        name of the recipe.
    ``draft_lag``
        rows of draft history missing at N consumed tokens: 1 where row i needs token i + 1, 0 for windows of inputs.
    ``proposals``
        how drafts are drawn: "filtered" from the request's whole law; "temperature" from its temperature alone, as
        ``specdec.round.temperature_proposers`` does, in rounds of one lane other than in wider ones; "placed" if they are not
        drawn but given, through ``Proposer.place`` at every depth.
    ``reads_feedback``
        whether drafts are made from the target's feedback. False for one that looks at tokens alone, and then the suite checks
        that feedback changes none of them.
    ``interval_fields``
        state fields that describe the last round rather than the committed tokens; a prompt pass leaves other values in them.
    ``context``
        most tokens of one request on the bench; at least 160.

    Facts of one run, all class attributes; a plugin tests float64 on the CPU and, in further classes, what it is served with::

        class TestExampleOnCuda(RoundConformance):
            recipe = "example-1b"
            device, dtype, near_tie = "cuda", "bfloat16", 0.1

    ``device``
        where models and rounds are. On CUDA devices rounds run as captured graphs, unless a test records or changes what
        happens inside.
    ``dtype``
        of weights and activations: "float64", "float32" or "bfloat16".
    ``near_tie``
        in lower precision than float64, the difference of two logits of plain decoding below which another computation may choose
        the other token; see ``near_ties``. Measure what rounding does to the logits of your checkpoint, and declare a few times
        that; ``test_plain_outputs_are_worth_comparing`` fails if too many tokens are decided by less. Weights and choices
        (experts, selected rows) that turn rounding into other text make comparisons short.
    ``precision``
        how far two ways of computing the same state may differ; that of the dtype in ``precision.PRECISIONS`` unless given. A
        model that rounds activations to few codes needs a wider one in lower precision.
    ``crowd_slots``, ``crowd_batches``
        requests a round and runs of the tests that count outcomes; at least 3,072 outcomes.
    """

    recipe: ClassVar[str]
    draft_lag: ClassVar[int] = 1
    proposals: ClassVar[Proposals] = "filtered"
    reads_feedback: ClassVar[bool] = True
    interval_fields: ClassVar[tuple[str, ...]] = ("anchor",)
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float64"
    near_tie: ClassVar[float] = 0.0
    precision: ClassVar[Precision | None] = None
    crowd_slots: ClassVar[int] = 64
    crowd_batches: ClassVar[int] = 48
    context: ClassVar[int] = 192
    slots: ClassVar[int] = 4
    budget: ClassVar[int] = 40

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        replaced = [name for name in _UNTOUCHABLE if name in vars(cls)]
        if replaced:
            raise TypeError(f"{cls.__name__} replaces {', '.join(replaced)}, which keeps the suite honest; remove it")
        if cls.dtype not in PRECISIONS:
            raise TypeError(f"{cls.__name__}: dtype is {cls.dtype!r}, allowed: {', '.join(PRECISIONS)}")
        if cls.near_tie and cls.dtype == "float64":
            raise TypeError(f"{cls.__name__}: near_tie is {cls.near_tie:g}, but float64 decides every token; remove it")

    # --- what a plugin may override ----------------------------------------------------------------------------------

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder of a small checkpoint; the one that the plugin ships unless overridden.

        A random one of few layers and a small vocabulary is faster, and its drafter is rarely right by chance.
        """
        return embedded_checkpoint(recipe_book().recipe(cls.recipe))

    @classmethod
    def prepared(cls, bench: Bench) -> Bench:
        """Every bench of the suite passes through here once; the place to wrap what is under test."""
        return bench

    @classmethod
    def draft_steps(cls, bench: Bench) -> AbstractContextManager[list[DraftStep]] | None:
        """Records the recursive steps of the drafter inside a block, in order; None if the drafter has none.

        Known for a ``RecursiveDrafter``; a drafter with recursive steps of its own overrides this.
        """
        return recorded_steps(bench.drafter) if isinstance(bench.drafter, RecursiveDrafter) else None

    # --- parameters and fixtures ---------------------------------------------------------------------------------------

    @classmethod
    def parameters(cls) -> Mapping[str, Sequence[Any]]:
        """Values of every argument that standard tests are parametrised with."""
        widths = recipe_book().recipe(cls.recipe).widths.widths
        deepest = widths[-1] - 1
        return {
            "drafts": [width - 1 for width in widths if width > 1],
            "any_drafts": [width - 1 for width in widths],
            "accepted": list(range(deepest + 1)),
            "sequence": list(width_sequences(widths)),
            "chunking": ["whole", "ones", "sixteens", "one first", "page minus one", "threes"],
            "length": [1, 2, 3, 4, 5, 61, 62, 63, 64, 65, 66, 67, 68],
            "fault_row": [0, deepest // 2],
            "draft_rows": [0, 1, deepest, 2 * deepest + 1],
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrises by argument name."""
        for name, values in self.parameters().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint under test."""
        return cls.checkpoint(tmp_path_factory)

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, folder: Path) -> Bench:
        """Four slots: where rounds run."""
        return cls.build(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path) -> Bench:
        """One slot: whole prompts and plain decoding, never a draft."""
        return cls.build(folder, slots=1)

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, reference: Bench) -> list[PlainText]:
        """Greedy outputs of the four prompts by plain decoding."""
        return cls.plain_outputs(reference)

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode():
            yield
        torch.set_num_threads(threads)

    # --- builders, usable without pytest ---------------------------------------------------------------------------------

    @classmethod
    @torch.inference_mode()
    def build(
        cls, folder: Path, *, slots: int | None = None, context: int | None = None, dtype: str | None = None
    ) -> Bench:
        """A bench on a checkpoint folder, passed through ``prepared``."""
        bench = Bench.prepare(
            cls.recipe,
            folder,
            dtype=dtype or cls.dtype,
            slots=slots or cls.slots,
            context=context or cls.context,
            device=cls.device,
            captured=torch.device(cls.device).type == "cuda",
        )
        return cls.prepared(bench)

    @classmethod
    def prompts(cls, bench: Bench) -> list[list[int]]:
        """Four prompts: short, over several groups, a single token, just over a page. All benches have the same."""
        chosen = _prompts(cls.recipe, bench.directory, cls.dtype, cls.context, cls.budget, cls.near_tie)
        return [list(prompt) for prompt in chosen]

    @classmethod
    def text(cls, bench: Bench, length: int, seed: int = 17) -> list[int]:
        """Random token ids."""
        return torch.randint(0, bench.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    @classmethod
    @torch.inference_mode()
    def plain_outputs(cls, reference: Bench) -> list[PlainText]:
        """See ``plain``."""
        return [cls.decode(reference, prompt, cls.budget) for prompt in cls.prompts(reference)]

    @classmethod
    def decode(cls, bench: Bench, prompt: Sequence[int], budget: int) -> PlainText:
        """Plain greedy decoding of one request in slot 0: no drafter, one token a round."""
        bench.admit(0, prompt, budget=budget, greedy=True)
        rows = [bench.target.first_logits(bench.where(0))[0, : bench.vocab].double().cpu()]
        driver = cls.driver(bench, drafter=None)
        driver.start([0])
        with altered_verification(bench.target, bench.keep_rows):
            while driver.running([0]):
                driver.round([0], 0)
                rows.append(bench.chosen_by[0].to("cpu", copy=True))
        return PlainText(tuple(driver.tokens(0)), torch.stack(rows))

    @classmethod
    def driver(cls, bench: Bench, **options: Any) -> Driver:
        """A driver that knows this recipe's facts."""
        return Driver(bench, draft_lag=cls.draft_lag, **options)

    @classmethod
    def admit_all(cls, bench: Bench, **admission: Any) -> list[int]:
        """Admits the four prompts, greedy unless told otherwise; returns their slots."""
        admission = {"budget": cls.budget, **({} if "seed" in admission else {"greedy": True}), **admission}
        for slot, prompt in enumerate(cls.prompts(bench)):
            bench.admit(slot, prompt, **admission)
        return list(range(cls.slots))

    @classmethod
    def scripted(cls, bench: Bench, inner: Drafter | None = None) -> ScriptedDrafter:
        """A drafter whose proposals the test writes; inner: around another drafter than the bench's own."""
        if inner is None:
            bench.script.write({})
            return bench.script
        return ScriptedDrafter(inner, slots=bench.capacities.slots, max_draft_tokens=bench.recipe.max_draft_tokens)

    # --- checks ----------------------------------------------------------------------------------------------------------

    @classmethod
    def on_text(cls, driver: Driver, slot: int, plain: PlainText) -> bool:
        """Whether a slot's tokens are how ``plain`` begins; False behind a near tie. Raises AssertionError for any other
        difference: what a test expects of a request from ``plain`` holds as long as this does."""
        try:
            return follows(driver.tokens(slot), plain, cls.near_tie)
        except AssertionError as error:
            # pytest adds the compared values on lines of their own
            text = str(error).partition("\n")[0]
            raise AssertionError(f"slot {slot}: {text}; {WHICH_STATE}{undeclared(driver.bench)}") from None

    @classmethod
    def check_text(cls, driver: Driver, slots: Sequence[int], plain: Sequence[PlainText]) -> None:
        """Tokens of every slot are those of ``plain``, by slot, or part from them at a near tie. Raises AssertionError."""
        for slot in slots:
            found, wanted = driver.tokens(slot), plain[slot]
            if cls.on_text(driver, slot, wanted):
                assert len(found) == len(wanted), f"slot {slot} ends early: {found} against {list(wanted)}"

    @classmethod
    def check_values(cls, found: Tensor, wanted: Tensor, what: str) -> None:
        """Two ways of computing hidden states or logits agree in the suite's precision, token ids exactly. Raises
        AssertionError."""
        if not wanted.is_floating_point():
            assert torch.equal(found, wanted), f"{what}: {found.flatten().tolist()}, want {wanted.flatten().tolist()}"
            return
        wrong = cls.allowed().differences(found, wanted)
        assert wrong is None, f"{what}: {wrong}"

    @classmethod
    def allowed(cls) -> Precision:
        """See ``precision``."""
        return cls.precision or PRECISIONS[cls.dtype]

    @classmethod
    def check_state(cls, bench: Bench, reference: Bench, slot: int, sequence: Sequence[int]) -> None:
        """State of a slot that consumed ``sequence`` equals one prompt pass over it. Raises AssertionError."""
        reference.admit(0, sequence, greedy=True)
        for ours, theirs, rows in (
            (bench.target.store, reference.target.store, len(sequence)),
            (bench.drafter.store, reference.drafter.store, max(len(sequence) - cls.draft_lag, 0)),
        ):
            found = committed(ours, slot, rows, cls.interval_fields)
            expected = committed(theirs, 0, rows, cls.interval_fields)
            explain = Explainer(
                bench=bench,
                reference=reference,
                owner=ours.layout.owner,
                slot=slot,
                sequence=sequence,
                lag=cls.draft_lag,
                ignore=cls.interval_fields,
                found=found,
                expected=expected,
                precision=cls.allowed(),
            )
            assert_same_state(found, expected, owner=ours.layout.owner, precision=cls.allowed(), explain=explain)

    @classmethod
    def check_all(
        cls, bench: Bench, reference: Bench, driver: Driver, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> None:
        """``check_state`` for every slot; prompts by slot."""
        for slot in slots:
            cls.check_state(bench, reference, slot, [*prompts[slot], *driver.tokens(slot)[:-1]])

    # --- honesty -----------------------------------------------------------------------------------------------------------

    @classmethod
    def standard_tests(cls) -> dict[str, Any]:
        """Every test of the suite by name, as the suite defines it."""
        found: dict[str, Any] = {}
        for owner in cls.__mro__:
            if owner.__module__.startswith(__package__ or ""):
                for name, value in vars(owner).items():
                    if name.startswith("test_"):
                        found.setdefault(name, value)
        return found

    def test_standard_tests_are_not_weakened(self) -> None:
        """A subclass may replace a standard test only with ``@pytest.mark.xfail(reason=...)``, may not remove one and
        may not run fewer cases of one."""
        for name, values in Conformance.parameters.__func__(type(self)).items():  # type: ignore[attr-defined]
            missing = [value for value in values if value not in self.parameters().get(name, ())]
            assert not missing, f"cases of {name} are missing: {missing}"
        for name, standard in self.standard_tests().items():
            present = getattr(type(self), name, None)
            assert callable(present), f"{name} was removed; override it with @pytest.mark.xfail(reason=...) instead"
            if present is standard:
                marks = [mark.name for mark in getattr(standard, "pytestmark", ())]
                assert "skip" not in marks and "skipif" not in marks, f"{name} is skipped"
                continue
            reasons = [mark.kwargs.get("reason") for mark in getattr(present, "pytestmark", ()) if mark.name == "xfail"]
            assert any(reasons), f"{name} was overridden without @pytest.mark.xfail(reason=...)"


@cache
def _prompts(recipe: str, directory: Path, dtype: str, context: int, budget: int, near_tie: float) -> list[list[int]]:
    """See ``Conformance.prompts``. Chosen on the CPU on a bench of its own, so that no running request is disturbed."""
    bench = Bench.prepare(recipe, directory, slots=1, context=context, dtype=dtype)
    page = bench.recipe.target_layout.page_tokens
    with torch.inference_mode():
        return lively_prompts(bench, (7, 13, 1, page + 1), budget, near_tie=near_tie)


def width_sequences(widths: Sequence[int]) -> dict[str, list[int]]:
    """Draft counts of consecutive rounds by name, from a recipe's widths."""
    drafts = [width - 1 for width in widths]
    deepest, middle = drafts[-1], drafts[len(drafts) // 2]
    generator = torch.Generator().manual_seed(29)
    draws = torch.randint(0, len(drafts), (200,), generator=generator).tolist()
    return {
        "widest, one, widest": [deepest, 0] * 60,
        "one, widest": [0, deepest] * 60,
        "middle, one, next": [middle, 0, drafts[max(len(drafts) // 2 - 1, 0)]] * 60,
        "growing": drafts * 60,
        "shrinking": drafts[::-1] * 60,
        "random": [drafts[index] for index in draws],
    }


def require_copies(bench: Bench) -> None:
    """Skips a test of copied drafts where the recipe declares none."""
    if not bench.recipe.supports_history_drafts:
        pytest.skip(f"{bench.recipe.name} does not declare supports_history_drafts")


def require_logits(suite: Conformance) -> None:
    """Skips a test that changes draft logits where drafts are placed. That they are is checked by
    ``test_the_kept_law_is_the_drawn_one`` and ``test_every_draw_uses_the_words_of_its_position``."""
    if suite.proposals == "placed":
        pytest.skip("drafts are placed, not drawn from logits")


def next_tokens(output: Sequence[int], done: int, count: int, vocab: int, right: int) -> list[int]:
    """Drafts of which exactly the first ``right`` are what plain decoding emits after ``done`` tokens."""
    future = list(output[done : done + count])
    future += [0] * (count - len(future))
    return [token if depth < right else (token + 1) % vocab for depth, token in enumerate(future)]
