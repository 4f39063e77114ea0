"""Tensor groups: totals without expanding equal the expanded list, and every name is found again."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.declaration import DTYPE_BYTES, TensorGroup, TensorInventory, TensorSpec
from specdec.errors import DeclarationError


def group(name: str, axes: object = (), shape: object = (2, 3), dtype: str = "bfloat16") -> TensorGroup:
    return TensorGroup(name=name, axes=axes, shape=shape, dtype=dtype, source="test")  # type: ignore[arg-type]


def test_dtype_names_are_torch_attributes() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size


def test_spec_sizes() -> None:
    spec = TensorSpec(name="w", shape=[5, 7], dtype="float32")
    assert (spec.shape, spec.numel, spec.bytes) == ((5, 7), 35, 140)
    assert TensorSpec(name="s", shape=(), dtype="float64").bytes == 8
    assert TensorSpec(name="e", shape=(0, 4), dtype="float64").bytes == 0


def test_group_expands_in_order_with_the_last_axis_fastest() -> None:
    made = group("layers.{l}.experts.{e}.up.weight_scale_2", axes=[("l", (3, 7)), ("e", 2)], shape=(), dtype="float32")
    assert [spec.name for spec in made.expand()] == [
        "layers.3.experts.0.up.weight_scale_2",
        "layers.3.experts.1.up.weight_scale_2",
        "layers.7.experts.0.up.weight_scale_2",
        "layers.7.experts.1.up.weight_scale_2",
    ]
    assert (made.count, made.bytes) == (4, 16)


@given(
    layers=st.sets(st.integers(0, 60), min_size=1, max_size=5),
    experts=st.integers(1, 6),
    shape=st.lists(st.integers(1, 9), max_size=3),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_totals_and_lookup_agree_with_the_list(layers: set[int], experts: int, shape: list[int], dtype: str) -> None:
    numbers = tuple(sorted(layers))
    inventory = TensorInventory(
        groups=[
            group("l.{l}.e.{e}.w2.weight", axes=(("l", numbers), ("e", experts)), shape=shape, dtype=dtype),
            group("l.{l}.norm.weight", axes=(("l", numbers),), shape=(4,), dtype="float32"),
            group("head.weight"),
        ]
    )
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    expected = {f"l.{layer}.e.{e}.w2.weight": size for layer, e in product(numbers, range(experts))}
    expected |= {f"l.{layer}.norm.weight": 16 for layer in numbers}
    expected["head.weight"] = 12
    listed = list(inventory.expand())
    assert {spec.name: spec.bytes for spec in listed} == expected
    assert inventory.count == len(expected) == len(listed)
    assert inventory.bytes == sum(expected.values())
    for spec in listed:
        assert inventory.lookup(spec.name) == spec
    missing = next(number for number in range(70) if number not in layers)
    assert inventory.lookup(f"l.{missing}.norm.weight") is None
    assert inventory.lookup(f"l.{numbers[0]}.e.{experts}.w2.weight") is None


@pytest.mark.parametrize(
    "name", ["l.01.norm", "l.1.norm.x", "xl.1.norm", "l.-1.norm", "l..norm", "l.1.norm\n", "l.١.norm"]
)
def test_lookup_refuses_similar_names(name: str) -> None:
    assert TensorInventory(groups=[group("l.{l}.norm", axes=(("l", 40),))]).lookup(name) is None


def test_a_placeholder_may_repeat() -> None:
    inventory = TensorInventory(groups=[group("l.{l}.part_{l}.w", axes=(("l", 3),))])
    assert [spec.name for spec in inventory.expand()] == ["l.0.part_0.w", "l.1.part_1.w", "l.2.part_2.w"]
    assert inventory.lookup("l.2.part_2.w") is not None
    assert inventory.lookup("l.2.part_1.w") is None


@pytest.mark.parametrize(
    ("name", "axes", "words"),
    [
        ("l.{l}.w", (), "need exactly one axis"),
        ("l.w", (("l", 2),), "need exactly one axis"),
        ("l.{l}.w", (("l", 2), ("l", 3)), "need exactly one axis"),
        ("l.{l}.w", (("l", 0),), "positive count"),
        ("l.{l}.w", (("l", (1, -2)),), "positive count"),
        ("l.{l}.w", (("l", (1, 1)),), "repeats"),
        ("l{l}2.w", (("l", 2),), "may not touch"),
        ("l{l}{e}.w", (("l", 2), ("e", 2)), "may not touch"),
    ],
)
def test_bad_pattern(name: str, axes: object, words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        group(name, axes=axes)


def test_bad_values() -> None:
    with pytest.raises(DeclarationError, match=r"TensorGroup 'w'\.dtype must be one of .*got 'fp4'"):
        group("w", dtype="fp4")
    with pytest.raises(DeclarationError, match=r"shape must hold int values only, got 2\.0"):
        group("w", shape=(2.0,))
    with pytest.raises(DeclarationError, match="shape values must be at least 0, got -1"):
        group("w", shape=(-1,))


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        (("a.w", ()), ("a.w", ()), True),
        (("l.{l}.w", (("l", 4),)), ("l.3.w", ()), True),
        (("l.{l}.w", (("l", 4),)), ("l.4.w", ()), False),
        (("l.{l}.w", (("l", 4),)), ("l.03.w", ()), False),
        (("l.{l}.e.{e}.w", (("l", (1, 2)), ("e", 3))), ("l.{x}.e.{y}.w", (("x", (2, 3)), ("y", (2, 9)))), True),
        (("l.{l}.e.{e}.w", (("l", (1, 2)), ("e", 3))), ("l.{x}.e.{y}.w", (("x", (2, 3)), ("y", (3, 9)))), False),
    ],
)
def test_two_groups_may_not_declare_one_tensor(first: tuple, second: tuple, clash: bool) -> None:
    groups = [group(*first), group(*second)]
    # the oracle is the expanded list
    assert bool({s.name for s in groups[0].expand()} & {s.name for s in groups[1].expand()}) == clash
    if clash:
        with pytest.raises(DeclarationError, match="declare the same tensor"):
            TensorInventory(groups=groups)
    else:
        TensorInventory(groups=groups)


def test_a_list_of_any_length_counts_as_a_tensor_without_bytes() -> None:
    group = TensorGroup(name="x.{e}", axes=[("e", 3)], shape=(0,), dtype="uint32", source="test", any_length=True)
    assert (group.count, group.bytes) == (3, 0)
    spec = group.match("x.2")
    assert spec is not None and spec.any_length and spec.dtype == "uint32"
    with pytest.raises(DeclarationError, match=r"any_length needs shape \(0,\), got \(4,\)"):
        TensorGroup(name="x", shape=(4,), dtype="uint32", source="test", any_length=True)
