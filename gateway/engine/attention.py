"""Paged attention over the arena, plugged into transformers through its public AttentionInterface.

A step packs the new tokens of many sequences into one row (``[1, T]``). For each layer transformers calls
``paged_attention`` with Q, K and V of those T tokens; the K and V go into the arena's pages, and each
sequence attends to its own pages. Because a sequence's pages are mostly adjacent, its keys are a few
*runs* of consecutive slots that can be viewed without copying.

Two kernels, both exact:

* ``_attend_products``: scores over all keys of a segment in one buffer, one softmax with fp32 state, one
  product with V. For bf16 it runs at matmul speed, about 3x the CPU flash op at 256 queries. It knows
  causal and sliding-window masks, soft-capping (Gemma 2) and attention sinks (gpt-oss).
* ``_attend_decode``: one query per sequence on CPU through the flash op, run by run, merged by
  log-sum-exp. Sequences that share leading pages attend to them in one call, so a shared prefix is read
  once a step (DeFT, Hydragen: "prefix-shared attention").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "kvgate_paged"

#: Elements of the score buffer. 8 Mi bf16 elements (16 MiB) stay near the last-level cache.
_SCORE_ELEMENTS = 8 * 1024 * 1024

#: Runs from this length on are attended to in two halves side by side.
_SPLIT_RUN = 1536

#: From this many query rows a KV head on, two products read a shared run faster than the flash op does.
_PRODUCT_ROWS = 12


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
class _Tails:
    """What each member of a group has for itself, as one gather: short next to the prefix they share."""

    slots: torch.Tensor  # [members, m], padded with any valid slot
    mask: torch.Tensor  # additive fp32 [members, 1, m], -inf on padding


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decoding sequences that read the same leading runs. ``rows`` are their rows in the packed batch."""

    rows: torch.Tensor
    shared: list[Run]
    tails: _Tails | None  # only with shared runs
    context: list[int]
    runs: list[list[Run]]  # all runs of each member


def page_runs(pages: Seq[int], page_size: int, n_tokens: int, first: int = 0) -> list[Run]:
    """Merge a page table into runs of adjacent slots covering positions ``[first, n_tokens)``."""
    runs: list[Run] = []
    position = first
    while position < n_tokens:
        index, offset = divmod(position, page_size)
        slot = pages[index] * page_size + offset
        length = min(page_size - offset, n_tokens - position)
        if runs and runs[-1].slot + runs[-1].length == slot:
            runs[-1] = Run(runs[-1].slot, runs[-1].length + length)
        else:
            runs.append(Run(slot, length))
        position += length
    return runs


