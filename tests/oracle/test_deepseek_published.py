"""DeepSeek-V4.1 weights as the release stores them, through the whole target and drafter.

The same weights widened here, by code of its own, and stored as plain floats give the same model up to one thing: inputs of
quantised weights are quantised. Which weights these are is told apart from that.
"""

from __future__ import annotations

import pytest
import torch
from deepseek_models import GOLDEN_PROMPT, as_published, config, random_tensors
from deepseek_target import Driver
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.interfaces import Capacities
from specdec_deepseek_v41 import linear, mixture
from specdec_deepseek_v41.drafter import DsparkDrafter

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
PROMPT = torch.tensor(GOLDEN_PROMPT)


def widened(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of the stored weights, float64: codes times a power of two for a block of 32 × 32 (FP8), 32 values of a row (FP4,
    two codes a byte, the even one low) or 32 values of a table row."""
    found = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        if scale is None:
            found[name] = tensor.double() if tensor.is_floating_point() else tensor
            continue
        powers = torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, 1)
        if tensor.dtype == torch.float8_e4m3fn:
            values = tensor.double()
        else:
            codes = tensor.view(torch.uint8).long()
            values = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)]
        if scale.shape[0] != values.shape[0]:
            powers = powers.repeat_interleave(32, 0)
        found[name] = values * powers[: values.shape[0], : values.shape[1]]
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The stored and the plain checkpoint."""
    folder, stored = tmp_path_factory.mktemp("published"), as_published(random_tensors(3))
    return [write_checkpoint(folder / name, t, config()) for name, t in (("a", stored), ("b", widened(stored)))]


def load(directory) -> tuple[Driver, DsparkDrafter]:
    driver = Driver(directory)
    capacities = Capacities(slots=3, context=120, pages=6, max_draft_tokens=7, dtype="float64", prefill_rows=120)
    with Checkpoint.open(directory) as checkpoint:
        return driver, DsparkDrafter(checkpoint, driver.target, capacities)


class Greedy:
    """Takes the greatest logit and keeps all of them."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return logits.argmax(-1)


def run(directory) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a prompt, logits and forecasts of the drafts behind it."""
    driver, drafter = load(directory)
    features, logits = driver.prefill(0, PROMPT)
    drafter.prefill(features, PROMPT, torch.tensor([0]), 0)
    proposer = Greedy()
    forecasts = drafter.propose(driver.lanes(0), 7, proposer)
    assert forecasts is not None
    return logits, torch.stack(proposer.logits), forecasts


@torch.inference_mode()
def test_stored_weights_are_the_plain_ones(directories, monkeypatch):
    """With inputs left as they are."""
    for module in (linear, mixture):
        monkeypatch.setattr(module, "fp8_ue8m0", lambda x: x)
    found, wanted = (run(directory) for directory in directories)
    for ours, theirs, tolerance in zip(found, wanted, (1e-11, 1e-11, 1e-6), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_quantised_inputs_matter(directories):
    """The control for the test above, which would not notice if nothing was ever quantised."""
    (found, *_), (wanted, *_) = (run(directory) for directory in directories)
    assert (found - wanted).abs().median() > 1e-3


@torch.inference_mode()
def test_inputs_of_which_weights_are_quantised(directories):
    """FP8 and FP4 weights but for the first output projection; compressors, index keys and weights, and the router are BF16."""
    (target, drafter), (plain, _) = ((driver.target, drafter) for driver, drafter in map(load, directories))
    for layer in target.layers:
        attention = layer.attention
        assert attention.inputs.quantised and attention.row_input.quantised
        assert attention.queries.quantised and attention.output.quantised
        assert isinstance(attention.groups, Tensor)
        assert layer.indexer is None or layer.indexer.queries.quantised
        assert layer.engram is None or layer.engram.project.quantised
    for stage in drafter.stages:
        assert all(part.quantised for part in (stage.attention.inputs, stage.attention.queries, stage.attention.output))
    assert drafter.projection.quantised
    assert not any(layer.attention.inputs.quantised for layer in plain.layers)
