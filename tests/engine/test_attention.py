"""Paged attention against a plain reference over the same keys: runs, sharing, windows, soft-cap, sinks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gateway.engine.attention import AttentionBatch, Run, Scratch, Segment, page_runs, paged_attention

PAGE, HEADS, KV_HEADS, DIM = 32, 6, 2, 16


def test_adjacent_pages_are_one_run() -> None:
    assert page_runs([4, 5, 6, 9, 2], PAGE, 140) == [Run(128, 96), Run(288, 32), Run(64, 12)]
    assert page_runs([4, 5], PAGE, 40, first=34) == [Run(162, 6)]
    assert page_runs([4], PAGE, 0) == []


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int, softcap: float, sinks: Any
) -> torch.Tensor:
    """``q [heads, n, dim]`` at positions ``start ..`` over ``keys [kv_heads, n_keys, dim]``, in float64."""
    group = HEADS // KV_HEADS
    keys, values = (t.double().repeat_interleave(group, 0) for t in (keys, values))
    scores = q.double() @ keys.transpose(1, 2) * DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(start, start + q.shape[1])[:, None]
    columns = torch.arange(keys.shape[1])[None, :]
    hidden = columns > positions
    if window:
        hidden |= columns <= positions - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(HEADS, 1, 1).expand(-1, q.shape[1], 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ values
    return torch.softmax(scores, -1) @ values


def check(segments: list[Segment], pages: int = 128, **kind: Any) -> None:
    for use_flash in (False, True):
        check_with(segments, pages, use_flash, **kind)


def check_with(segments: list[Segment], pages: int, use_flash: bool, **kind: Any) -> None:
    torch.manual_seed(0)
    kv = torch.randn(1, 2, KV_HEADS, pages * PAGE, DIM)
    total = sum(s.q_len for s in segments)
    q = torch.randn(1, HEADS, total, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, total, DIM)
    batch = AttentionBatch(kv, PAGE, segments, Scratch(), use_flash=use_flash)
    module: Any = SimpleNamespace(layer_idx=0)
    out, _ = paged_attention(
        module, q, k, v, None, scaling=DIM**-0.5, sliding_window=kind.get("window"), softcap=kind.get("softcap"),
        s_aux=kind.get("sinks"), kv_batch=batch,
    )  # fmt: skip
    for s in segments:
        slots = [slot for run in page_runs(s.pages, PAGE, s.context) for slot in range(run.slot, run.slot + run.length)]
        rows = slice(s.q_start, s.q_start + s.q_len)
        assert torch.equal(kv[0, 0][:, slots[s.start :]], k[0][:, rows]), "new keys lie in the pages"
        wanted = reference(
            q[0][:, rows], kv[0, 0][:, slots], kv[0, 1][:, slots], s.start, kind.get("window") or 0,
            kind.get("softcap") or 0, kind.get("sinks"),
        )  # fmt: skip
        torch.testing.assert_close(out[0, rows].transpose(0, 1).double(), wanted, atol=2e-5, rtol=2e-5)


KINDS = {
    "full": {},
    "window": {"window": 40},
    "softcap": {"softcap": 1.5},
    "window+softcap": {"window": 50, "softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_over_scattered_pages(kind: str) -> None:
    check(
        [
            Segment(0, 20, 64, [7, 8, 3]),
            Segment(20, 1, 101, [20, 11, 12, 30]),
            Segment(21, 32, 0, [40]),
            Segment(53, 1, 0, [41]),
        ],
        **KINDS[kind],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_that_share_leading_pages(kind: str) -> None:
    shared = [5, 6, 7, 2, 50, 51]
    check(
        [
            Segment(0, 1, 200, [*shared, 60]),
            Segment(1, 1, 195, [*shared, 70]),  # its tail is shorter
            Segment(2, 1, 250, [*shared, 80, 90]),
            Segment(3, 1, 250, [9, 10, 11, 12, 13, 14, 15, 16]),  # shares nothing
        ],
        **KINDS[kind],
    )


def test_many_sequences_over_one_long_prefix() -> None:
    """Enough query rows for the product path and runs long enough to be read in two halves, odd lengths too."""
    shared = list(range(10, 62))
    check([Segment(i, 1, 52 * PAGE + i, [*shared, 70 + i]) for i in range(9)])
    check([Segment(0, 1, 1600, list(range(10, 62)))])
    check([Segment(0, 1, 1601, list(range(10, 62)))])


@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_no_order_at_all(kind: str) -> None:
    pages = [(7 * i) % 31 for i in range(10)]
    check([Segment(0, 25, 290, pages), Segment(25, 1, 318, [*pages[:9], 40])], **KINDS[kind])
    check([Segment(i, 1, 300 + i, [*pages[:9], 41 + i]) for i in range(4)], **KINDS[kind])


def test_a_prefill_that_starts_inside_a_page_and_ends_at_its_edge() -> None:
    check([Segment(0, 12, 52, [3, 9])])
    check([Segment(0, 12, 52, [3, 9])], window=8)
