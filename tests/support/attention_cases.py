"""Rows over paged stores for kernels of attention: operands, the plugins' own forms as references, and float64 as the truth.

Entries that nothing has written are NaN: what reads one shows it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from attrs import frozen
from torch import Tensor

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.ops.grouped_rows import Chosen, RowPlan
from specdec.ops.sink_attention import Groups, attend
from specdec.state.store import StateStore
from specdec_glm53.latent_attention import IndexedAttention
from specdec_qwen38.sparse_attention import SparseAttention

PAGE = 64


def _store(field: StateField, slots: int, tokens: int, device: str, *more: StateField) -> StateStore:
    """Pages are handed out backwards and interleaved, so that neighbours in position are not neighbours in memory."""
    layout = StateLayout(owner="target", fields=(field, *more), max_draft_tokens=7, ring_history=2)
    pages = -(-tokens // PAGE)
    store = StateStore(layout, slots=slots, pages=slots * pages, context=tokens - 8, device=torch.device(device))
    for slot in range(slots):
        store.set_pages(slot, range(slots * pages - slot, 0, -slots))
    store[field.name].fill_(torch.nan)
    return store


def _softmax(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sink: Tensor | None = None) -> Tensor:
    """q: [R, heads, D]; keys, values: [R, heads, S, D]; seen: [R, S]. Returns [R, heads, D], float64."""
    logits = torch.einsum("rhd,rhsd->rhs", q.double(), keys.double()) * scale
    logits = logits.masked_fill(~seen.unsqueeze(1), float("-inf"))
    if sink is not None:
        taken = sink.double().expand(len(q), -1).unsqueeze(-1)
        logits = torch.cat([logits, taken], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return torch.einsum("rhs,rhsd->rhd", weights, values.double())


@frozen(kw_only=True, eq=False)
class GroupsCase:
    """Attention of lanes that start at ``starts``, ``rows`` rows each. kv_heads: 0 for entries that are keys and values of all
    heads."""

    name: str
    heads: int
    kv_heads: int
    width: int
    ratio: int
    budget: int
    tokens: int
    starts: tuple[int, ...]
    rows: int

    def __str__(self) -> str:
        return self.name

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def shared(self) -> bool:
        return self.kv_heads == 0

    def operands(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, RowPlan, Chosen | None]:
        """Queries in the memory order that the model has them in, the plan, and chosen groups if the sizes ask for a choice."""
        generator = torch.Generator().manual_seed(seed)
        kind = str(dtype).removeprefix("torch.")
        shape = (self.width,) if self.shared else (2, self.kv_heads, self.width)
        fields = (
            StateField(name="entries", kind=StateKind.PAGED, shape=shape, dtype=kind, source="test"),
            StateField(name="keys", kind=StateKind.PAGED, shape=(), dtype=kind, extent=self.ratio, source="test"),
            StateField(
                name="raw_tags", kind=StateKind.RING, shape=(), dtype="int64", extent=16, fill=-1, source="test"
            ),
        )
        lanes = len(self.starts)
        store = _store(fields[0], lanes, self.tokens, device, *fields[1:])
        slots = torch.arange(lanes - 1, -1, -1, device=device)
        positions = torch.tensor(self.starts).unsqueeze(1) + torch.arange(self.rows)
        plan = RowPlan.build(
            store,
            ratio=self.ratio,
            budget=self.budget,
            slots=slots,
            positions=positions.to(device),
            tokens=self.tokens,
        )
        known = torch.arange(self.tokens, device=device).expand(lanes, -1)
        written = known <= plan.positions[:, -1:]
        flat = store.entries(slots, known, valid=written)
        values = torch.randn(lanes * self.tokens, *shape, generator=generator).to(dtype)
        store.paged("entries", 0).index_copy_(0, flat, values.to(device))
        store["entries"][:, 0] = torch.nan
        if self.shared:
            q = torch.randn(self.heads, lanes * self.rows, self.width, generator=generator).to(device, dtype)
            q = q.unflatten(1, (lanes, self.rows)).permute(1, 2, 0, 3)
        else:
            both = torch.randn(lanes, self.rows, self.heads + self.kv_heads, self.width, generator=generator)
            q = both.to(device, dtype)[:, :, : self.heads]
        scores = torch.randn(lanes, self.rows, self.tokens // self.ratio, generator=generator).to(device)
        return q, plan, plan.choose(scores) if plan.select else None

    def reference(self, q: Tensor, plan: RowPlan, chosen: Chosen | None) -> Tensor:
        """What the plugin that has such entries computes without the kernel, [B, T, heads, D]."""
        geometry = SimpleNamespace(num_attention_heads=self.heads, num_key_value_heads=self.kv_heads)
        layer = SimpleNamespace(geometry=geometry, _scale=self.scale)
        forms = IndexedAttention if self.shared else SparseAttention
        renamed = SimpleNamespace(**{name: getattr(plan, name) for name in ("page_rows", "batch", "rows", "unwritten")})
        renamed.store = SimpleNamespace(
            read_pages=lambda name, *more: plan.store.read_pages("entries", *more),
            paged=lambda name, number: plan.store.paged("entries", number),
        )
        renamed.gathered = plan.gathered
        queries = q.permute(2, 0, 1, 3).flatten(1, 2) if self.shared else q
        if chosen is not None and plan.gather:
            out = forms._attend_gathered(layer, queries, chosen, renamed, 0)
        else:
            out = forms._attend_dense(
                layer, queries, plan.causal if chosen is None else plan.visible(chosen), renamed, 0
            )
        if self.shared:
            return out.unflatten(1, (plan.batch, plan.rows)).permute(1, 2, 0, 3)
        return out.unflatten(-1, (self.heads, self.width))

    def exact(self, q: Tensor, plan: RowPlan, chosen: Chosen | None) -> Tensor:
        """Float64, [B, T, heads, D]."""
        seen = plan.causal if chosen is None else plan.visible(chosen)
        entries = plan.store.read_pages("entries", 0, plan.page_rows, plan.batch).double()
        entries = entries.nan_to_num(0).unsqueeze(1).expand(-1, plan.rows, *[-1] * (entries.dim() - 1)).flatten(0, 1)
        if self.shared:
            keys = values = entries.unsqueeze(1).expand(-1, self.heads, -1, -1)
        else:
            repeat = self.heads // self.kv_heads
            keys, values = (entries[:, :, i].transpose(1, 2).repeat_interleave(repeat, dim=1) for i in range(2))
        found = _softmax(q.flatten(0, 1), keys, values, seen.flatten(0, 1), self.scale)
        return found.unflatten(0, (plan.batch, plan.rows))


#: Sizes of the shipped checkpoints, of the real models, and sizes that divide nothing; every form of the choice.
GROUPS = [
    GroupsCase(
        name="qwen-causal", heads=6, kv_heads=2, width=32, ratio=4, budget=128, tokens=512, starts=(0, 93, 250), rows=6
    ),
    GroupsCase(
        name="qwen-masked", heads=6, kv_heads=2, width=32, ratio=4, budget=16, tokens=128, starts=(0, 63, 119), rows=8
    ),
    GroupsCase(
        name="qwen-gathered", heads=6, kv_heads=2, width=32, ratio=4, budget=16, tokens=192, starts=(2, 150), rows=3
    ),
    GroupsCase(
        name="glm-causal", heads=4, kv_heads=0, width=64, ratio=4, budget=128, tokens=256, starts=(0, 200), rows=6
    ),
    GroupsCase(
        name="glm-gathered", heads=4, kv_heads=0, width=64, ratio=4, budget=16, tokens=192, starts=(1, 177), rows=1
    ),
    GroupsCase(
        name="odd-gathered", heads=21, kv_heads=1, width=24, ratio=2, budget=11, tokens=128, starts=(7, 101), rows=5
    ),
    GroupsCase(
        name="spans-causal",
        heads=2,
        kv_heads=2,
        width=16,
        ratio=4,
        budget=640,
        tokens=1472,
        starts=(3, 639, 1300),
        rows=2,
    ),
    GroupsCase(
        name="spans-gathered",
        heads=20,
        kv_heads=0,
        width=16,
        ratio=4,
        budget=200,
        tokens=1664,
        starts=(5, 1600),
        rows=2,
    ),
]
LARGE_GROUPS = [
    GroupsCase(
        name="qwen-real", heads=24, kv_heads=2, width=256, ratio=4, budget=512, tokens=8192, starts=(8000, 3), rows=6
    ),
    GroupsCase(
        name="glm-real", heads=64, kv_heads=0, width=512, ratio=4, budget=512, tokens=8192, starts=(4100,), rows=3
    ),
]


@frozen(kw_only=True, eq=False)
class WindowCase:
    """Attention of rows to a window of ``extent`` entries and to ``most`` groups of ``ratio`` tokens; ``listed``: chosen ones."""

    name: str
    heads: int
    width: int
    extent: int
    tokens: int
    positions: tuple[int, ...]
    ratio: int = 0
    most: int = 0
    listed: bool = False
    one_lane: bool = False  # all rows are of one lane, whose slot number is expanded

    def __str__(self) -> str:
        return self.name

    def operands(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """Operands of ``attend_window``."""
        generator = torch.Generator().manual_seed(seed)
        count, kind = len(self.positions), str(dtype).removeprefix("torch.")
        q = torch.randn(count, self.heads, self.width, generator=generator).to(device, dtype)
        room = self.extent + 3
        buffer = torch.randn(count * room, self.width, generator=generator).to(device, dtype)
        last = torch.arange(count, device=device) * room + self.extent + 1
        positions = torch.tensor(self.positions, device=device)
        back = torch.arange(self.extent, device=device) - (self.extent - 1)
        before = last.unsqueeze(1) + back
        buffer[before[positions.unsqueeze(1) + back < 0]] = torch.nan
        sink = torch.randn(self.heads, generator=generator).to(device)
        if not self.ratio:
            return q, buffer, last, positions, self.extent, sink, None
        field = StateField(
            name="entries", kind=StateKind.PAGED, shape=(self.width,), dtype=kind, extent=self.ratio, source="test"
        )
        store = _store(field, count, self.tokens, device)
        slots = torch.arange(count - 1, -1, -1, device=device)
        if self.one_lane:
            slots = slots[:1].expand(count)
        complete = (positions + 1) // self.ratio
        groups = torch.arange(self.tokens // self.ratio, device=device).expand(count, -1)
        at = store.entries(slots, groups * self.ratio, group=self.ratio, valid=groups < complete.unsqueeze(1))
        values = torch.randn(groups.numel(), self.width, generator=generator).to(device, dtype)
        store.paged("entries", 0).index_copy_(0, at, values)
        store["entries"][:, 0] = torch.nan
        ids = counted = None
        if self.listed:
            scores = torch.randn(groups.shape, generator=generator).to(device)
            scores = scores.masked_fill(groups >= complete.unsqueeze(1), float("-inf"))
            best = torch.sort(scores, dim=-1, descending=True, stable=True)
            ids, counted = best.indices[:, : self.most], best.values[:, : self.most] > float("-inf")
        chosen = Groups(
            store=store,
            entries=store.paged("entries", 0),
            slots=slots,
            complete=complete,
            ratio=self.ratio,
            most=self.most,
            ids=ids,
            counted=counted,
        )
        return q, buffer, last, positions, self.extent, sink, chosen

    def rows(self, q, buffer, last, positions, extent, sink, groups) -> tuple[Tensor, Tensor]:
        """Every row's keys [P, S, d], zero where not seen, and which are seen [P, S]."""
        back = torch.arange(extent, device=q.device) - (extent - 1)
        keys, seen = buffer[last.unsqueeze(1) + back], positions.unsqueeze(1) + back >= 0
        if groups is not None:
            ids = groups.ids
            if ids is None:
                ids = torch.arange(groups.most, device=q.device).expand(len(q), -1)
            counted = ids < groups.complete.unsqueeze(1) if groups.counted is None else groups.counted
            at = groups.store.entries(groups.slots, ids * groups.ratio, group=groups.ratio, valid=counted)
            keys = torch.cat([keys, groups.entries[at].unflatten(0, ids.shape)], dim=1)
            seen = torch.cat([seen, counted], dim=1)
        return keys.masked_fill(~seen.unsqueeze(-1), 0), seen

    def reference(self, *operands) -> Tensor:
        """Rows copied together for ``attend``."""
        q, sink = operands[0], operands[5]
        keys, seen = self.rows(*operands)
        bias = torch.where(seen, 0.0, float("-inf")).unsqueeze(1)
        return attend(q.unsqueeze(1), keys, bias, sink).squeeze(1)

    def exact(self, *operands) -> Tensor:
        q, sink = operands[0], operands[5]
        keys, seen = self.rows(*operands)
        wide = keys.unsqueeze(1).expand(-1, self.heads, -1, -1)
        return _softmax(q, wide, wide, seen, self.width**-0.5, sink)


