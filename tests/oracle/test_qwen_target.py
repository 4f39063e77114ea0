"""Target logits against transformers' ``qwen4_exp`` class."""

from __future__ import annotations

import pytest
import torch
from qwen_models import hf_model, lower_group_first, prepare, write_random_checkpoint

from specdec.state.requests import CONSUMED, FINISH

LENGTH = 150
EOS = 500


@pytest.fixture(scope="module", params=[0, 1])
def case(request, tmp_path_factory):
    """Seed, tokens with end-of-text inside, the oracle's logits, and a checkpoint of the same weights."""
    seed = request.param
    directory = write_random_checkpoint(tmp_path_factory.mktemp("tiny"), seed)
    generator = torch.Generator().manual_seed(seed + 7)
    tokens = torch.randint(0, 500, (LENGTH,), generator=generator)
    tokens[[20, 77, 78, 120]] = EOS
    with torch.inference_mode(), lower_group_first():
        logits = hf_model(seed)(tokens.unsqueeze(0)).logits[0]
    return tokens, logits, directory


@torch.inference_mode()
def test_one_prompt_chunk_matches(case):
    tokens, expected, directory = case
    model = prepare(directory)
    target = model.target
    target.store.set_pages(0, range(1, 1 + target.store.page_table.shape[1]))
    slot = torch.tensor([0])
    worst = 0.0
    # every position: logits of growing prompts come from the sampling vector that each chunk of one row saves
    for position in range(LENGTH):
        target.prefill(tokens[position : position + 1], slot, position)
        worst = max(worst, (target.first_logits(slot)[0] - expected[position]).abs().max().item())
    assert worst <= 2e-5
    assert target.faults(slot).item() == 0


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [(150,), (1, 149), (37, 64, 49), (63, 1, 1, 85), (4, 3, 2, 1, 140)])
def test_chunked_prompt_matches_at_every_boundary(case, chunks):
    tokens, expected, directory = case
    target = prepare(directory).target
    target.store.set_pages(0, range(1, 1 + target.store.page_table.shape[1]))
    slot, start = torch.tensor([0]), 0
    for size in chunks:
        target.prefill(tokens[start : start + size], slot, start)
        start += size
        assert (target.first_logits(slot)[0] - expected[start - 1]).abs().max() <= 2e-5
    assert target.faults(slot).item() == 0


@torch.inference_mode()
def test_random_windows_with_rejections_match(case):
    tokens, expected, directory = case
    model = prepare(directory)
    model.admit(2, tokens[:5].tolist())
    target, table = model.target, model.arena.requests
    generator = torch.Generator().manual_seed(3)
    consumed, widths = 5, set()
    while consumed < LENGTH:
        width = min(int(torch.randint(1, 9, (), generator=generator)), LENGTH - consumed)
        taken = int(torch.randint(1, width + 1, (), generator=generator))
        window = tokens[consumed : consumed + width].clone()
        # drafts beyond the accepted prefix are wrong tokens
        window[taken:] = torch.randint(0, 512, (width - taken,), generator=generator)
        table.integers[2, CONSUMED] = consumed
        table.integers[2, FINISH] = 0
        lanes = table.lanes(torch.tensor([2]))
        logits = target.verify(window.unsqueeze(0), lanes)[0]
        assert (logits[:taken] - expected[consumed : consumed + taken]).abs().max() <= 2e-5
        target.commit(lanes, torch.tensor([taken]))
        widths.add(width)
        consumed += taken
    assert widths == set(range(1, 9))
    assert target.faults(torch.tensor([2])).item() == 0
