import math
import subprocess
import sys

import pytest

from specdec.errors import ExitCode, UsageError
from specdec.sampling.params import SamplingParams


def test_defaults_are_the_plain_law():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.greedy, params.seed) == (
        1.0,
        0,
        1.0,
        0.0,
        False,
        0,
    )


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 1e-30},
        {"temperature": 2},
        {"top_k": 2**63 - 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"seed": 2**63 - 1},
        {"greedy": True},
    ],
)
def test_accepts_the_edges(good):
    params = SamplingParams(**good)
    assert all(getattr(params, name) == value for name, value in good.items())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, -0.5, math.nan, math.inf, 1e-50, 1e39, "1", None, True]),
        ("top_k", [-1, 1.5, 2**63, "20", None, True]),
        ("top_p", [0, -0.1, 1.01, math.nan, "x", None, True]),
        ("min_p", [-0.1, 1.1, math.nan, None, False]),
        ("seed", [-1, 2**63, 1.0, None, True]),
        ("greedy", [1, 0, None, "yes"]),
    ],
)
def test_refusals_are_one_line_with_option_value_and_range(name, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert name in message and repr(value) in message and "must be" in message and "\n" not in message
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_temperature_zero_names_greedy(zero):
    with pytest.raises(UsageError, match=r"temperature is 0.*--greedy"):
        SamplingParams(temperature=zero)


def test_records_are_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_importing_params_leaves_torch_out():
    code = "import sys, specdec.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
