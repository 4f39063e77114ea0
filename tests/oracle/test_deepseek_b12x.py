"""Token history and compressors of the DeepSeek-V4.1 target against the reference modules of b12x, which share no code with it.

Both references take packed requests that advance at their own pace; here they follow real calls of the target: prompts in chunks,
then packed verifications of which a part is committed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from deepseek_models import golden_tensor, tiny_compressed_ids, write_golden_checkpoint
from deepseek_target import Driver
from torch import Tensor

from specdec.round.allocation import PackedRows
from specdec_deepseek_v41 import compressor
from specdec_deepseek_v41.compressor import Compressor
from specdec_deepseek_v41.engram import Engram
from specdec_deepseek_v41.engram_rows import RowIds
from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.rows import Rows

SLOTS = 3
# (rows, committed rows) of every slot; no rows are a request that has finished
CALLS = [
    ((3, 1, 0), (1, 1, 0)),
    ((8, 4, 2), (8, 1, 1)),
    ((1, 1, 1), (1, 1, 1)),
    ((5, 8, 3), (2, 5, 3)),
    ((2, 0, 8), (1, 0, 4)),
    ((7, 6, 1), (7, 3, 1)),
]


def drive(driver: Driver, call: Callable[[list[int], list[list[int]], list[int], Callable[[], object]], None]) -> None:
    """Two prompts and the calls above. ``call`` gets the slots of a target call, their tokens, how many of these are committed,
    and what runs it."""
    generator = torch.Generator().manual_seed(6)

    def text(count: int) -> list[int]:
        return torch.randint(0, TINY.vocab_size, (count,), generator=generator).tolist()

    # one prompt in uneven chunks, one of a single token, one shorter than an n-gram
    for slot, chunks in enumerate([(1, 4, 19), (1,), (2,)]):
        for size in chunks:
            tokens = text(size)
            call([slot], [tokens], [size], lambda t=tokens, s=slot: driver.prefill(s, torch.tensor(t)))
    for counts, taken in CALLS:
        blocks = [text(8) for _ in counts]
        lanes = driver.lanes(*range(SLOTS), dead=[slot for slot, count in enumerate(counts) if not count])
        rows = PackedRows.pack(lanes, torch.tensor(counts).sub(1).clamp(min=0), width=8, rows=20, spare=SLOTS)
        running = [slot for slot, count in enumerate(counts) if count]
        call(
            running,
            [blocks[slot][: counts[slot]] for slot in running],
            [taken[slot] for slot in running],
            lambda b=blocks, r=rows: driver.target.verify_rows(r.gather(torch.tensor(b)), r),
        )
        driver.commit(lanes, taken)
        driver.target.store.poison()


@torch.inference_mode()
def test_engram_rows_of_packed_requests(tmp_path, monkeypatch):
    """Table rows of the published layers for the histories that the target hands to its Engram layers."""
    geometry = pytest.importorskip("b12x.sequence.engram.geometry").build_geometry()
    reference = pytest.importorskip("b12x.sequence.engram.reference").hash_reference
    seen: list[Tensor] = []
    plain = Engram.__call__

    def recorded(self: Engram, streams: Tensor, history: Tensor) -> Tensor:
        seen.append(history.clone())
        return plain(self, streams, history)

    monkeypatch.setattr(Engram, "__call__", recorded)
    token_map = tiny_compressed_ids().tolist()
    committed: list[list[int]] = [[-1] * 3 for _ in range(SLOTS)]
    compared = 0

    def call(slots: list[int], blocks: list[list[int]], taken: list[int], run: Callable[[], object]) -> None:
        nonlocal compared
        seen.clear()
        run()
        assert len(seen) == len(TINY.engram_layer_ids) and torch.equal(seen[0], seen[1])
        tokens = [token for block in blocks for token in block]
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + len(block))
        for layer in REAL.engram_layer_ids:
            history = [ids[-3:] for ids in committed]
            wanted = reference(tokens, [True] * len(tokens), starts, slots, history, token_map, geometry, layer)
            found = RowIds.of(REAL, layer, torch.device("cpu"))(seen[0])[: len(tokens)]
            assert torch.equal(found, wanted)
        for slot, block, count in zip(slots, blocks, taken, strict=True):
            committed[slot] += [token_map[token] for token in block[:count]]
        compared += len(tokens)

    drive(Driver(write_golden_checkpoint(tmp_path / "golden"), slots=SLOTS), call)
    assert compared > 80


@torch.inference_mode()
@pytest.mark.parametrize("layer", TINY.kv_source_layer_ids)
def test_latents_of_packed_requests(tmp_path, monkeypatch, layer):
    """Unrotated and unrounded rows in bfloat16, where the reference is. A pair whose first half was committed in an earlier call
    is pooled, rejected halves are not; a sigmoid and a softmax may round one value in some hundreds differently."""
    reference = pytest.importorskip("b12x.attention.mla_compress.reference").streaming_reference
    driver = Driver(write_golden_checkpoint(tmp_path / "golden"), dtype="bfloat16", qdq=False, slots=SLOTS)
    monkeypatch.setattr(compressor, "rotate", lambda x, turns: x)
    ratio, place = TINY.compress_ratios[layer], TINY.sources_of_ratio(TINY.compress_ratios[layer]).index(layer)
    seen: list[tuple[Tensor, Tensor]] = []
    plain = Compressor.__call__

    def recorded(self: Compressor, x: Tensor, rows: Rows) -> None:
        plain(self, x, rows)
        if (self.ratio, self.layer) == (ratio, place):
            paged = rows.store.paged(f"compressed_r{ratio}", place)
            seen.append((x.clone(), paged[rows.entries[ratio]].clone()))

    monkeypatch.setattr(Compressor, "__call__", recorded)
    shape, prefix = (TINY.head_dim, TINY.hidden_size), f"layers.{layer}.attn.compressor."
    precise = torch.bfloat16 if ratio == 1 else torch.float32
    value_weight = golden_tensor(f"{prefix}wkv.weight", shape).to(precise)
    gate_weight = golden_tensor(f"{prefix}wgate.weight", shape).to(precise)
    norm = golden_tensor(f"{prefix}norm.weight", shape[:1]).float()
    state: dict[int, tuple[int, Tensor, Tensor]] = {}
    positions = [0] * SLOTS
    pairs: list[tuple[Tensor, Tensor]] = []

    def call(slots: list[int], blocks: list[list[int]], taken: list[int], run: Callable[[], object]) -> None:
        seen.clear()
        run()
        ((x, found),) = seen
        starts = [0]
        for block in blocks:
            starts.append(starts[-1] + len(block))

        def referred(rows: Tensor, starts: list[int], state: dict[int, tuple[int, Tensor, Tensor]]) -> tuple:
            values, gates = (F.linear(rows.to(precise), weight).float() for weight in (value_weight, gate_weight))
            return reference(
                values=values,
                gates=gates,
                weight=norm,
                starts=starts,
                positions=[positions[slot] for slot in slots],
                state_ids=slots,
                slots=[0] * len(rows),
                ratio=ratio,
                state=state,
            )

        wanted, emitted, _ = referred(x[: starts[-1]], starts, dict(state))
        ends = [
            (positions[slot] + place) % ratio == ratio - 1
            for slot, block in zip(slots, blocks, strict=True)
            for place in range(len(block))
        ]
        assert emitted.tolist() == ends
        pairs.append((found[: starts[-1]][emitted].float(), wanted[emitted].float()))
        # the state goes on from the committed rows alone
        kept = [row for first, count in zip(starts, taken, strict=False) for row in range(first, first + count)]
        ends_of_kept = [0]
        for count in taken:
            ends_of_kept.append(ends_of_kept[-1] + count)
        referred(x[kept], ends_of_kept, state)
        for slot, count in zip(slots, taken, strict=True):
            positions[slot] += count

    drive(driver, call)
    found, wanted = (torch.cat(part) for part in zip(*pairs, strict=True))
    assert found.shape[0] > 40
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-12)
    assert (found == wanted).double().mean() > 0.99
