import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "plugins" / "qwen38" / "training"


@pytest.fixture(autouse=True, scope="session")
def training_path():
    """The training code is a folder of scripts outside every package; it imports its neighbours by plain name."""
    sys.path.insert(0, str(TRAINING))
    torch.set_num_threads(1)
    yield TRAINING
    sys.path.remove(str(TRAINING))


@pytest.fixture(scope="session")
def random_parameters(training_path):
    """Four-layer parameters in which every feature matters: norms, convolutions and gates are all non-trivial."""
    from parameters import initialise, text_config

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
