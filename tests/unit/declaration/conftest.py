"""A valid small recipe, from which each test changes one thing."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.declaration import (
    Recipe,
    SamplingDefaults,
    StateField,
    StateLayout,
    TensorGroup,
    TensorInventory,
    WidthCatalog,
)


def _recipe(**changes: Any) -> Recipe:
    row = StateField(name="matrix", kind="row", shape=(4, 4), dtype="float32", source="test")
    values: dict[str, Any] = {
        "name": "toy",
        "summary": "a toy",
        "checkpoint": "example/toy",
        "model_types": ("toy",),
        "drafter_method": "mtp",
        "default_draft_tokens": 5,
        "max_draft_tokens": 7,
        "widths": WidthCatalog(widths=range(1, 9)),
        "sampling": SamplingDefaults(temperature=1.0, top_k=20, top_p=0.95),
        "eos_token_ids": (1, 2),
        "supports_history_drafts": True,
        "tensor_parallel_sizes": (1,),
        "target_layout": StateLayout(owner="target", fields=[row], max_draft_tokens=7),
        "drafter_layout": StateLayout(owner="drafter", fields=[row], max_draft_tokens=7),
        "target_inventory": TensorInventory(
            groups=[TensorGroup(name="a.weight", shape=(2, 3), dtype="bfloat16", source="test")]
        ),
        "drafter_inventory": TensorInventory(groups=()),
        "sources": [
            ("default_draft_tokens", "test"),
            ("max_draft_tokens", "eight verification inputs"),
            ("sampling", "test"),
            ("eos_token_ids", "test"),
            ("speculative_token_capacity", "test"),
        ],
    }
    return Recipe(**{**values, **changes})


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    return _recipe


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return _recipe()
