"""A recipe says which options of a request it cannot honour."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.declaration import REQUEST_OPTIONS, Recipe
from specdec.errors import DeclarationError


def test_nothing_is_unsupported_unless_said(recipe: Recipe) -> None:
    assert recipe.unsupported_options == ()


def test_known_names_are_kept_in_order(make_recipe: Callable[..., Recipe]) -> None:
    assert make_recipe(unsupported_options=["logprobs", "min_p"]).unsupported_options == ("logprobs", "min_p")
    assert make_recipe(unsupported_options=REQUEST_OPTIONS).unsupported_options == REQUEST_OPTIONS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("logprob",), "unsupported_options names logprob; known: temperature, top_k"),
        (("min_p", "beams", "adapters"), "unsupported_options names adapters, beams"),
        ((3,), "unsupported_options"),
    ],
)
def test_unknown_names_are_refused(make_recipe: Callable[..., Recipe], options: Any, words: str) -> None:
    with pytest.raises(DeclarationError, match=words) as raised:
        make_recipe(unsupported_options=options)
    assert "\n" not in str(raised.value)
