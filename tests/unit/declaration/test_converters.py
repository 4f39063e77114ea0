"""Foreign data is taken as it is or refused in the validator's words; nothing is converted in silence."""

import json
from typing import Any

import pytest
from attrs import field, frozen

from specdec.converters import structure, structure_json, unstructure
from specdec.errors import CheckpointError, DeclarationError


@frozen(kw_only=True)
class Inner:
    count: int
    share: float = 0.5

    @classmethod
    def one(cls) -> "Inner":
        return cls(count=1)


@frozen(kw_only=True)
class Outer:
    name: str = field()
    flag: bool = False
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    parts: tuple[Inner, ...] = ()

    @name.validator
    def _short(self, attribute: object, value: str) -> None:
        if len(value) > 3:
            raise ValueError(f"name {value!r} is longer than 3 letters; shorten it")


def test_round_trip() -> None:
    record = Outer(name="abc", flag=True, limit=4, sizes=(1, 2), parts=(Inner(count=1), Inner(count=2, share=1.0)))
    assert structure(json.loads(json.dumps(unstructure(record))), Outer, "x.json") == record


def test_an_integer_is_a_number() -> None:
    share = structure({"count": 1, "share": 2}, Inner, "x.json").share
    assert share == 2.0
    assert isinstance(share, float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": 9}, "x.json:name: must be a string, got 9"),
        ({"name": "a", "flag": 1}, "x.json:flag: must be true or false, got 1"),
        ({"name": "a", "limit": "9"}, "x.json:limit: must be an integer, got '9'"),
        ({"name": "a", "limit": True}, "x.json:limit: must be an integer, got true"),
        ({"name": "a", "sizes": [1, 3.7]}, "x.json:sizes[1]: must be an integer, got 3.7"),
        ({"name": "a", "sizes": "12"}, "x.json:sizes: must be a list, got '12'"),
        ({"name": "a", "sizes": {"1": 2}}, "x.json:sizes: must be a list, got an object"),
        ({"name": "a", "parts": [{"count": 1}, {"share": 1.0}]}, "x.json:parts[1].count: missing"),
        (
            {"name": "a", "parts": [{"count": 1, "share": True}]},
            "x.json:parts[0].share: must be a finite number, got true",
        ),
        ({"name": "a", "parts": [None]}, "x.json:parts[0]: must be an object, got null"),
        ({"name": "a", "sise": 1}, "x.json: unknown key 'sise'"),
        ({"name": "abcd"}, "x.json: name 'abcd' is longer than 3 letters; shorten it"),
        ([], "x.json: must be an object, got a list"),
        ({"name": 1, "flag": 2}, "x.json:name: must be a string, got 1; x.json:flag: must be true or false, got 2"),
    ],
)
def test_refused_in_the_validators_words(data: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        structure(data, Outer, "x.json")
    assert str(caught.value) == message


def test_many_problems_are_counted() -> None:
    with pytest.raises(DeclarationError, match="and 12 more problems") as caught:
        structure({"name": "a", "sizes": ["x"] * 20}, Outer, "x.json")
    assert str(caught.value).count("must be an integer") == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "x.json: not valid JSON"),
        ('{"count": NaN}', "NaN is not a JSON number"),
        ('{"count": 1, "share": -Infinity}', "-Infinity is not a JSON number"),
        ('{"count": 1, "count": 2}', "key 'count' is repeated"),
        ('{"count": 1, "share": 1e999}', "x.json:share: must be a finite number, got inf"),
    ],
)
def test_json_text(text: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        structure_json(text, Inner, "x.json", error=CheckpointError)
