"""Paged attention over the arena, plugged into transformers through its public AttentionInterface.

A step packs the new tokens of many sequences into one row (``[1, T]``). For each layer transformers calls
``paged_attention`` with Q, K and V of those T tokens; the K and V go into the arena's pages, and each
sequence attends to its own pages. Because a sequence's pages are mostly adjacent, its keys are a few
*runs* of consecutive slots that can be viewed without copying.

Three ways through a layer, with softmax state in fp32:

* ``_attend_products``: scores of a segment over all its keys in one reused buffer, one softmax, one product with V.
  It knows causal and sliding-window masks, soft-capping (Gemma 2) and attention sinks (gpt-oss). CPU and CUDA alike.
* ``_attend_flash``: the same for plain attention where torch's CPU flash op is faster (see ``attention_parts``): the
  keys before the segment without a mask, its own causally, joined by log-sum-exp.
* ``_attend_shared``: decoding sequences that share leading pages attend to those in one product, so a shared prefix is
  read once a step, and to their own tails in one gather; the parts are joined likewise (Hydragen, DeFT).

Measured on two AVX-512 cores, bf16, SmolLM2's shape, 7k keys: 256 queries 9.7 ms a layer (the CPU flash op: 26 ms);
one query 0.27 ms (flash op: 0.72 ms), since ``K q^T`` reads the keys as they lie while ``q K^T`` transposes them first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from gateway.engine.attention_parts import flash, flash_parts, merge, scale_product, softmax_part

ATTENTION_NAME = "kvgate_paged"

#: Keys in more runs than this are first copied side by side. Measured with 7k keys of SmolLM2's shape in 28 runs: one
#: query 4.1 ms a layer as they lie, 2.5 with the copy; 256 queries 22 and 17 ms (in one run: 1.1 and 14 ms).
_MOST_RUNS = 4

#: Elements of the score buffer. 8 Mi bf16 elements (16 MiB) stay near the last-level cache.
_SCORE_ELEMENTS = 8 * 1024 * 1024


#: The gather buffer grows by this many tokens at a time.
_GATHER_STEP = 1024

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` consecutive arena slots from ``slot`` on, in order of position."""

    slot: int
    length: int


@dataclass(slots=True)
class Segment:
    """The new tokens of one sequence in a step.

    They are rows ``[q_start, q_start + q_len)`` of the packed batch, at positions ``start ..`` of the sequence,
    and must not cross a page boundary. ``pages`` is the sequence's page table, covering ``start + q_len`` tokens.
    """

    q_start: int
    q_len: int
    start: int
    pages: Seq[int]
    #: When set, layer by layer receives the queries of the probe heads (see importance measuring).
    probe: ProbeSink | None = None

    @property
    def context(self) -> int:
        return self.start + self.q_len


@dataclass(slots=True)
class ProbeSink:
    """Keeps the probe heads' queries of the observation window, one ``[heads, w, head_dim]`` tensor a layer."""

    heads: list[int]
    rows: int  # how many of the segment's last rows to keep
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class _SharedGroup:
    """Decoding sequences that read the same leading runs."""

    members: list[Segment]
    rows: torch.Tensor  # the members' rows in the packed batch
    runs: list[Run]  # what they share
    tail_slots: torch.Tensor  # [members, m]: what each has for itself, padded with any valid slot
    tail_mask: torch.Tensor  # additive fp32 [members, 1, m], -inf on padding


def page_runs(pages: Seq[int], page_size: int, n_tokens: int, first: int = 0, *, merge: bool = True) -> list[Run]:
    """Runs of adjacent slots covering positions ``[first, n_tokens)``; without ``merge`` one run a page."""
    runs: list[Run] = []
    position = first
    while position < n_tokens:
        index, offset = divmod(position, page_size)
        slot = pages[index] * page_size + offset
        length = min(page_size - offset, n_tokens - position)
        if merge and runs and runs[-1].slot + runs[-1].length == slot:
            runs[-1] = Run(runs[-1].slot, runs[-1].length + length)
        else:
            runs.append(Run(slot, length))
        position += length
    return runs


