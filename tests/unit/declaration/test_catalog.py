"""Round shapes against a direct enumeration, and the options of a preparation against the recipe's limits."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.catalog import RoundShape, batch_capacities, speculative_shapes
from specdec.declaration import Recipe, WidthCatalog
from specdec.errors import UsageError
from specdec.preparation import PreparationConfig

WIDTHS = st.sets(st.integers(2, 12), max_size=6).map(lambda wide: (1, *sorted(wide)))


def pairs(shapes: tuple[RoundShape, ...]) -> list[tuple[int, int]]:
    return [(shape.batch, shape.verify_width) for shape in shapes]


@pytest.mark.parametrize(
    ("concurrency", "expected"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (4, (1, 2, 4)), (5, (1, 2, 4, 8)), (64, (1, 2, 4, 8, 16, 32, 64))],
)
def test_batch_capacities(concurrency: int, expected: tuple[int, ...]) -> None:
    assert batch_capacities(concurrency) == expected


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4"])
def test_batch_capacities_refuse(value: Any) -> None:
    with pytest.raises(UsageError, match="concurrency"):
        batch_capacities(value)


def test_eighteen_shapes_and_three() -> None:
    assert pairs(speculative_shapes(4, range(1, 7), 128)) == [(b, w) for b in (1, 2, 4) for w in range(1, 7)]
    fixed = speculative_shapes(4, range(1, 7), 128, fixed_width=4)
    assert [(s.batch, s.draft_tokens, s.verify_width, s.packed_rows) for s in fixed] == [
        (1, 3, 4, 0),
        (2, 3, 4, 0),
        (4, 3, 4, 0),
    ]


def test_fixed_width_falls_back_to_one_where_it_does_not_fit() -> None:
    assert pairs(speculative_shapes(8, (1, 2, 6), 24, fixed_width=6)) == [(1, 6), (2, 6), (4, 6), (8, 1)]


@given(concurrency=st.integers(1, 70), widths=WIDTHS, capacity=st.integers(1, 300), data=st.data())
def test_catalog_against_enumeration(
    concurrency: int, widths: tuple[int, ...], capacity: int, data: st.DataObject
) -> None:
    batches = [batch for batch in (1, 2, 4, 8, 16, 32, 64, 128) if batch == 1 or batch < 2 * concurrency]
    expected = [(b, w) for b in batches for w in widths if w == 1 or b * w <= capacity]
    shapes = speculative_shapes(concurrency, widths, capacity)
    assert pairs(shapes) == expected
    assert list(shapes) == sorted(shapes)
    assert all(shape.draft_tokens == shape.verify_width - 1 for shape in shapes)
    assert all(shape.target_rows == shape.batch * shape.verify_width for shape in shapes)
    fixed = data.draw(st.sampled_from(widths))
    expected = [(b, fixed if fixed == 1 or b * fixed <= capacity else 1) for b in batches]
    assert pairs(speculative_shapes(concurrency, widths, capacity, fixed)) == expected


@pytest.mark.parametrize("widths", [(), (2, 3), (1, 1), (1, 3, 2), (1, "2"), (1, 2.0)])
def test_widths_refused(widths: tuple) -> None:
    with pytest.raises(UsageError, match="speculative_widths"):
        speculative_shapes(4, widths, 128)


def test_fixed_width_must_be_prepared() -> None:
    with pytest.raises(UsageError, match="fixed_width 5 must be one of the prepared widths 1, 2, 4"):
        speculative_shapes(4, (1, 2, 4), 128, fixed_width=5)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1, 1, 0), "batch 0 must be at least 1"),
        ((1, -1, 1, 0), "draft_tokens -1 must be at least 0"),
        ((1, 3, 5, 0), "verify_width 5 must be between 1 and 4"),
        ((2, 3, 4, 1), "packed_rows 1 must be between 2 and 8"),
        ((2, 3, 4, 9), "packed_rows 9 must be between 2 and 8"),
    ],
)
def test_shape_refused(numbers: tuple[int, int, int, int], words: str) -> None:
    batch, drafts, width, rows = numbers
    with pytest.raises(UsageError, match=words):
        RoundShape(batch=batch, draft_tokens=drafts, verify_width=width, packed_rows=rows)


def test_packed_shape() -> None:
    # depth, width and packed rows are independent: seven drafts, four verified, five rows for two lanes
    assert RoundShape(batch=2, draft_tokens=7, verify_width=4, packed_rows=5).target_rows == 5


def test_defaults_come_from_the_recipe(recipe: Recipe) -> None:
    config = PreparationConfig.for_recipe(recipe)
    assert config.speculative_widths == (1, 2, 3, 4, 5, 6)
    assert (config.max_draft_tokens, config.speculative_token_capacity) == (5, 128)
    assert config.adaptive_verification
    assert len(config.shapes()) == 18
    assert config.serving_shapes() == config.shapes()


def test_fixed_policy_captures_every_width_and_serves_three(recipe: Recipe) -> None:
    config = PreparationConfig.for_recipe(recipe, adaptive_verification=False)
    assert config.fixed_width == 6
    assert len(config.shapes()) == 18
    assert pairs(config.serving_shapes()) == [(1, 6), (2, 6), (4, 6)]
    narrow = PreparationConfig.for_recipe(recipe, adaptive_verification=False, fixed_width=4)
    assert pairs(narrow.serving_shapes()) == [(1, 4), (2, 4), (4, 4)]


@pytest.mark.parametrize("drafts", range(8))
def test_every_draft_maximum(recipe: Recipe, drafts: int) -> None:
    config = PreparationConfig.for_recipe(recipe, max_draft_tokens=drafts)
    assert config.speculative_widths == tuple(range(1, drafts + 2))
    assert config.max_draft_tokens == drafts


def test_a_block_recipe_prepares_the_asked_depth(make_recipe: Callable[..., Recipe]) -> None:
    block = make_recipe(default_draft_tokens=7, widths=WidthCatalog(widths=(1, 8)))
    assert PreparationConfig.for_recipe(block).speculative_widths == (1, 8)
    assert PreparationConfig.for_recipe(block, max_draft_tokens=3).speculative_widths == (1, 4)


def test_allocated_rounds_are_bounded_by_rows(make_recipe: Callable[..., Recipe]) -> None:
    """A wide round is there at every batch capacity that the rows allow, with fewer rows than B·W where they are too few."""
    recipe = make_recipe(
        default_draft_tokens=7, max_draft_tokens=7, widths=WidthCatalog(widths=(1, 8)), confidence_width=7
    )
    config = PreparationConfig.for_recipe(recipe, concurrency=32, speculative_token_capacity=24)
    found = {(shape.batch, shape.verify_width): (shape.packed_rows, shape.target_rows) for shape in config.shapes()}
    wide = {1: (0, 8), 2: (0, 16), 4: (24, 24), 8: (24, 24), 16: (24, 24)}
    assert {batch: rows for (batch, width), rows in found.items() if width == 8} == wide
    assert {batch for batch, width in found if width == 1} == {1, 2, 4, 8, 16, 32}
    fixed = PreparationConfig.for_recipe(
        recipe, concurrency=4, speculative_token_capacity=24, adaptive_verification=False
    )
    assert [(shape.batch, shape.target_rows) for shape in fixed.serving_shapes()] == [(1, 8), (2, 16), (4, 24)]
    assert set(fixed.serving_shapes()) <= set(fixed.shapes())
    assert not PreparationConfig.for_recipe(make_recipe()).packed


def test_without_speculation_no_shapes(recipe: Recipe) -> None:
    config = PreparationConfig.for_recipe(recipe, speculative=False)
    assert (config.shapes(), config.serving_shapes(), config.max_draft_tokens) == ((), (), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_draft_tokens": 8},
            "max_draft_tokens 8 must be between 0 and 7: recipe 'toy' drafts at most 7 tokens "
            r"\(source: eight verification inputs\)",
        ),
        ({"max_draft_tokens": -1}, "max_draft_tokens -1 must be between 0 and 7"),
        ({"max_draft_tokens": True}, "max_draft_tokens must be an integer between 0 and 7, got True"),
        ({"speculative_widths": (1, 9)}, "the widest must be at most 8"),
        ({"speculative_widths": (1, 4), "max_draft_tokens": 5}, "needs a widest width of 6"),
        ({"speculative_widths": (2, 4)}, "must increase and start with 1"),
        ({"speculative": False, "max_draft_tokens": 3}, "contradicts speculative=False"),
        ({"speculative": False, "mtp_only": True}, "leaves nothing to prepare"),
        ({"fixed_width": 4}, "needs adaptive_verification=False"),
        ({"fixed_width": 7, "adaptive_verification": False}, "must be one of the prepared widths 1, 2, 3, 4, 5, 6"),
        ({"speculative_token_capacity": 5}, "speculative_token_capacity 5 must be at least 6"),
        ({"concurrency": 0}, "concurrency 0 must be at least 1"),
        ({"context": 1}, "context 1 must be at least 2"),
        ({"prefill_tokens": ()}, "at least one chunk capacity"),
        ({"prefill_tokens": 512}, "prefill_tokens is 512; give a sequence of integers"),
        ({"speculative_widths": "1,2"}, "speculative_widths is '1,2'; give a sequence of integers"),
        ({"prefill_tokens": (512, 512)}, "prefill_tokens must increase"),
        ({"memory_bytes": 0}, "memory_bytes 0 must be at least 1"),
        ({"headroom_bytes": -1}, "headroom_bytes -1 must be at least 0"),
    ],
)
def test_options_refused(recipe: Recipe, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PreparationConfig.for_recipe(recipe, **options)


def test_reduction_is_a_subset(recipe: Recipe) -> None:
    prepared = PreparationConfig.for_recipe(recipe)
    reduced = prepared.reduce(concurrency=2, max_draft_tokens=3)
    assert pairs(reduced.shapes()) == [(b, w) for b in (1, 2) for w in (1, 2, 3, 4)]
    off = prepared.reduce(max_draft_tokens=0)
    assert not off.speculative
    assert off.shapes() == ()


def test_policy_may_change_at_start(recipe: Recipe) -> None:
    prepared = PreparationConfig.for_recipe(recipe)
    assert prepared.reduce(adaptive_verification=False).fixed_width == 6
    assert prepared.reduce(fixed_width=3).fixed_width == 3
    fixed = PreparationConfig.for_recipe(recipe, adaptive_verification=False)
    assert fixed.reduce().fixed_width == 6
    # the fixed width follows when depth is reduced below it
    assert fixed.reduce(max_draft_tokens=2).fixed_width == 3
    assert fixed.reduce(adaptive_verification=True).fixed_width is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 5}, "concurrency 5 must be between 1 and 4: 4 were prepared"),
        ({"max_draft_tokens": 6}, "max_draft_tokens 6 was not prepared; prepared: 0, 1, 2, 3, 4, 5"),
        ({"fixed_width": 7}, "must be one of the prepared widths"),
        ({"fixed_width": 3, "adaptive_verification": True}, "contradicts adaptive verification"),
    ],
)
def test_reduction_never_extends(recipe: Recipe, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PreparationConfig.for_recipe(recipe).reduce(**options)


def test_reduction_keeps_what_preparation_left_out(recipe: Recipe) -> None:
    sparse = PreparationConfig.for_recipe(recipe, speculative_widths=(1, 2, 6))
    with pytest.raises(UsageError, match="prepared: 0, 1, 5"):
        sparse.reduce(max_draft_tokens=3)
    with pytest.raises(UsageError, match="a preparation with mtp_only does not have"):
        PreparationConfig.for_recipe(recipe, mtp_only=True).reduce(max_draft_tokens=0)
    with pytest.raises(UsageError, match="prepared: 0"):
        PreparationConfig.for_recipe(recipe, speculative=False).reduce(max_draft_tokens=1)


@given(
    widths=st.sets(st.integers(2, 8), max_size=7).map(lambda wide: (1, *sorted(wide))),
    concurrency=st.integers(1, 9),
    capacity=st.integers(8, 80),
    lanes=st.integers(1, 9),
    depth=st.integers(0, 7),
)
def test_reduced_shapes_were_captured(
    make_recipe: Callable[..., Recipe], widths: tuple[int, ...], concurrency: int, capacity: int, lanes: int, depth: int
) -> None:
    prepared = PreparationConfig.for_recipe(
        make_recipe(), concurrency=concurrency, speculative_widths=widths, speculative_token_capacity=capacity
    )
    allowed = lanes <= concurrency and (depth == 0 or depth + 1 in widths)
    if allowed:
        assert set(prepared.reduce(concurrency=lanes, max_draft_tokens=depth).shapes()) <= set(prepared.shapes())
    else:
        with pytest.raises(UsageError):
            prepared.reduce(concurrency=lanes, max_draft_tokens=depth)
