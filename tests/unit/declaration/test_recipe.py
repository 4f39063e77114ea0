"""A recipe that exists is consistent: each contradiction is refused with both values."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs.exceptions import FrozenInstanceError

from specdec.declaration import Recipe, SamplingDefaults, StateLayout, WidthCatalog
from specdec.errors import DeclarationError


def test_recipe_is_frozen_and_short_to_print(recipe: Recipe) -> None:
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]
    assert len(repr(recipe)) < 1500
    assert recipe.source_of("max_draft_tokens") == "eight verification inputs"
    assert recipe.source_of("summary") == ""


@pytest.mark.parametrize("name", ["Toy", "toy model", "", "toy..1", "-toy", "toy-"])
def test_names(make_recipe: Callable[..., Recipe], name: str) -> None:
    with pytest.raises(DeclarationError, match=r"Recipe\.name"):
        make_recipe(name=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"default_draft_tokens": 8}, r"max_draft_tokens \(7\) must be >= default_draft_tokens \(8\)"),
        ({"max_draft_tokens": True}, "must be an integer, got True"),
        ({"max_draft_tokens": 6}, r"widest width \(8\) must be max_draft_tokens \+ 1 \(7\)"),
        ({"widths": WidthCatalog(widths=(1, 8))}, r"default_draft_tokens \(5\) needs width 6"),
        ({"speculative_token_capacity": 7}, r"speculative_token_capacity \(7\) must hold one lane"),
        ({"eos_token_ids": ()}, "eos_token_ids must be a non-empty tuple"),
        ({"eos_token_ids": (3, 3)}, "eos_token_ids repeat"),
        ({"embedded_checkpoint": "/some/folder"}, "must look like 'package:folder'"),
        ({"profiles": "profiles.json"}, "profiles must look like 'package:file', got 'profiles.json'"),
        ({"profiles": ""}, "profiles must look like 'package:file'"),
        ({"inventories": "package.module"}, "inventories must look like 'module:function'"),
        ({"opener": "/module.py:function"}, "opener must look like 'module:function'"),
        ({"canonical_name": "package:folder:name"}, "canonical_name must look like 'module:function'"),
        ({"target_layout": StateLayout(owner="drafter", fields=(), max_draft_tokens=7)}, "owner is 'target'"),
        ({"drafter_layout": StateLayout(owner="drafter", fields=(), max_draft_tokens=6)}, "horizon of 6 .* up to 7"),
        ({"sources": [("max_draft_tokens", "x")]}, "no source given for default_draft_tokens, sampling"),
        ({"sources": [("max_draft_tokens", "x", "y")]}, "sources are pairs"),
        ({"model_types": "toy"}, "model_types must be a non-empty tuple of str, got 'toy'"),
    ],
)
def test_contradictions(make_recipe: Callable[..., Recipe], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        make_recipe(**changes)


def test_sources_name_known_fields(make_recipe: Callable[..., Recipe], recipe: Recipe) -> None:
    with pytest.raises(DeclarationError, match="sources name unknown fields: max_drafts"):
        make_recipe(sources=[*recipe.sources, ("max_drafts", "x")])


@pytest.mark.parametrize("widths", [(), (2, 3), (1, 3, 2), (1, 1), (1, 2.0), (1, True)])
def test_width_catalog(widths: tuple) -> None:
    with pytest.raises(DeclarationError):
        WidthCatalog(widths=widths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"min_p": 1.0}, "min_p must be in"),
    ],
)
def test_sampling_defaults(changes: dict[str, float], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        SamplingDefaults(**{"temperature": 1.0, "top_k": 20, "top_p": 0.95, **changes})  # type: ignore[arg-type]
