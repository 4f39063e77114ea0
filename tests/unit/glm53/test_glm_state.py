"""Bytes of the declared state at the published sizes, and the smallest ring."""

import pytest
from attrs import evolve

from specdec.errors import DeclarationError
from specdec_glm53.geometry import TINY
from specdec_glm53.recipe import RECIPE
from specdec_glm53.state import drafter_layout, target_layout


def bytes_of(layout, name):
    """Bytes of one request's field; one page of a paged one."""
    return layout.field(name).bytes(1, 1, layout.max_draft_tokens, layout.page_tokens)


def paged_bytes(layout, tokens):
    pages = -(-tokens // layout.page_tokens)
    return sum(item.bytes(0, pages, layout.max_draft_tokens, layout.page_tokens) for item in layout.fields)


def test_bytes_of_a_target_request():
    layout = RECIPE.target_layout
    assert bytes_of(layout, "kda_state") == 8 * 142_606_336 == 1_140_850_688
    assert bytes_of(layout, "kda_conv") == 34 * 540_672 == 18_382_848
    assert bytes_of(layout, "latents") == 64 * 11_264
    assert bytes_of(layout, "group_keys") == 64 * 704
    assert bytes_of(layout, "raw_keys") == 67_584
    assert bytes_of(layout, "feedback") == 65_536  # one row of 8,192 for each of eight inputs
    assert layout.bytes_per_token == 11_264 + 704
    assert paged_bytes(layout, 262_144) == 3_137_339_392


def test_bytes_of_a_drafter_request():
    layout = RECIPE.drafter_layout
    assert bytes_of(layout, "latents") == 64 * 1_024
    assert bytes_of(layout, "group_keys") == 64 * 64
    assert bytes_of(layout, "raw_keys") == 6_144
    assert layout.bytes_per_token == 1_024 + 64
    assert paged_bytes(layout, 262_144) == 285_212_672


def test_shapes_of_the_tiny_model():
    layout = target_layout(TINY)
    shapes = {item.name: (item.layers, item.extent, item.shape) for item in layout.fields}
    assert shapes == {
        "kda_state": (7, 8, (4, 32, 32)),
        "kda_conv": (7, 3, (384,)),
        "latents": (2, 1, (64,)),
        "group_keys": (2, 4, (32,)),
        "raw_keys": (2, 12, (2, 32)),
        "raw_tags": (1, 12, ()),
        "anchor": (1, 1, ()),
        "feedback": (1, 8, (128,)),
    }
    assert [item.name for item in drafter_layout(TINY).fields] == [
        "latents",
        "group_keys",
        "raw_keys",
        "raw_tags",
        "anchor",
        "rows",
    ]
    assert layout.page_tokens == drafter_layout(TINY).page_tokens == 64


def test_recurrent_matrices_are_never_narrower_than_float32():
    for dtype, precise in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        layout = target_layout(TINY, dtype=dtype)
        assert layout.field("kda_state").dtype == precise
        assert layout.field("kda_conv").dtype == layout.field("latents").dtype == dtype


@pytest.mark.parametrize("build", [target_layout, drafter_layout])
@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_the_smallest_ring_holds_two_rows_beside_a_round_and_one_less_is_refused(build, drafts):
    smallest = drafts + 3
    assert build(TINY, max_draft_tokens=drafts, ring_extent=smallest).field("raw_keys").extent == smallest
    with pytest.raises(DeclarationError) as caught:
        build(TINY, max_draft_tokens=drafts, ring_extent=smallest - 1)
    message = str(caught.value)
    assert f"extent {smallest - 1}" in message and f"at least {smallest}" in message and "\n" not in message


def test_a_wider_group_has_a_longer_ring():
    wide = evolve(TINY, index_kpool=16)
    assert target_layout(wide).field("raw_keys").extent == drafter_layout(wide).field("raw_keys").extent == 24
    with pytest.raises(DeclarationError, match=r"extent 12.*at least 22"):
        target_layout(wide, ring_extent=12)


def test_the_recipe_states_its_numbers():
    assert (RECIPE.default_draft_tokens, RECIPE.max_draft_tokens) == (5, 7)
    assert RECIPE.widths.widths == (1, 2, 3, 4, 5, 6, 7, 8)
    assert RECIPE.tensor_parallel_sizes == (1, 2, 4)
    assert not RECIPE.supports_history_drafts
    assert (RECIPE.sampling.temperature, RECIPE.sampling.top_p, RECIPE.sampling.top_k) == (1.0, 0.95, 0)
    assert RECIPE.eos_token_ids == (154820, 154827, 154829)
    stated = dict(RECIPE.sources)
    for name in ("tensor_parallel_sizes", "supports_history_drafts", "target_inventory", "drafter_inventory"):
        assert stated[name]
