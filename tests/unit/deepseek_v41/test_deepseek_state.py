"""Bytes of the declared state at the published sizes, committed and staged, and the fields of the tiny model."""

import pytest
from attrs import evolve

from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.state import drafter_layout, target_layout

TARGET, DRAFTER = target_layout(REAL), drafter_layout(REAL)


def committed(layout, name):
    """Bytes that one request's field keeps between rounds."""
    item = layout.field(name)
    rows = item.extent if item.kind == "window" else 1
    return item.layers * rows * item.entry_bytes


def staged(layout, name, width=8):
    """Bytes of the rows that a round of ``width`` inputs adds to a window, or of its columns."""
    item = layout.field(name)
    return item.layers * width * item.entry_bytes


def grown(layout, name, tokens):
    """Bytes of the entries that ``tokens`` inputs complete."""
    item = layout.field(name)
    return item.layers * (tokens // item.extent) * item.entry_bytes


def test_committed_bytes_of_the_real_model():
    assert committed(TARGET, "window") == 5_242_880
    assert committed(TARGET, "pending") == 12_288
    assert committed(TARGET, "engram_ids") == 3 * 8
    assert committed(TARGET, "sampling_vector") == 10_240
    assert committed(DRAFTER, "window") == 393_216
    # the published count has four bytes for a compressed id
    private = ("window", "pending", "engram_ids")
    assert sum(committed(TARGET, name) for name in private) + committed(DRAFTER, "window") == 5_648_396 + 3 * 4


@pytest.mark.parametrize("tokens", [0, 1, 2, 41, 1_048_576])
def test_bytes_of_a_context(tokens):
    assert grown(TARGET, "compressed_r2", tokens) == 3 * 1_024 * (tokens // 2)
    assert grown(TARGET, "compressed_r1", tokens) == 1_024 * tokens
    assert grown(TARGET, "index_keys_r2", tokens) == 3 * 256 * (tokens // 2)
    assert grown(TARGET, "index_keys_r1", tokens) == 256 * tokens


def test_bytes_by_token_and_by_page():
    assert TARGET.bytes_per_token == 3_200 and DRAFTER.bytes_per_token == 0
    assert TARGET.page_tokens == DRAFTER.page_tokens == 64
    paged = [item for item in TARGET.fields if item.kind == "paged"]
    assert sum(item.bytes(0, 1, 7, 64) for item in paged) == 64 * 3_200
    assert [item.bytes(0, 1, 7, 64) // item.layers // item.entry_bytes for item in paged] == [32, 32, 64, 64]
    assert sum(item.bytes(0, 1_048_576 // 64, 7, 64) for item in paged) == 3_355_443_200


def test_staged_bytes_of_a_round():
    assert staged(TARGET, "window") == 327_680
    assert staged(TARGET, "pending") == 98_304
    assert staged(TARGET, "features") == 245_760
    window = TARGET.field("window")
    assert window.bytes(1, 0, 7, 64) == 5_242_880 + 327_680


def test_fields_of_the_tiny_model():
    layout = target_layout(TINY, dtype="float32")
    assert {item.name: (item.kind, item.layers, item.extent, item.shape, item.dtype) for item in layout.fields} == {
        "window": ("window", 10, 16, (64,), "float32"),
        "compressed_r2": ("paged", 2, 2, (64,), "float32"),
        "index_keys_r2": ("paged", 2, 2, (32,), "float32"),
        "compressed_r1": ("paged", 1, 1, (64,), "float32"),
        "index_keys_r1": ("paged", 1, 1, (32,), "float32"),
        "pending": ("window", 2, 1, (2, 64), "float32"),
        "engram_ids": ("window", 1, 3, (), "int64"),
        "features": ("columns", 1, 8, (384,), "float32"),
        "sampling_vector": ("columns", 1, 8, (128,), "float32"),
    }
    assert (committed(layout, "window"), committed(layout, "pending")) == (40_960, 1_024)
    assert layout.bytes_per_token == 768
    assert (staged(layout, "window"), staged(layout, "pending"), staged(layout, "features")) == (20_480, 8_192, 12_288)
    drafter = drafter_layout(TINY, dtype="float32")
    assert [item.name for item in drafter.fields] == ["window", "rows"] and committed(drafter, "window") == 12_288
    assert layout.field("engram_ids").fill == -1


def test_rows_that_wait_to_be_pooled_are_never_narrower_than_float32():
    for dtype, precise in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        layout = target_layout(TINY, dtype=dtype)
        assert layout.field("pending").dtype == precise
        assert layout.field("window").dtype == layout.field("compressed_r1").dtype == dtype


@pytest.mark.parametrize("drafts", [1, 5, 7])
def test_staging_follows_the_draft_maximum(drafts):
    layout = target_layout(TINY, max_draft_tokens=drafts)
    assert layout.field("features").extent == drafts + 1
    assert layout.field("window").rows(drafts) == 16 + drafts + 1


def test_a_model_without_one_ratio_declares_no_state_of_it():
    pooled = evolve(
        TINY,
        compress_ratios=(0, 0, *(2,) * 8, 0, 0, 0),
        kv_source_layer_ids=(2,),
        index_source_layer_ids=(2, 8),
        candidate_source_layer_id=2,
    )
    whole = evolve(pooled, compress_ratios=(0, 0, *(1,) * 8, 0, 0, 0))
    assert "compressed_r1" not in {item.name for item in target_layout(pooled).fields}
    assert {"compressed_r2", "pending"}.isdisjoint(item.name for item in target_layout(whole).fields)
