"""Defaults of a checkpoint: ``generation_config.json`` where it speaks, ``config.json`` and the recipe elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from specdec.checkpoint.accepted import context_limit, embedded_checkpoint
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError, UsageError
from specdec.recipes import recipe_book
from specdec.serving.model import GenerationDefaults

RECIPE = recipe_book().recipe("qwen3.8-flash")


def folder(tmp_path: Path, config: dict[str, Any]) -> Checkpoint:
    """A checkpoint without tensors."""
    return Checkpoint(directory=tmp_path, config=config, stored={})


def read(tmp_path: Path, generation: Any, config: dict[str, Any] | None = None) -> GenerationDefaults:
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text)
    return GenerationDefaults.read(folder(tmp_path, config or {}), RECIPE)


def values(defaults: GenerationDefaults) -> tuple[Any, ...]:
    return defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p, defaults.stop_ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (1.0, 20, 0.95, 0.0, (248046, 248044))),
        (None, {"eos_token_id": 5}, (1.0, 20, 0.95, 0.0, (5,))),
        (None, {"text_config": {"eos_token_id": [6, 7]}, "eos_token_id": 5}, (1.0, 20, 0.95, 0.0, (6, 7))),
        ({}, {"eos_token_id": None}, (1.0, 20, 0.95, 0.0, (248046, 248044))),
        (
            {"temperature": 0.6, "top_k": 0, "top_p": 1, "min_p": 0.1, "eos_token_id": 3},
            {"eos_token_id": 5},
            (0.6, 0, 1, 0.1, (3,)),
        ),
        ({"temperature": None, "top_p": None, "eos_token_id": None}, {"eos_token_id": 5}, (1.0, 20, 0.95, 0.0, (5,))),
        ({"eos_token_id": []}, None, (1.0, 20, 0.95, 0.0, ())),
    ],
)
def test_where_each_value_comes_from(tmp_path: Path, generation: Any, config: Any, expected: tuple[Any, ...]) -> None:
    assert values(read(tmp_path, generation, config)) == expected


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ("{", "generation_config.json: not valid JSON"),
        ("\x00", "generation_config.json: not valid JSON"),
        ("[" * 100_000, "generation_config.json: not valid JSON"),
        ([], "generation_config.json: holds a JSON list, needs an object"),
        ({"temperature": "hot"}, "generation_config.json: temperature is 'hot'"),
        ({"temperature": 0}, "generation_config.json: temperature is 0"),
        ({"top_k": 2.5}, "generation_config.json: top_k is 2.5"),
        ({"top_p": True}, "generation_config.json: top_p is True"),
        ('{"min_p": NaN}', "generation_config.json: min_p is nan"),
        ({"eos_token_id": "x"}, "generation_config.json: eos_token_id is"),
        ({"eos_token_id": [1, True]}, "generation_config.json: eos_token_id is"),
        ({"eos_token_id": 1.5}, "generation_config.json: eos_token_id is"),
        ({"eos_token_id": list(range(9))}, "generation_config.json: eos_token_id lists 9 ids; at most 8"),
    ],
)
def test_unusable_file_is_named(tmp_path: Path, generation: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, generation)
    assert words in str(raised.value) and str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unusable_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id is"):
        read(tmp_path, None, {"eos_token_id": {}})
    with pytest.raises(CheckpointError, match=r"config\.json: text_config is 3, needs an object"):
        read(tmp_path, None, {"text_config": 3})


@pytest.mark.parametrize(
    ("config", "limit"),
    [({}, None), ({"max_position_embeddings": 9}, 9), ({"text_config": {"max_position_embeddings": 7}}, 7)],
)
def test_context_limit(tmp_path: Path, config: dict[str, Any], limit: int | None) -> None:
    assert context_limit(folder(tmp_path, config)) == limit


@pytest.mark.parametrize("value", ["4096", 0, -1, 1.5, True, []])
def test_context_limit_that_is_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings is"):
        context_limit(folder(tmp_path, {"max_position_embeddings": value}))


def test_options_replace_defaults(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"temperature": 0.6})
    sampling = defaults.sampling(top_k=None, top_p=0.5, seed=4, greedy=True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.greedy) == (
        0.6,
        20,
        0.5,
        4,
        True,
    )
    with pytest.raises(UsageError, match="top_p is 2"):
        defaults.sampling(top_p=2)


def test_recipe_without_a_shipped_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="ships no checkpoint; name one with --checkpoint DIR"):
        embedded_checkpoint(evolve(RECIPE, embedded_checkpoint=None))
    with pytest.raises(CheckpointError, match=r"nothing: the small checkpoint of recipe 'qwen3.8-flash' is not there"):
        embedded_checkpoint(evolve(RECIPE, embedded_checkpoint="specdec_qwen38:nothing"))
