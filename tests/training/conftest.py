import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="session")
def training_path():
    """The training code lies outside every package: ``training`` and ``plugins.NAME.training`` from the repository root."""
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    yield ROOT
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="session")
def random_parameters(training_path):
    """Four-layer parameters in which every feature matters: norms, convolutions and gates are all non-trivial."""
    from plugins.qwen38.training.parameters import initialise, text_config

    config = text_config(4, budget=512, table_base=1000)
    parameters = initialise(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, value in parameters.items():
        if name.endswith("linear_attn.norm.weight"):
            continue
        scale = 0.12
        if "norm" in name:
            scale = 0.2
        elif "conv1d" in name:
            scale = 0.3
        elif "embed" in name:
            scale = 1.0
        value.data = torch.randn(value.shape, generator=generator) * scale
        if name.endswith(("A_log", "dt_bias")):
            value.data = torch.rand(value.shape, generator=generator)
    return config, parameters
