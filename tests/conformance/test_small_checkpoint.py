"""The shipped checkpoints draft well on text they have not seen, at their own sampling defaults."""

from __future__ import annotations

import pytest
import torch
from heldout import heldout_requests

from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission
from specdec.serving.statistics import DraftStatistics

#: Temperature, top-k and top-p of the real model's generation defaults; tokens a round at the recipe's default drafts.
DEFAULTS = {
    "qwen3.8-flash": ((1.0, 20, 0.95), 2.0),
    "glm-5.3-flash": ((1.0, 0, 0.95), 2.0),
    "deepseek-v4.1-flash": ((1.0, 0, 1.0), 2.2),
}


@pytest.fixture(scope="module", params=DEFAULTS)
def model(request):
    torch.set_num_threads(1)
    recipe = recipe_book().recipe(request.param)
    config = PreparationConfig.for_recipe(recipe, concurrency=4, context=360, adaptive_verification=False)
    return LoadedModel.prepare(recipe, config)


def test_default_drafts_emit_at_least_two_tokens_a_round(model):
    defaults, least = DEFAULTS[model.recipe.name]
    requests = heldout_requests(model, files=12, prompt_tokens=200, new_tokens=96)
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == defaults
    statistics, first = DraftStatistics(), set()
    for event in Generator(model).run(requests):
        if isinstance(event, Emission):
            assert event.completion.faults == 0
            statistics.add(event.completion, in_round=event.request in first)
            first.add(event.request)
    assert statistics.tokens > 700
    assert statistics.tokens_per_round >= least
    assert statistics.acceptance_by_depth[0] >= 0.58
    # depths two to five are useful too: recursion, or the block, holds up
    assert min(statistics.acceptance_by_depth[:5]) >= 0.5
