"""Texts with drafts against greedy decoding by transformers, and how many tokens a round emits on code edits."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[1] / "benchmark.py"
# not by way of sys.path, where the package beside it would hide the installed one
SPEC = spec_from_file_location("benchmark", BENCHMARK)
benchmark = module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)

#: Two logits closer than this may swap between two computations in float32; see ``TOLERANCE`` in test_logits.py.
NEAR_TIE = 1e-3
#: Requests of the ordinary test: two edits of one function, both of which the model ends itself.
REQUESTS = (0, 1)


@pytest.fixture(scope="module")
def model(recipe, path):
    return benchmark.prepare(recipe, speculative=True)


@pytest.fixture(scope="module")
def prompts(recipe, path):
    pytest.importorskip("jinja2")
    return benchmark.edit_prompts(recipe)[1]


def departures(independent, prompt, output):
    """Where an output is not what transformers decodes greedily after the same tokens: position and logit difference."""
    logits = independent(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    lost = logits.max(1).values - chosen
    return [(place, float(loss)) for place, loss in enumerate(lost) if loss > 0]


def test_code_edits(model, prompts, independent):
    """Every token is the greedy one, and rounds emit more than one and a half on average."""
    requests = benchmark.requests_for(model, [prompts[number] for number in REQUESTS], 120)
    records = benchmark.run(benchmark.scheduler(model, width=8, history=True), requests)
    for request, record in zip(requests, records, strict=True):
        assert record["finish"] == benchmark.FINISHED
        found = departures(independent, request.prompt, record["output"])
        print(f"near ties: {found}")
        assert all(loss <= NEAR_TIE for _, loss in found), found
    assert benchmark.figures(records)["tokens_per_round"] >= benchmark.TOKENS_PER_ROUND
    # negative control: a text with one other token is noticed
    output = list(records[0]["output"])
    output[10] = output[10] + 1
    assert max(loss for _, loss in departures(independent, requests[0].prompt, output)) > NEAR_TIE


def test_widths_do_not_matter(model, prompts):
    """The first tokens of one request at several widths, and with widths chosen by the controller."""
    requests = benchmark.requests_for(model, prompts[:1], 16)
    texts = [
        benchmark.run(benchmark.scheduler(model, width=width), requests)[0]["output"] for width in (1, 2, 4, 8, None)
    ]
    assert all(text == texts[0] for text in texts)


def test_memory_is_declared_to_the_byte(recipe, model, checkpoint):
    """Held tensors of the target; state is planned from the layout."""
    from specdec.memory_plan import capacities_for
    from specdec_smollm2.memory import declare

    declared = declare(checkpoint.config, checkpoint, capacities_for(recipe, model.config, "float32"), False)
    target = model.target
    held = [target.embedding, target.head, target.final_scale, target.rope.cos, target.rope.sin, target._steps]
    for layer in target.layers:
        held += [
            value for value in map(layer.__getattribute__, type(layer).__slots__) if isinstance(value, torch.Tensor)
        ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert sum(item.bytes for item in declared.target) == sum(storages.values())
    assert declared.target_layout == target.store.layout
    assert declared.drafter_layout == model.drafter.store.layout
    assert declared.context_limit == 8192


@pytest.mark.slow
def test_the_benchmark_holds(path, tmp_path):
    """Plain decoding, drafts and history drafts on all edits; texts are equal to plain decoding's."""
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--passes", "1", "--out", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["texts_equal"] is True
