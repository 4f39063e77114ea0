"""The execution manifest: what it lists, what survives JSON, and what is refused."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.catalog import RoundShape
from specdec.declaration import Recipe
from specdec.errors import DeclarationError
from specdec.manifest import ExecutionGraph, ExecutionManifest, build_manifest
from specdec.preparation import PreparationConfig


def kinds(manifest: ExecutionManifest, enabled: bool | None) -> Counter[str]:
    return Counter(graph.kind for graph in manifest.graphs if graph.speculation_enabled is enabled)


def test_graphs_of_a_default_preparation(recipe: Recipe) -> None:
    config = PreparationConfig.for_recipe(recipe, prefill_tokens=(512, 4096))
    manifest = build_manifest(recipe, config)
    assert kinds(manifest, None) == {"init": 1, "restore": 1, "snapshot": 1}
    assert kinds(manifest, False) == {"prefill": 2, "resume": 2, "decode": 3}
    assert kinds(manifest, True) == {"prefill": 2, "resume": 2, "speculative": 18}
    assert manifest.shapes == config.shapes()
    widest = manifest.graphs[-1]
    assert (widest.batch_capacity, widest.token_capacity, widest.draft_tokens, widest.verify_tokens) == (4, 6, 5, 6)
    assert (widest.draft_source, widest.sampling_mode, widest.packed_token_capacity) == ("learned", "general", 0)
    assert manifest.abi_version == 6


def test_serving_modes(recipe: Recipe) -> None:
    only = build_manifest(recipe, PreparationConfig.for_recipe(recipe, mtp_only=True))
    assert not kinds(only, False)
    off = build_manifest(recipe, PreparationConfig.for_recipe(recipe, speculative=False))
    assert not kinds(off, True)
    assert off.shapes == ()


def test_copied_drafts_need_the_recipe_and_a_draft_position(make_recipe: Callable[..., Recipe]) -> None:
    for supported in (True, False):
        made = make_recipe(supports_history_drafts=supported)
        graphs = build_manifest(made, PreparationConfig.for_recipe(made)).graphs
        assert {g.copy_tokens for g in graphs if g.draft_tokens} == {supported}
        assert {g.copy_tokens for g in graphs if not g.draft_tokens} == {False}


def test_own_shapes_and_confidence(make_recipe: Callable[..., Recipe]) -> None:
    made = make_recipe(confidence_width=7)
    shapes = (
        RoundShape(batch=1, draft_tokens=0, verify_width=1),
        RoundShape(batch=2, draft_tokens=7, verify_width=8, packed_rows=9),
    )
    manifest = build_manifest(made, PreparationConfig.for_recipe(made), shapes=shapes)
    assert manifest.shapes == shapes
    assert [g.confidence_width for g in manifest.graphs if g.kind == "speculative"] == [0, 7]


@given(
    concurrency=st.integers(1, 9),
    drafts=st.integers(0, 7),
    context=st.integers(2, 10_000),
    fixed=st.booleans(),
    only=st.booleans(),
    memory=st.none() | st.integers(1, 2**60),
)
def test_json_round_trip(
    make_recipe: Callable[..., Recipe],
    concurrency: int,
    drafts: int,
    context: int,
    fixed: bool,
    only: bool,
    memory: int | None,
) -> None:
    made = make_recipe()
    config = PreparationConfig.for_recipe(
        made,
        concurrency=concurrency,
        max_draft_tokens=drafts,
        context=context,
        adaptive_verification=not fixed,
        mtp_only=only,
        memory_bytes=memory,
    )
    manifest = build_manifest(made, config)
    text = manifest.to_json()
    assert ExecutionManifest.from_json(text, "manifest.json") == manifest
    assert json.loads(text)["abi_version"] == 6


@pytest.fixture
def data(recipe: Recipe) -> dict[str, Any]:
    return json.loads(build_manifest(recipe, PreparationConfig.for_recipe(recipe)).to_json())


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(DeclarationError) as caught:
        ExecutionManifest.from_json(json.dumps(data), "manifest.json")
    return str(caught.value)


@pytest.mark.parametrize("operation", [10, 11, 13])
def test_reserved_operations_are_refused(data: dict[str, Any], operation: int) -> None:
    data["graphs"][-1]["operation_id"] = operation
    message = refused(data)
    assert message.startswith("manifest.json:graphs[")
    assert f"operation id {operation} is reserved" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation_id": 2}, "operation id of kind 'speculative' must be 12, got 2"),
        ({"kind": "verify"}, "kind must be one of 'init'"),
        ({"verify_tokens": 5}, "must equal token_capacity"),
        ({"draft_tokens": None}, "declares draft_tokens, verify_tokens and draft_source"),
        ({"draft_tokens": 4}, "verify_width 6 must be between 1 and 5"),
        ({"packed_token_capacity": 25}, "packed_rows 25 must be between 4 and 24"),
        ({"speculation_enabled": None}, "speculation_enabled true"),
        ({"sampling_mode": "greedy"}, "sampling_mode must be one of 'general'"),
        ({"token_capacity": 6.0}, "token_capacity: must be an integer, got 6.0"),
        ({"copy_tokens": 1}, "copy_tokens: must be true or false, got 1"),
        ({"colour": "blue"}, "unknown key 'colour'"),
    ],
)
def test_graph_refused(data: dict[str, Any], change: dict[str, Any], words: str) -> None:
    data["graphs"][-1].update(change)
    assert words in refused(data)


def test_other_graphs_declare_no_drafts(data: dict[str, Any]) -> None:
    for change in ({"draft_tokens": 1}, {"draft_source": "learned"}, {"confidence_width": 1}, {"copy_tokens": True}):
        graph = dict(data["graphs"][0], **change)
        assert "declares no drafts" in refused({**data, "graphs": [graph]})


def test_manifest_refused(data: dict[str, Any]) -> None:
    assert "abi_version must be 6, got 5" in refused({**data, "abi_version": 5})
    assert "config is for recipe 'toy', the manifest for 'other'" in refused({**data, "recipe": "other"})
    assert "graph listed twice: speculative, batch 4, tokens 6" in refused(
        {**data, "graphs": data["graphs"] + data["graphs"][-1:]}
    )
    assert "unknown key 'extra'" in refused({**data, "extra": 1})
    assert "config.concurrency: must be an integer" in refused(
        {**data, "config": {**data["config"], "concurrency": 4.0}}
    )


def test_graph_can_not_be_built_with_a_reserved_operation() -> None:
    with pytest.raises(DeclarationError, match="operation id 13 is reserved"):
        ExecutionGraph(kind="decode", operation_id=13, batch_capacity=1, token_capacity=1)
