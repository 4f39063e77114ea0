"""What DeepSeek-V4.1 selects: compressed rows by index score on both levels, experts by router score; and with whose index keys.

Selections are compared with plain sorts in Python over scores of few different values, where equal ones are the rule.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from attrs import evolve
from deepseek_models import GOLDEN_PROMPT, write_golden_checkpoint
from deepseek_target import Driver
from torch import Tensor

from specdec_deepseek_v41.geometry import TINY
from specdec_deepseek_v41.indexer import Indexer
from specdec_deepseek_v41.mixture import Router
from specdec_deepseek_v41.rows import Lay, Rows

EXACT = 1e-12
CONTEXT = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_golden_checkpoint(tmp_path_factory.mktemp("golden"))


# --- compressed rows ------------------------------------------------------------------------------------------------------


def selection(driver: Driver, layer: int, positions: Tensor, scores: Tensor, candidates: Tensor | None = None):
    """Rows that queries of one lane at ``positions`` attend to at an index source with these scores [P, C], in order, and the
    candidates behind it."""
    target, indexer = driver.target, driver.target.layers[layer].indexer
    assert indexer is not None
    store, ratio = target.store, indexer.ratio
    # a row says which it is
    rows_of_slot = store.page_table[0]
    named = store[f"compressed_r{ratio}"][indexer.layer]
    named[rows_of_slot] = torch.arange(scores.shape[1], dtype=named.dtype).view(len(rows_of_slot), -1, 1)
    rows = Rows.build(
        store,
        Lay.rectangle(torch.tensor([0]), positions.unsqueeze(0), prompt=True),
        ratios=(1, 2),
        tokens=target.tokens,
        plain=target.plain_table,
        compressed=target.compressed_table,
        like=torch.zeros((), dtype=torch.float64),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "_scores", lambda self, x, qr, rows: scores.clone())
        x, qr = torch.zeros(len(positions), TINY.hidden_size), torch.zeros(len(positions), TINY.q_lora_rank)
        selected, kept = indexer(x, qr, rows, candidates)
    seen = selected.bias[:, 0, TINY.sliding_window :].isfinite()
    return [ids[own].int().tolist() for ids, own in zip(selected.keys[..., 0], seen, strict=True)], kept


def few_values(*shape: int, seed: int) -> Tensor:
    """Scores among which many are equal, most of them exact zeros."""
    drawn = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([0.0, 0.0, 0.0, -1.0, 0.5, 2.0], dtype=torch.float64)[drawn]


def best_rows(scores: list[float], allowed: list[int], count: int) -> list[int]:
    return sorted(allowed, key=lambda row: (-scores[row], row))[:count]


def best_blocks(scores: list[float], complete: int, size: int, count: int) -> set[int]:
    """Blocks by their best complete row, the newest before all others."""
    newest = (complete - 1) // size
    blocks = {block: max(scores[block * size : min((block + 1) * size, complete)]) for block in range(newest + 1)}
    blocks[newest] = math.inf
    return set(sorted(blocks, key=lambda block: (-blocks[block], block))[:count])


@torch.inference_mode()
@pytest.mark.parametrize("layer", [2, 4, 6])
def test_equal_scores_take_the_lower_row(directory, layer):
    """Every position of a context; a source selects among all complete rows, whether or not it publishes candidates."""
    driver = Driver(directory, context=CONTEXT)
    ratio = TINY.compress_ratios[layer]
    positions = torch.arange(CONTEXT)
    scores = few_values(CONTEXT, driver.target.tokens // ratio, seed=layer)
    found, _ = selection(driver, layer, positions, scores)
    for position, row, ids in zip(positions.tolist(), scores.tolist(), found, strict=True):
        assert ids == best_rows(row, list(range((position + 1) // ratio)), TINY.index_topk)
    # all equal: the oldest rows, though none says that it is worse than the newest
    found, _ = selection(driver, layer, positions[-1:], torch.zeros_like(scores[-1:]))
    assert found == [list(range(TINY.index_topk))]


@torch.inference_mode()
def test_candidates_restrict_the_second_level(directory):
    """Blocks of the candidate source by their best rows, lower block among equals, the newest always; later index sources select
    within them."""
    driver = Driver(directory, context=CONTEXT)
    size, count = TINY.candidate_block_size, TINY.candidate_topk_blocks
    positions = torch.arange(CONTEXT)
    first, second = (few_values(CONTEXT, driver.target.tokens, seed=seed) for seed in (1, 2))
    found, candidates = selection(driver, 6, positions, first)
    assert candidates is not None
    assert found[-1] == best_rows(first[-1].tolist(), list(range(CONTEXT)), TINY.index_topk), (
        "its own rows are not restricted"
    )
    restricted, passed = selection(driver, 8, positions, second, candidates)
    assert passed is candidates
    differs = 0
    for position in range(CONTEXT):
        complete = position + 1
        blocks = best_blocks(first[position].tolist(), complete, size, count)
        allowed = [row for row in range(complete) if row // size in blocks]
        assert restricted[position] == best_rows(second[position].tolist(), allowed, TINY.index_topk)
        differs += restricted[position] != best_rows(second[position].tolist(), list(range(complete)), TINY.index_topk)
    assert differs > CONTEXT // 2
    assert all(len(ids) == min(position + 1, TINY.index_topk) for position, ids in enumerate(restricted))


# --- index keys of a source ----------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("stale", [False, True], ids=["own keys", "keys of the last source"])
def test_decoding_inside_a_group_uses_the_keys_of_its_own_source(directory, monkeypatch, stale):
    """One token at a time. A public implementation turns to a source's index keys only when a group is complete, so in between
    the ratio-2 sources score against the keys that the ratio-1 source left: the same decoding with that rule is not the
    prompt's, from the first open group on."""
    driver, first, count = Driver(directory), 40, 24
    tokens = torch.tensor([*GOLDEN_PROMPT, *((11 * index + 5) % 512 for index in range(count))])[: first + count]
    wanted = driver.prefill(1, tokens)[1]
    driver.prefill(0, tokens[:first])
    plain, inside = Indexer._scores, [False]
    if stale:
        store = driver.target.store
        read = store.read_pages

        def aliased(name: str, layer: int, page_rows: Tensor, lanes: int) -> Tensor:
            own = read(name, layer, page_rows, lanes)
            if name != "index_keys_r2" or not inside[0]:
                return own
            return read("index_keys_r1", 0, page_rows, lanes)[:, : own.shape[1]]

        monkeypatch.setattr(store, "read_pages", aliased)

        def watched(self: Indexer, x: Tensor, qr: Tensor, rows: Rows) -> Tensor:
            inside[0] = bool((rows.lay.positions % 2 == 0).all())
            return plain(self, x, qr, rows)

        monkeypatch.setattr(Indexer, "_scores", watched)
    apart = [
        float((driver.step(0, [int(tokens[place])], 1)[0] - wanted[place]).abs().max())
        for place in range(first, first + count)
    ]
    if stale:
        assert apart[0] > 1e-3, "position 40 opens a group"
    else:
        assert max(apart) <= EXACT


