"""The device tier: one arena of KV pages that running sequences and cached chunks share."""

from __future__ import annotations

import numpy as np
import torch

from kvstore.layout import KVLayout


class DeviceArena:
    """KV memory cut into pages of ``chunk_size`` slots, and who has which page. Not thread-safe: the store locks.

    ``kv`` is one tensor ``[layers, 2, kv_heads, n_pages * chunk_size, head_dim]``; page ``p`` is slots
    ``[p * chunk_size, (p + 1) * chunk_size)``. Zero-filled, so that every page is resident from the start.
    """

    def __init__(self, layout: KVLayout, n_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.n_pages = n_pages
        shape = (layout.layers, 2, layout.kv_heads, n_pages * layout.chunk_size, layout.head_dim)
        self.kv = torch.empty(shape, dtype=layout.dtype, device=device).zero_()
        self._free = np.ones(n_pages, dtype=bool)
        self._free_count = n_pages

    @property
    def free_pages(self) -> int:
        return self._free_count

    def page_view(self, page: int, n_tokens: int) -> torch.Tensor:
        """The first ``n_tokens`` slots of a page, ``[layers, 2, kv_heads, n_tokens, head_dim]``, strided."""
        start = page * self.layout.chunk_size
        return self.kv[:, :, :, start : start + n_tokens]

    def follows(self, near: int | None) -> bool:
        """Whether the page after ``near`` is free."""
        return near is not None and near + 1 < self.n_pages and bool(self._free[near + 1])

    def allocate(self, near: int | None = None, want: int = 1) -> int | None:
        """A free page; None when full.

        The one after ``near`` if it is free, else the first of the smallest free run that has ``want`` pages, or of
        the largest one.
        """
        if not self._free_count:
            return None
        if near is not None and self.follows(near):
            return self._take(near + 1)
        return self._take(self._best_run(want))

    def free(self, page: int) -> None:
        if self._free[page]:
            raise ValueError(f"page {page} is free already")
        self._free[page] = True
        self._free_count += 1

    def _take(self, page: int) -> int:
        self._free[page] = False
        self._free_count -= 1
        return page

    def _best_run(self, want: int) -> int:
        edges = np.diff(self._free, prepend=False, append=False).nonzero()[0]  # a run begins, ends, begins, ...
        firsts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = np.where(lengths >= want, lengths, self.n_pages + 1)
        # argmin and argmax take the first of equals.
        best = int(fitting.argmin()) if fitting.min() <= self.n_pages else int(lengths.argmax())
        return int(firsts[best])