class ScoreScratch:
    """One reused buffer for attention scores, so that a step allocates nothing that grows with context."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, n_elements: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffer
        if buffer is None or buffer.numel() < n_elements or buffer.dtype != like.dtype or buffer.device != like.device:
            size = max(n_elements, _SCORE_ELEMENTS)
            buffer = self._buffer = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:n_elements]


class AttentionBatch:
    """Everything about a step that is the same for all layers, worked out once.

    Args:
        kv: the arena, ``[layers, 2, kv_heads, slots, head_dim]``.
        page_size: slots a page (the chunk size).
        segments: the step's segments, in order of ``q_start``.
        scratch: the reused score buffer.
    """

    def __init__(self, kv: torch.Tensor, page_size: int, segments: Seq[Segment], scratch: ScoreScratch) -> None:
        self.kv = kv
        self.scratch = scratch
        self.page_size = page_size
        self.segments = list(segments)
        self.n_tokens = sum(s.q_len for s in self.segments)
        self._slots: torch.Tensor | None = None
        self._masks: dict[tuple[int, int, int, int, int], torch.Tensor | None] = {}
        on_cpu = kv.device.type == "cpu"
        self.decodes = [s for s in self.segments if s.q_len == 1 and on_cpu]
        self.prefills = [s for s in self.segments if s.q_len > 1 or not on_cpu]
        self.groups = self._group_decodes()
        if len(self.segments) > 1:
            slots = [self._slot(s, s.start + i) for s in self.segments for i in range(s.q_len)]
            self._slots = torch.tensor(slots, device=kv.device)

    def _slot(self, segment: Segment, position: int) -> int:
        index, offset = divmod(position, self.page_size)
        return segment.pages[index] * self.page_size + offset

    def _group_decodes(self) -> list[_DecodeGroup]:
        by_first_page: dict[int, list[Segment]] = {}
        for segment in self.decodes:
            by_first_page.setdefault(segment.pages[0], []).append(segment)
        groups = []
        for members in by_first_page.values():
            # Whole pages that every member has and has filled; the page being written is never shared.
            shared = 0
            limit = min((m.context - 1) // self.page_size for m in members) if len(members) > 1 else 0
            while shared < limit and len({m.pages[shared] for m in members}) == 1:
                shared += 1
            first = shared * self.page_size
            groups.append(
                _DecodeGroup(
                    rows=torch.tensor([m.q_start for m in members], device=self.kv.device),
                    shared=page_runs(members[0].pages, self.page_size, first),
                    tails=self._gather_tails(members, first) if shared else None,
                    context=[m.context for m in members],
                    runs=[page_runs(m.pages, self.page_size, m.context) for m in members],
                )
            )
        return groups

    def _gather_tails(self, members: list[Segment], first: int) -> _Tails:
        lengths = torch.tensor([m.context - first for m in members])
        widest = int(lengths.max())
        slots = [[self._slot(m, min(first + i, m.context - 1)) for i in range(widest)] for m in members]
        padding = torch.arange(widest)[None, :] >= lengths[:, None]
        mask = torch.zeros(len(members), 1, widest).masked_fill_(padding[:, None, :], float("-inf"))
        return _Tails(torch.tensor(slots, device=self.kv.device), mask.to(self.kv.device))

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

    def mask(self, q0: int, q_len: int, k0: int, k1: int, window: int) -> torch.Tensor | None:
        """Additive mask ``[q_len, k1 - k0]`` for queries at ``q0 ..`` and keys ``[k0, k1)``; None where all are seen."""
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
        query: ``[1, heads, T, head_dim]``; key and value: ``[1, kv_heads, T, head_dim]`` (RoPE applied).
        kv_batch: the step, passed as a keyword argument of the model call.

    Returns:
        ``[1, T, heads, head_dim]`` and None (no weights).
    """
    if kv_batch is None:
        raise RuntimeError("paged_attention was called without kv_batch: this model drops keyword arguments")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q = query[0]
    heads, n_tokens, head_dim = q.shape
    kv_batch.write(layer, key[0], value[0])
    shape = _Shape(
        scaling=head_dim**-0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    out = torch.empty(n_tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    k_arena, v_arena = kv_batch.kv[layer, 0], kv_batch.kv[layer, 1]
    for segment in kv_batch.prefills:
        _attend_products(kv_batch, segment, q, k_arena, v_arena, shape, out)
        if segment.probe is not None and not shape.window:
            probe = segment.probe
            end = segment.q_start + segment.q_len
            probe.queries[layer] = q[probe.heads, end - probe.rows : end].clone()
            probe.scaling = shape.scaling
    if kv_batch.decodes:
        if shape.softcap or shape.sinks is not None:
            for segment in kv_batch.decodes:
                _attend_products(kv_batch, segment, q, k_arena, v_arena, shape, out)
        else:
            for group in kv_batch.groups:
                _attend_decode(group, q, k_arena, v_arena, shape, out)
    return out.unsqueeze(0), None


def _attend_products(
    batch: AttentionBatch,
    segment: Segment,
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    shape: _Shape,
    out: torch.Tensor,
) -> None:
    kv_heads, _, head_dim = k_arena.shape
    group = q.shape[0] // kv_heads
    per_query = q.shape[0] * (segment.context + 1)
    block = max(1, min(segment.q_len, _SCORE_ELEMENTS // per_query))
    for lo in range(0, segment.q_len, block):
        n = min(block, segment.q_len - lo)
        q0 = segment.start + lo
        k0 = max(0, q0 - shape.window + 1) if shape.window else 0
        k1 = q0 + n
        row = segment.q_start + lo
        queries = q[:, row : row + n].reshape(kv_heads, group * n, head_dim)
        runs = page_runs(segment.pages, batch.page_size, k1, k0)
        columns = k1 - k0 + (shape.sinks is not None)
        scores = batch.scratch.take(kv_heads * group * n * columns, q).view(kv_heads, group * n, columns)
        _fill_scores(scores, queries, runs, k_arena, shape.scaling)
        if shape.softcap:
            scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        by_head = scores.view(kv_heads, group, n, columns)
        _add_mask(batch, by_head, q0, n, k0, k1, shape.window)
        if shape.sinks is not None:
            by_head[..., -1] = shape.sinks.view(kv_heads, group, 1).to(scores.dtype)
        torch.softmax(scores, -1, out=scores)
        mixed = _mix_values(scores, runs, v_arena)
        out[row : row + n] = mixed.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, -1, head_dim)


def _fill_scores(
    scores: torch.Tensor, queries: torch.Tensor, runs: list[Run], k_arena: torch.Tensor, scaling: float
) -> None:
    column = 0
    for run in runs:
        keys = _slots(k_arena, run).transpose(1, 2)
        part = scores[:, :, column : column + run.length]
        # beta=0 ignores what the buffer held; alpha scales the fp32 accumulator, not a rounded product.
        torch.baddbmm(part, queries, keys, beta=0, alpha=scaling, out=part)
        column += run.length


def _add_mask(
    batch: AttentionBatch, scores: torch.Tensor, q0: int, n: int, k0: int, k1: int, window: int
) -> None:
    """Mask only the columns that some query of the block may not see: the diagonal, and the window's far edge."""
    diagonal = batch.mask(q0, n, q0, k1, window)
    if diagonal is not None:
        scores[..., q0 - k0 : k1 - k0] += diagonal
    if window and k0 < q0:
        far_end = min(q0, k0 + n)
        far = batch.mask(q0, n, k0, far_end, window)
        if far is not None:
            scores[..., : far_end - k0] += far


def _mix_values(weights: torch.Tensor, runs: list[Run], v_arena: torch.Tensor) -> torch.Tensor:
    if len(runs) == 1:
        (run,) = runs
        return torch.bmm(weights[:, :, : run.length], _slots(v_arena, run))
    total: torch.Tensor | None = None
    column = 0
    for run in runs:
        part = torch.bmm(weights[:, :, column : column + run.length], _slots(v_arena, run)).float()
        total = part if total is None else total.add_(part)
        column += run.length
    assert total is not None
    return total.to(v_arena.dtype)


def _attend_decode(
    group: _DecodeGroup, q: torch.Tensor, k_arena: torch.Tensor, v_arena: torch.Tensor, shape: _Shape, out: torch.Tensor
) -> None:
    windowed = bool(shape.window) and max(group.context) > shape.window
    if group.tails is not None and not windowed:
        _attend_shared(group, group.tails, q, k_arena, v_arena, shape.scaling, out)
        return
    kv_heads, _, head_dim = k_arena.shape
    rows = q[:, group.rows]  # [heads, members, head_dim]
    for i, runs in enumerate(group.runs):
        if windowed and group.context[i] > shape.window:
            runs = _last(runs, shape.window)
        single = rows[:, i].reshape(kv_heads, -1, head_dim)
        pieces = [p for run in runs for p in _flash(single, run, k_arena, v_arena, shape.scaling)]
        out[group.rows[i]] = _merge(pieces)[0].reshape(-1, head_dim).to(out.dtype)


def _attend_shared(
    group: _DecodeGroup,
    tails: _Tails,
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """All members against the shared runs in one product each, their tails in one gather, joined by log-sum-exp."""
    kv_heads, _, head_dim = k_arena.shape
    members = len(group.context)
    rows = q[:, group.rows].view(kv_heads, -1, members, head_dim).transpose(1, 2)  # [kv_heads, members, per_kv, dim]
    folded = rows.reshape(kv_heads, -1, head_dim)
    few = folded.shape[1] < _PRODUCT_ROWS
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in group.shared:
        if few:
            pieces += _flash(folded, run, k_arena, v_arena, scaling)
        else:
            pieces.append(_softmax_piece(folded, _slots(k_arena, run), _slots(v_arena, run), scaling))
    own = _softmax_piece(rows, k_arena[:, tails.slots], v_arena[:, tails.slots], scaling, tails.mask)
    pieces.append((own[0].reshape(folded.shape), own[1].reshape(kv_heads, -1)))
    joined = _merge(pieces)[0].view(kv_heads, members, -1, head_dim)
    out[group.rows] = joined.transpose(0, 1).reshape(members, -1, head_dim).to(out.dtype)


def _softmax_piece(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of ``q [..., n, dim]`` over ``keys, values [..., m, dim]``; softmax state in fp32."""
    scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(scaling)
    if mask is not None:
        scores += mask
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = torch.matmul(weights.to(values.dtype), values).float().div_(total)
    return mixed, total.log_().add_(peak).squeeze(-1)


def _last(runs: list[Run], n_tokens: int) -> list[Run]:
    """The part of the runs that holds their last ``n_tokens`` positions."""
    kept: list[Run] = []
    for run in reversed(runs):
        take = min(run.length, n_tokens)
        if take == 0:
            break
        kept.append(Run(run.slot + run.length - take, take))
        n_tokens -= take
    return kept[::-1]


def _flash(
    q: torch.Tensor, run: Run, k_arena: torch.Tensor, v_arena: torch.Tensor, scaling: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of ``q [kv_heads, n, head_dim]`` to one run: outputs and log-sum-exps ``[kv_heads, n]`` of its pieces.

    The op gives each (batch, head) to one thread, and a model may have fewer KV heads than there are cores, or three on
    two: long runs go in as two halves, which measured a fifth faster at one query.
    """
    if run.length < _SPLIT_RUN:
        return [_flash_op(q[None], _slots(k_arena, run)[None], _slots(v_arena, run)[None], scaling)[0]]
    half = run.length // 2
    keys, values = (
        _slots(arena, Run(run.slot, 2 * half)).unflatten(1, (2, half)).transpose(0, 1) for arena in (k_arena, v_arena)
    )
    pieces = _flash_op(q.expand(2, -1, -1, -1), keys, values, scaling)
    if run.length % 2:
        last = Run(run.slot + 2 * half, 1)
        pieces += _flash_op(q[None], _slots(k_arena, last)[None], _slots(v_arena, last)[None], scaling)
    return pieces


def _slots(arena: torch.Tensor, run: Run) -> torch.Tensor:
    return arena[:, run.slot : run.slot + run.length]


def _flash_op(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, False, scale=scaling)
    return list(zip(out.unbind(0), lse.unbind(0), strict=True))


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint key sets by their log-sum-exp (fp32 state)."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([p[1].float() for p in parts])  # [parts, kv_heads, n]
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total).unsqueeze(-1)
    outs = torch.stack([p[0].float() for p in parts])
    return (outs * weights).sum(0), total


def register() -> None:
    """Make ``attn_implementation="kvgate_paged"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
