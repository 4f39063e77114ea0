"""Compact recurrence against checkpoint columns, and what it saves."""

from __future__ import annotations

import pytest
import torch
from qwen_models import prepare, write_random_checkpoint
from round_driver import Driver

from specdec.declaration import StateKind
from specdec.testing.scripted import ScriptedDrafter
from specdec_qwen38.geometry import REAL
from specdec_qwen38.state import drafter_layout, target_layout

PROMPTS = [[5, 9, 300, 17, 44, 500, 3], [411, 2, 2, 8, 77, 130, 256, 19, 73, 6, 41, 99, 350]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


@pytest.fixture(scope="module")
def forms(directory):
    """The same model twice in float32: one live matrix with records, and one column per verified row."""
    return [prepare(directory, slots=2, recurrence=form) for form in ("records", "columns")]


def recurrent_states(model) -> torch.Tensor:
    """Committed matrices [layers, slots, …]."""
    store, slots = model.target.store, torch.tensor([0, 1])
    return store.state_after(slots, torch.zeros_like(slots))["delta_state"]


@torch.inference_mode()
@pytest.mark.parametrize("width", range(1, 9))
def test_every_accepted_count_is_bit_equal(forms, width):
    """Each pair of accepted counts on two lanes, followed by a width-one round, from the same prompts."""
    for accepted in range(width):
        states, tokens = [], []
        for model in forms:
            for slot, prompt in enumerate(PROMPTS):
                model.admit(slot, prompt, budget=60, greedy=True)
            drafter = ScriptedDrafter(model.drafter, slots=2, max_draft_tokens=7)
            driver = Driver(model, drafter=drafter)
            driver.start([0, 1])
            # what the target emits anyway, found by single rounds on a copy of the request
            future = continuation(model, driver)
            for slot, counts in ((0, accepted), (1, width - 1 - accepted)):
                right = future[slot][1 : 1 + counts]
                wrong = [(future[slot][1 + counts] + 1) % 512] * (width - 1 - counts)
                drafter.script[slot, : width - 1] = torch.tensor([*right, *wrong], dtype=torch.int64)
            completions = driver.round([0, 1], width - 1)
            assert [c.accepted for c in completions] == [accepted, width - 1 - accepted]
            driver.round([0, 1], 0)
            states.append(recurrent_states(model))
            tokens.append([driver.tokens(slot) for slot in (0, 1)])
        assert torch.equal(states[0], states[1])
        assert tokens[0] == tokens[1]


def continuation(model, driver) -> list[list[int]]:
    """Greedy tokens of both requests, by width-one rounds that are then undone by admitting the requests again."""
    plain = Driver(model)
    for slot, prompt in enumerate(PROMPTS):
        model.admit(slot, prompt, budget=60, greedy=True)
    plain.start([0, 1])
    for _ in range(9):
        plain.round([0, 1], 0)
    for slot, prompt in enumerate(PROMPTS):
        model.admit(slot, prompt, budget=60, greedy=True)
    driver.start([0, 1])
    return [plain.tokens(slot) for slot in (0, 1)]


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(3))
def test_random_width_sequences_are_bit_equal(forms, seed):
    widths = torch.randint(0, 8, (25,), generator=torch.Generator().manual_seed(seed)).tolist()
    runs = []
    for model in forms:
        for slot, prompt in enumerate(PROMPTS):
            model.admit(slot, prompt, budget=150, top_k=20, seed=seed)
        driver = Driver(model)
        driver.start([0, 1])
        states = []
        for drafts in widths:
            driver.round([0, 1], drafts)
            states.append(recurrent_states(model))
        runs.append((driver.completions, states))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(runs[0][1], runs[1][1], strict=True))


def test_bytes_are_what_was_allocated(forms):
    for model in forms:
        for store in (model.target.store, model.drafter.store):
            assert store.nbytes == store.layout.bytes(store.slots + 1, store.pages + 1)


def per_position(layout) -> int:
    """Bytes that one more verified position costs: columns and records."""
    kinds = (StateKind.COLUMNS, StateKind.RECORDS)
    names = ("delta_state", "delta_corrections", "delta_keys", "delta_decays")
    return sum(f.layers * f.entry_bytes for f in layout.fields if f.kind in kinds and f.name in names)


def test_real_size_figures_from_the_layouts():
    compact, columns = target_layout(REAL), target_layout(REAL, recurrence="columns")
    assert per_position(columns) == 113_246_208  # 108 MiB
    assert per_position(compact) == 1_186_560  # 1.13 MiB
    # one live matrix against eight: what four requests save
    matrix = columns.field("delta_state")
    assert 4 * 7 * matrix.layers * matrix.entry_bytes == 3_170_893_824  # 2.953 GiB
    assert round(4 * 7 * 113_246_208 / 2**30, 3) == 2.953
    drafter = drafter_layout(REAL)
    assert drafter.bytes_per_token == 2_112
    assert drafter.bytes_per_token * 262_144 == 528 * 2**20
    feedback = compact.field("feedback")
    assert feedback.entry_bytes == 20 * 2**10
    assert feedback.entry_bytes * 4_096 == 80 * 2**20
    attention = target_layout(REAL).field("kv").layers
    assert attention * 2_112 == compact.bytes_per_token == 25_344
