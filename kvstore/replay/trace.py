"""Request traces as JSON lines, the format of Mooncake's (Qin et al., FAST'25).

One object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and ``hash_ids``, the ids of the
prompt's blocks. Ids are prefix-chained: equal ids mean equal prompts up to there. The last block may be partial.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson


class TraceError(Exception):
    """A trace that can't be read: one sentence with file and line."""


class Request(NamedTuple):
    """``at`` is in seconds since the trace's start, ``n_tokens`` the prompt's length."""

    at: float
    n_tokens: int
    blocks: Sequence[int]


class Trace:
    """Requests in order, in flat arrays: 8 bytes a block. ``block_tokens`` is the size of a whole block."""

    def __init__(self, name: str, block_tokens: int = 0) -> None:
        self.name = name
        self._given = block_tokens
        self._at = array("d")
        self._n_tokens = array("q")
        self._ends = array("q", [0])
        self._blocks = array("q")
        self._smallest, self._largest = 1, 2**31  # what the lengths say of the block size

    def append(self, at: float, n_tokens: int, blocks: Sequence[int]) -> None:
        """Add a request. Raises ValueError if its length doesn't fit its number of blocks."""
        if n_tokens < 1 or not blocks:
            raise ValueError("a request needs at least one token and one block")
        smallest = max(self._smallest, math.ceil(n_tokens / len(blocks)))
        largest = self._largest
        if len(blocks) > 1:
            largest = min(largest, (n_tokens - 1) // (len(blocks) - 1))
        if (self._given and not smallest <= self._given <= largest) or smallest > largest:
            raise ValueError(f"{n_tokens} tokens in {len(blocks)} blocks don't fit the other requests' block size")
        self._smallest, self._largest = smallest, largest
        self._at.append(at)
        self._n_tokens.append(n_tokens)
        self._blocks.extend(blocks)
        self._ends.append(len(self._blocks))

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Request]:
        for number, (at, n_tokens) in enumerate(zip(self._at, self._n_tokens, strict=True)):
            yield Request(at, n_tokens, self._blocks[self._ends[number] : self._ends[number + 1]])

    @property
    def block_tokens(self) -> int:
        """As given, else what all lengths fit: a power of two if there is one."""
        power: int = 2 ** math.ceil(math.log2(self._smallest))
        return self._given or (power if power <= self._largest else self._smallest)

    @property
    def block_uses(self) -> int:
        return len(self._blocks)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._n_tokens)

    def distinct_blocks(self) -> int:
        return len(set(self._blocks))


def read_trace(path: Path) -> Trace:
    """Read a trace, line by line.

    Raises:
        TraceError: no such file, or a line that isn't a request.
    """
    trace: Trace | None = None
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    at, n_tokens, blocks, size = _parse(line)
                    trace = trace or Trace(path.stem, size)
                    trace.append(at, n_tokens, blocks)
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise TraceError(f"{path}:{number}: not a request of a trace: {_reason(error)}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; give a JSONL trace") from None
    if trace is None:
        raise TraceError(f"{path}: there is no request in it")
    return trace


def _parse(line: bytes) -> tuple[float, int, list[int], int]:
    row: dict[str, Any] = orjson.loads(line)
    if not isinstance(row, dict):
        raise TypeError("a line must be a JSON object")
    blocks = row["hash_ids"]
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise TypeError("hash_ids must be a list of whole numbers")
    return float(row["timestamp"]) / 1000.0, int(row["input_length"]), blocks, int(row.get("block_size", 0))


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
