"""The bound: what a cache that knows the future could hit."""

from __future__ import annotations

import heapq

from kvstore.replay.trace import Trace

_NEVER = 2**62


def belady(trace: Trace, capacity: int) -> int:
    """Hit tokens of the best cache of ``capacity`` blocks (Belady, 1966), which may also decline to store a block.

    The block whose next use is farthest leaves. A parent is used whenever its child is, so going by next use, and
    among equals by depth, is prefix-closed by itself. No policy can hit more blocks; with partial last blocks, which
    count by their tokens, it could hit a few tokens more.
    """
    following = _next_uses(trace)
    size, at, hit_tokens = trace.block_tokens, 0, 0
    due: dict[int, int] = {}  # next use of each block in the cache
    farthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block), older entries are stale
    for _, n_tokens, blocks in trace:
        hits = 0
        while hits < len(blocks) and blocks[hits] in due:
            hits += 1
        hit_tokens += min(hits * size, n_tokens)
        for depth, block in enumerate(blocks):
            next_use = following[at + depth]
            if next_use < _NEVER:
                due[block] = next_use
                heapq.heappush(farthest, (-next_use, -depth, block))
            else:
                due.pop(block, None)
        at += len(blocks)
        while len(due) > capacity:
            next_use, _, block = heapq.heappop(farthest)
            if due.get(block) == -next_use:
                del due[block]
    return hit_tokens


def _next_uses(trace: Trace) -> list[int]:
    """For each use of a block, the number of the next request that uses it."""
    uses = [(number, block) for number, request in enumerate(trace) for block in request.blocks]
    following, last = [_NEVER] * len(uses), dict[int, int]()
    for at in range(len(uses) - 1, -1, -1):
        number, block = uses[at]
        following[at] = last.get(block, _NEVER)
        last[block] = number
    return following
