"""Target rows against transformers' ``glm5_next`` text class in float64: prompts, chunkings, rounds with rejections."""

from __future__ import annotations

import copy

import pytest
import torch
from attrs import evolve, frozen
from glm_models import prepare, write_random_checkpoint
from glm_oracle import TargetOracle

from specdec.errors import DeclarationError
from specdec.state.requests import CONSUMED, FINISH
from specdec_glm53.geometry import TINY, Geometry
from specdec_glm53.latent_attention import IndexedAttention

LENGTH = 140
VOCABULARY = 512
FIRST = 5
SLOT = torch.tensor([0])
# The oracle is exact, so the error is that of the compared precision; h and the logits have a spread of about one.
TOLERANCES = {"float32": 1e-4, "float64": 1e-11}
#: Positions of a context of 180 tokens and the widest round.
POSITIONS = 192


@frozen(kw_only=True, eq=False)
class Case:
    """Tokens, what the oracle says about them, and a checkpoint of the same weights."""

    directory: object
    oracle: TargetOracle
    tokens: torch.Tensor  # [LENGTH]
    hidden: torch.Tensor  # [LENGTH, H]
    logits: torch.Tensor  # [LENGTH, V]


@frozen(kw_only=True, eq=False)
class Window:
    """One verification: its tokens [W], how many of them stand, the logits [W, V] of all of them."""

    tokens: torch.Tensor
    taken: int
    logits: torch.Tensor


def make_case(tmp_path_factory, seed: int, geometry: Geometry = TINY) -> Case:
    oracle = TargetOracle(seed, geometry)
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed + 7))
    hidden = oracle.rows(tokens)
    return Case(
        directory=write_random_checkpoint(tmp_path_factory.mktemp("tiny"), seed, geometry),
        oracle=oracle,
        tokens=tokens,
        hidden=hidden,
        logits=oracle.logits(hidden),
    )


@pytest.fixture(scope="module", params=range(4))
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory, request.param)


@pytest.fixture(params=TOLERANCES)
def dtype(request):
    return request.param


def open_slot(directory, dtype: str):
    """A target whose slot 0 owns all pages."""
    target = prepare(directory, dtype=dtype, slots=1, context=180).target
    target.store.set_pages(0, range(1, 1 + target.store.page_table.shape[1]))
    assert target.tokens == POSITIONS
    return target


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return (ours.double() - wanted).abs().max().item()


@torch.inference_mode()
def test_whole_prompt_matches(case, dtype):
    target = open_slot(case.directory, dtype)
    rows = target.prefill(case.tokens, SLOT, 0)
    assert distance(rows, case.hidden) <= TOLERANCES[dtype]
    assert distance(target.prefill_logits(LENGTH), case.logits) <= TOLERANCES[dtype]
    assert distance(target.first_logits(SLOT), case.logits[-1:]) <= TOLERANCES[dtype]
    assert target.faults(SLOT).item() == 0


@torch.inference_mode()
@pytest.mark.parametrize(
    "chunks", [(1,) * LENGTH, (1, 139), (37, 64, 39), (63, 1, 1, 75), (4, 3, 2, 1, 130), (13, 12, 11, 10) * 4]
)
def test_chunked_prompt_matches_in_every_row(case, dtype, chunks):
    target = open_slot(case.directory, dtype)
    start, worst = 0, 0.0
    for size in chunks:
        chunk = case.tokens[start : start + size]
        if len(chunk):
            rows = target.prefill(chunk, SLOT, start)
            worst = max(worst, distance(rows, case.hidden[start : start + len(chunk)]))
            assert torch.equal(target.feedback(SLOT), rows[-1:])
        start += len(chunk)
    assert start == LENGTH and worst <= TOLERANCES[dtype]
    assert target.faults(SLOT).item() == 0


@pytest.fixture(scope="module")
def windows(case):
    """Forty windows of width 1 to 8 after ``FIRST`` tokens, tokens that do not stand wrong ones: the oracle runs a window on a
    copy of its cache and the accepted prefix on the cache itself."""
    generator = torch.Generator().manual_seed(3)
    cache = case.oracle.cache()
    case.oracle.rows(case.tokens[:FIRST], cache)
    found, consumed = [], FIRST
    widths = torch.arange(40)[torch.randperm(40, generator=generator)] % 8 + 1
    for number, width in enumerate(widths.tolist()):
        # leaves a token for each window that follows
        most = min(width, LENGTH - consumed - (39 - number))
        taken = int(torch.randint(1, most + 1, (), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (width,), generator=generator)
        tokens[:taken] = case.tokens[consumed : consumed + taken]
        after = copy.deepcopy(cache)
        found.append(Window(tokens=tokens, taken=taken, logits=case.oracle.logits(case.oracle.rows(tokens, after))))
        if taken == width:
            cache = after
        else:
            case.oracle.rows(tokens[:taken], cache)
        consumed += taken
    assert consumed > 100
    return found


@torch.inference_mode()
@pytest.mark.parametrize("ring", [12, 10])
def test_forty_rounds_with_rejections_match(case, windows, dtype, ring):
    """Every row of every verification, the rejected ones included; ten ring entries are the fewest that a layout may have."""
    model = prepare(case.directory, dtype=dtype, slots=3, context=180, ring_extent=ring)
    model.admit(2, case.tokens[:FIRST].tolist())
    target, table = model.target, model.arena.requests
    slot, consumed, worst = torch.tensor([2]), FIRST, 0.0
    for window in windows:
        table.integers[2, CONSUMED] = consumed
        table.integers[2, FINISH] = 0
        lanes = table.lanes(slot)
        worst = max(worst, distance(target.verify(window.tokens.unsqueeze(0), lanes)[0], window.logits))
        target.commit(lanes, torch.tensor([window.taken]))
        consumed += window.taken
        # the accepted prefixes leave what one prompt pass leaves
        worst = max(worst, distance(target.feedback(slot), case.hidden[consumed - 1 : consumed]))
    assert worst <= TOLERANCES[dtype]
    assert target.faults(slot).item() == 0


@torch.inference_mode()
@pytest.mark.parametrize(("budget", "form"), [(32, (True, True)), (96, (True, False)), (192, (False, False))])
def test_every_form_of_attention_matches(tmp_path_factory, dtype, budget, form):
    """Gathered tokens, a mask over the context, and everything visible: the form follows from budget and context."""
    case = make_case(tmp_path_factory, 4, evolve(TINY, index_topk=budget))
    target = open_slot(case.directory, dtype)
    seen = []
    call = IndexedAttention.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            IndexedAttention,
            "__call__",
            lambda self, x, plan, layer: (seen.append((plan.select, plan.gather)), call(self, x, plan, layer))[1],
        )
        rows = target.prefill(case.tokens, SLOT, 0)
    assert set(seen) == {form}
    assert distance(rows, case.hidden) <= TOLERANCES[dtype]
    # the budget decides what rows past it attend to, and nothing before
    wider = TargetOracle(4, evolve(TINY, index_topk=2 * budget)).rows(case.tokens)
    apart = (wider - case.hidden).abs().amax(-1)
    assert apart[: budget + 3].max() <= 1e-11
    assert (apart[budget + 8 :] > 1e-3).all()


def test_a_ring_one_entry_too_small_is_refused(case):
    with pytest.raises(DeclarationError, match=r"raw_keys.*extent 9.*needs at least 10"):
        prepare(case.directory, ring_extent=9)