# --- experts --------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_equal_router_scores_take_the_lower_expert(top_k):
    """The bias takes part in the selection and not in the weights."""
    experts, scale = 8, 1.5
    for seed, biased in product(range(20), (False, True)):
        logits, bias = few_values(30, experts, seed=seed), few_values(experts, seed=seed + 99) * biased
        ids, weights = Router(bias=bias, top_k=top_k, scale=scale)(logits)
        scores = torch.log1p(logits.exp()).sqrt()
        for row, own, shares in zip(scores, ids.tolist(), weights, strict=True):
            key = (row + bias).tolist()
            assert own == sorted(range(experts), key=lambda expert: (-key[expert], expert))[:top_k]
            torch.testing.assert_close(shares, scale * row[own] / row[own].sum(), rtol=1e-12, atol=0)


@torch.inference_mode()
def test_router_scores_have_the_golden_values(directory):
    """Scores 1.203… of layer 0 for the input 3x, through the weights of the selected experts."""
    block = Driver(directory).target.layers[0].forward
    x = 3 * (torch.arange(128, dtype=torch.float64) / 64 - 1)
    golden = (1.203759352, 0.7985614036, 1.0465333627, 1.5154536401)
    golden += (0.8471769554, 0.6721592528, 0.2734332041, 0.9946673393)
    logits = torch.nn.functional.linear(x, block.router).unsqueeze(0)
    every = evolve(block.route, top_k=8)
    ids, weights = every(logits)
    by_expert = torch.zeros(8, dtype=torch.float64).scatter(0, ids[0], weights[0])
    wanted = torch.tensor(golden, dtype=torch.float64)
    torch.testing.assert_close(by_expert, 1.5 * wanted / wanted.sum(), rtol=0, atol=1e-9)
    assert ids[0, :2].tolist() == [3, 0]