class Scratch:
    """Reused buffers for attention scores and gathered KV, so that a step allocates nothing that grows with context."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def scores(self, n_elements: int, like: torch.Tensor) -> torch.Tensor:
        return self._take("scores", max(n_elements, _SCORE_ELEMENTS), like)[:n_elements]

    def gathered(self, runs: Seq[Run], arena: torch.Tensor) -> KeysValues:
        """K and V of the runs side by side, each ``[kv_heads, n, head_dim]``; ``arena`` is a layer's K and V."""
        n = sum(run.length for run in runs)
        _, kv_heads, _, dim = arena.shape
        room = -(-n // _GATHER_STEP) * _GATHER_STEP
        both = self._take("kv", 2 * kv_heads * room * dim, arena)[: 2 * kv_heads * n * dim].view(2, kv_heads, n, dim)
        torch.cat([arena[:, :, run.slot : run.slot + run.length] for run in runs], 2, out=both)
        return both[0], both[1]

    def _take(self, name: str, n_elements: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < n_elements or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffers[name] = torch.empty(n_elements, dtype=like.dtype, device=like.device)
        return buffer


class AttentionBatch:
    """Everything about a step that is the same for all layers, worked out once.

    Args:
        kv: the arena, ``[layers, 2, kv_heads, slots, head_dim]``.
        page_size: slots a page (the chunk size).
        segments: the step's segments, in order of ``q_start``.
        scratch: reused buffers.
        deterministic: make the result independent of where pages lie and of who else is in the step.
        use_flash: use torch's CPU flash op where attention is plain (see ``flash_pays``).
    """

    def __init__(
        self,
        kv: torch.Tensor,
        page_size: int,
        segments: Seq[Segment],
        scratch: Scratch,
        *,
        deterministic: bool = False,
        use_flash: bool = False,
    ) -> None:
        self.kv = kv
        self.use_flash = use_flash and not deterministic
        self.merge_pages = not deterministic
        self.scratch = scratch
        self.page_size = page_size
        self.segments = list(segments)
        self.n_tokens = sum(s.q_len for s in self.segments)
        self._slots: torch.Tensor | None = None
        self._masks: dict[tuple[int, int, int, int, int], torch.Tensor | None] = {}
        self.groups = [] if deterministic else self._group_decodes()
        grouped = {id(member) for group in self.groups for member in group.members}
        self.singles = [s for s in self.segments if id(s) not in grouped]
        if len(self.segments) > 1:
            slots = [self._slot(s, s.start + i) for s in self.segments for i in range(s.q_len)]
            self._slots = torch.tensor(slots, device=kv.device)

    def _slot(self, segment: Segment, position: int) -> int:
        index, offset = divmod(position, self.page_size)
        return segment.pages[index] * self.page_size + offset

    def _group_decodes(self) -> list[_SharedGroup]:
        by_first_page: dict[int, list[Segment]] = {}
        for segment in self.segments:
            if segment.q_len == 1:
                by_first_page.setdefault(segment.pages[0], []).append(segment)
        groups = []
        for members in by_first_page.values():
            if len(members) > 1 and (shared := self._shared_pages(members)):
                groups.append(self._group(members, shared * self.page_size))
        return groups

    def _shared_pages(self, members: list[Segment]) -> int:
        """Whole pages that every member has and has filled; a page being written is never shared."""
        shared = 0
        limit = min((m.context - 1) // self.page_size for m in members)
        while shared < limit and len({m.pages[shared] for m in members}) == 1:
            shared += 1
        return shared

    def _group(self, members: list[Segment], first: int) -> _SharedGroup:
        device = self.kv.device
        lengths = torch.tensor([m.context - first for m in members])
        widest = int(lengths.max())
        slots = [[self._slot(m, min(first + i, m.context - 1)) for i in range(widest)] for m in members]
        padding = torch.arange(widest)[None, :] >= lengths[:, None]
        mask = torch.zeros(len(members), 1, widest).masked_fill_(padding[:, None, :], float("-inf"))
        return _SharedGroup(
            members=members,
            rows=torch.tensor([m.q_start for m in members], device=device),
            runs=page_runs(members[0].pages, self.page_size, first),
            tail_slots=torch.tensor(slots, device=device),
            tail_mask=mask.to(device),
        )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the new K and V, each ``[kv_heads, T, head_dim]``, into the pages of ``layer``."""
        k_arena, v_arena = self.kv[layer, 0], self.kv[layer, 1]
        if self._slots is None:
            (segment,) = self.segments
            slot = self._slot(segment, segment.start)
            k_arena[:, slot : slot + segment.q_len].copy_(key)
            v_arena[:, slot : slot + segment.q_len].copy_(value)
        else:
            k_arena.index_copy_(1, self._slots, key.to(k_arena.dtype))
            v_arena.index_copy_(1, self._slots, value.to(v_arena.dtype))

    def pieces(self, arena: torch.Tensor, runs: list[Run]) -> list[KeysValues]:
        """K and V of the runs in a layer's arena ``[2, kv_heads, slots, dim]``: views, or one copy if they are many."""
        if self.merge_pages and len(runs) > _MOST_RUNS:
            return [self.scratch.gathered(runs, arena)]
        return [(_slots(arena[0], run), _slots(arena[1], run)) for run in runs]

    def mask(self, q0: int, q_len: int, k0: int, k1: int, window: int) -> torch.Tensor | None:
        """Additive mask ``[q_len, k1 - k0]`` for queries at ``q0 ..`` and keys ``[k0, k1)``; None: all are seen."""
        name = (q0, q_len, k0, k1, window)
        if name not in self._masks:
            self._masks[name] = self._build_mask(q0, q_len, k0, k1, window)
        return self._masks[name]

    def _build_mask(self, q0: int, q_len: int, k0: int, k1: int, window: int) -> torch.Tensor | None:
        sees_all = k1 - 1 <= q0 and (not window or k0 > q0 + q_len - 1 - window)
        if sees_all:
            return None
        queries = torch.arange(q0, q0 + q_len, device=self.kv.device)[:, None]
        keys = torch.arange(k0, k1, device=self.kv.device)[None, :]
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        return torch.zeros(q_len, k1 - k0, dtype=self.kv.dtype, device=self.kv.device).masked_fill_(
            hidden, float("-inf")
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Per-layer attention settings as transformers passes them."""

    scaling: float
    window: int  # 0 = full attention
    softcap: float  # 0 = none
    sinks: torch.Tensor | None  # [heads]

    @property
    def plain(self) -> bool:
        return not (self.window or self.softcap) and self.sinks is None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kv_batch: AttentionBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers (see its AttentionInterface).

    Args:
        query: ``[1, heads, T, head_dim]``; key and value: ``[1, kv_heads, T, head_dim]`` (RoPE applied). Rows after
            the step's tokens are padding: their KV is not kept, and they attend to nothing.
        kv_batch: the step, passed as a keyword argument of the model call.

    Returns:
        ``[1, T, heads, head_dim]`` and None (no weights).
    """
    if kv_batch is None:
        raise RuntimeError("paged_attention was called without kv_batch: this model drops keyword arguments")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads, n_rows, head_dim = query.shape[1:]
    n_tokens = kv_batch.n_tokens
    q = query[0, :, :n_tokens]
    kv_batch.write(layer, key[0, :, :n_tokens], value[0, :, :n_tokens])
    shape = _Shape(
        scaling=head_dim**-0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    out = torch.empty(n_rows, heads, head_dim, dtype=q.dtype, device=q.device)
    out[n_tokens:] = 0
    arena = kv_batch.kv[layer]
    for segment in kv_batch.singles:
        if kv_batch.use_flash and shape.plain:
            _attend_flash(kv_batch, segment, q, arena, shape.scaling, out)
        else:
            _attend_products(kv_batch, segment, q, arena, shape, out)
        if segment.probe is not None and not shape.window:
            probe = segment.probe
            end = segment.q_start + segment.q_len
            probe.queries[layer] = q[probe.heads, end - probe.rows : end].clone()
            probe.scaling = shape.scaling
    for group in kv_batch.groups:
        if shape.plain:
            _attend_shared(kv_batch, group, q, arena, shape.scaling, out)
        else:
            for segment in group.members:
                _attend_products(kv_batch, segment, q, arena, shape, out)
    return out.unsqueeze(0), None


def _attend_products(
    batch: AttentionBatch,
    segment: Segment,
    q: torch.Tensor,
    arena: torch.Tensor,
    shape: _Shape,
    out: torch.Tensor,
) -> None:
    _, kv_heads, _, head_dim = arena.shape
    group = q.shape[0] // kv_heads
    per_query = q.shape[0] * (segment.context + 1)
    block = max(1, min(segment.q_len, _SCORE_ELEMENTS // per_query))
    all_runs = page_runs(segment.pages, batch.page_size, segment.context, merge=batch.merge_pages)
    pieces = [] if shape.window else batch.pieces(arena, all_runs)
    for lo in range(0, segment.q_len, block):
        n = min(block, segment.q_len - lo)
        q0 = segment.start + lo
        k0 = max(0, q0 - shape.window + 1) if shape.window else 0
        k1 = q0 + n
        row = segment.q_start + lo
        queries = q[:, row : row + n].reshape(kv_heads, group * n, head_dim)
        if shape.window:
            runs = page_runs(segment.pages, batch.page_size, k1, k0, merge=batch.merge_pages)
            pieces = batch.pieces(arena, runs)
        columns = k1 - k0 + (shape.sinks is not None)
        scores = batch.scratch.scores(kv_heads * group * n * columns, q).view(kv_heads, group * n, columns)
        _fill_scores(scores[..., : k1 - k0], queries, pieces, shape.scaling)
        if shape.softcap:
            scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        by_head = scores.view(kv_heads, group, n, columns)
        _add_mask(batch, by_head, q0, n, k0, k1, shape.window)
        if shape.sinks is not None:
            by_head[..., -1] = shape.sinks.view(kv_heads, group, 1).to(scores.dtype)
        torch.softmax(scores, -1, out=scores)
        mixed = _mix_values(scores[..., : k1 - k0], pieces)
        _put(mixed, out[row : row + n])


def _put(mixed: torch.Tensor, rows: torch.Tensor) -> None:
    """``mixed [kv_heads, group * n, dim]`` into ``rows [n, heads, dim]``."""
    kv_heads, _, dim = mixed.shape
    n = rows.shape[0]
    rows.view(n, kv_heads, -1, dim).copy_(mixed.view(kv_heads, -1, n, dim).permute(2, 0, 1, 3))


def _attend_flash(
    batch: AttentionBatch,
    segment: Segment,
    q: torch.Tensor,
    arena: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> None:
    _, kv_heads, _, dim = arena.shape
    n = segment.q_len
    queries = q[:, segment.q_start : segment.q_start + n].reshape(kv_heads, -1, dim)
    before = segment.context if n == 1 else segment.start
    parts = [
        part
        for keys, values in batch.pieces(arena, page_runs(segment.pages, batch.page_size, before))
        for part in flash_parts(queries, keys, values, scaling)
    ]
    if n > 1:
        (own,) = page_runs(segment.pages, batch.page_size, segment.context, segment.start)
        by_head = queries.view(kv_heads, -1, n, dim)
        # A KV head is the op's batch here: its query heads read the same keys through a stride of 0.
        keys, values = (_slots(a, own)[:, None].expand(-1, by_head.shape[1], -1, -1) for a in arena)
        mixed, lse = flash(by_head, keys, values, scaling, causal=True)
        parts.append((mixed.reshape(queries.shape), lse.reshape(kv_heads, -1)))
    _put(merge(parts), out[segment.q_start : segment.q_start + n])


def _fill_scores(scores: torch.Tensor, queries: torch.Tensor, pieces: list[KeysValues], scaling: float) -> None:
    """The first ``scores.shape[-1]`` keys of the pieces."""
    column, columns = 0, scores.shape[-1]
    for keys, _ in pieces:
        n = min(keys.shape[1], columns - column)
        if n > 0:
            scale_product(queries, keys[:, :n], scaling, scores[..., column : column + n])
            column += n


def _add_mask(batch: AttentionBatch, scores: torch.Tensor, q0: int, n: int, k0: int, k1: int, window: int) -> None:
    """Mask only the columns that some query of the block may not see: the diagonal, and the window's far edge."""
    diagonal = batch.mask(q0, n, q0, k1, window)
    if diagonal is not None:
        scores[..., q0 - k0 : k1 - k0] += diagonal
    if window and k0 < q0:
        far_end = min(q0, k0 + n)
        far = batch.mask(q0, n, k0, far_end, window)
        if far is not None:
            scores[..., : far_end - k0] += far


def _mix_values(weights: torch.Tensor, pieces: list[KeysValues]) -> torch.Tensor:
    column, columns = 0, weights.shape[-1]
    if pieces[0][1].shape[1] >= columns:
        return torch.bmm(weights, pieces[0][1][:, :columns])
    total: torch.Tensor | None = None
    for _, values in pieces:
        n = min(values.shape[1], columns - column)
        if n > 0:
            part = torch.bmm(weights[..., column : column + n], values[:, :n]).float()
            total = part if total is None else total.add_(part)
            column += n
    assert total is not None
    return total.to(weights.dtype)


def _slots(arena: torch.Tensor, run: Run) -> torch.Tensor:
    return arena[:, run.slot : run.slot + run.length]


def _attend_shared(
    batch: AttentionBatch,
    group: _SharedGroup,
    q: torch.Tensor,
    arena: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """All members against the shared runs in one product each, their tails in one gather, joined by log-sum-exp."""
    _, kv_heads, _, dim = arena.shape
    members, width = group.tail_slots.shape
    # [kv_heads, members, per_kv, dim]: rows of one KV head together, member by member.
    rows = q[:, group.rows].view(kv_heads, -1, members, dim).transpose(1, 2).contiguous()
    folded = rows.view(kv_heads, -1, dim)
    parts = []
    for keys, values in batch.pieces(arena, group.runs):
        if batch.use_flash:
            parts += flash_parts(folded, keys, values, scaling)
        else:
            parts.append(softmax_part(folded, keys, values, scaling))
    own_keys, own_values = (a[:, group.tail_slots].view(-1, width, dim) for a in arena)
    mask = group.tail_mask.repeat(kv_heads, 1, 1)
    own_out, own_lse = softmax_part(rows.view(kv_heads * members, -1, dim), own_keys, own_values, scaling, mask)
    parts.append((own_out.view(folded.shape), own_lse.view(kv_heads, -1)))
    joined = merge(parts).view(kv_heads, members, -1, dim)
    out[group.rows] = joined.transpose(0, 1).reshape(members, -1, dim).to(out.dtype)


def register() -> None:
    """Make ``attn_implementation="kvgate_paged"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