WINDOWS = [
    WindowCase(name="window", heads=4, width=64, extent=128, tokens=512, positions=(0, 3, 126, 127, 128, 400)),
    WindowCase(
        name="all-r2", heads=4, width=64, extent=128, tokens=512, positions=(0, 1, 2, 130, 500), ratio=2, most=256
    ),
    WindowCase(name="all-r1", heads=4, width=64, extent=128, tokens=512, positions=(0, 77, 511), ratio=1, most=512),
    WindowCase(
        name="listed-r2", heads=4, width=64, extent=16, tokens=512, positions=(0, 9, 300), ratio=2, most=48, listed=True
    ),
    WindowCase(
        name="spans", heads=18, width=24, extent=19, tokens=1600, positions=(0, 1555), ratio=1, most=1400, listed=True
    ),
]
WINDOWS.append(
    WindowCase(
        name="one-lane",
        heads=4,
        width=64,
        extent=8,
        tokens=256,
        positions=(97, 98, 99),
        ratio=2,
        most=128,
        one_lane=True,
    )
)
LARGE_WINDOWS = [
    WindowCase(
        name="real", heads=64, width=512, extent=128, tokens=8192, positions=(8000, 50), ratio=2, most=2048, listed=True
    )
]


@frozen(kw_only=True, eq=False)
class ChoiceCase:
    """Choice among group keys by heads of a query, weighted by head or not; alike: all scores are equal."""

    name: str
    heads: int
    width: int
    ratio: int
    budget: int
    tokens: int
    starts: tuple[int, ...]
    rows: int
    weighted: bool = False
    alike: bool = False

    def __str__(self) -> str:
        return self.name

    def operands(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor | None, RowPlan]:
        generator = torch.Generator().manual_seed(seed)
        kind = str(dtype).removeprefix("torch.")
        fields = (
            StateField(
                name="keys", kind=StateKind.PAGED, shape=(self.width,), dtype=kind, extent=self.ratio, source="test"
            ),
            StateField(
                name="raw_tags", kind=StateKind.RING, shape=(), dtype="int64", extent=16, fill=-1, source="test"
            ),
        )
        lanes = len(self.starts)
        store = _store(fields[0], lanes, self.tokens, device, *fields[1:])
        slots = torch.arange(lanes - 1, -1, -1, device=device)
        positions = (torch.tensor(self.starts).unsqueeze(1) + torch.arange(self.rows)).to(device)
        plan = RowPlan.build(
            store, ratio=self.ratio, budget=self.budget, slots=slots, positions=positions, tokens=self.tokens
        )
        groups = torch.arange(self.tokens // self.ratio, device=device).expand(lanes, -1)
        written = groups < (positions[:, -1:] + 1) // self.ratio
        at = store.entries(slots, groups * self.ratio, group=self.ratio, valid=written)
        keys = torch.randn(groups.numel(), self.width, generator=generator).to(device, dtype)
        store.paged("keys", 0).index_copy_(0, at, keys)
        store["keys"][:, 0] = torch.nan
        drawn = torch.randn(lanes, self.rows, self.heads * self.width + 5, generator=generator).to(device, dtype)
        q = drawn[..., 5:].unflatten(-1, (self.heads, self.width))
        if self.alike:
            q = torch.zeros_like(q)
        weights = torch.randn(lanes * self.rows, self.heads, generator=generator).to(device) if self.weighted else None
        return q, weights, plan

    def scores(self, q: Tensor, weights: Tensor | None, plan: RowPlan, dtype: torch.dtype = torch.float64) -> Tensor:
        """[B, T, groups], anything for groups that are not complete."""
        keys = plan.store.read_pages("keys", 0, plan.page_rows, plan.batch).to(dtype)
        matched = torch.einsum("bthd,bgd->bthg", q.to(dtype), keys).relu()
        if weights is not None:
            matched = matched * weights.to(dtype).view(*q.shape[:3], 1)
        return matched.sum(2) * self.width**-0.5

    def check(self, found: Chosen, q: Tensor, weights: Tensor | None, plan: RowPlan, error: float) -> None:
        """The choice is that of the exact scores, but for groups whose score is within ``error`` of the last chosen one's."""
        exact = self.scores(q, weights, plan)
        wanted = plan.choose(exact)
        assert torch.equal(found.counted, wanted.counted)
        if self.alike:
            assert torch.equal(found.ids, wanted.ids)
        lowest = exact.gather(2, wanted.ids).masked_fill(~wanted.counted, torch.inf).amin(-1, keepdim=True)
        picked, meant = (
            torch.zeros(exact.shape, dtype=torch.bool, device=exact.device).scatter(2, choice.ids, choice.counted)
            for choice in (found, wanted)
        )
        assert torch.equal(picked.sum(-1), meant.sum(-1)), "a group is chosen twice"
        far = (exact - lowest).abs() > error * exact.nan_to_num(0).abs().amax(-1, keepdim=True)
        assert not ((picked != meant) & far).any()


CHOICES = [
    ChoiceCase(name="qwen", heads=4, width=16, ratio=4, budget=16, tokens=192, starts=(0, 63, 150), rows=6),
    ChoiceCase(
        name="glm", heads=16, width=32, ratio=4, budget=128, tokens=1024, starts=(2, 900), rows=3, weighted=True
    ),
    ChoiceCase(name="odd", heads=3, width=24, ratio=2, budget=11, tokens=128, starts=(7, 101), rows=5, weighted=True),
    ChoiceCase(name="alike", heads=4, width=16, ratio=4, budget=16, tokens=192, starts=(20, 150), rows=2, alike=True),
]
