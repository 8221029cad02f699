"""The arena: its geometry, which page comes next, and the accounting of free pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import DeviceArena, KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, dtype=torch.bfloat16, chunk_size=8)


def arena(n_pages: int) -> DeviceArena:
    return DeviceArena(LAYOUT, n_pages, torch.device("cpu"))


def test_the_arena_is_one_zeroed_tensor_and_pages_are_slots_of_it() -> None:
    pages = arena(5)
    assert pages.kv.shape == (2, 2, 3, 40, 4)
    assert pages.kv.dtype == torch.bfloat16
    assert not pages.kv.any()
    view = pages.page_view(2, 5)
    assert view.shape == (2, 2, 3, 5, 4)
    view.fill_(1.0)
    assert pages.kv[:, :, :, 16:21].eq(1.0).all()
    assert pages.kv.count_nonzero() == view.numel(), "a page view reaches no other page"


def test_a_prefix_grows_into_the_page_behind_it() -> None:
    pages = arena(6)
    assert pages.allocate() == 0
    assert [pages.allocate(near=0), pages.allocate(near=1)] == [1, 2]


def test_without_a_free_neighbour_the_smallest_run_that_fits_is_begun() -> None:
    pages = arena(10)
    for _ in range(10):
        pages.allocate()
    for page in (1, 4, 5, 6, 8, 9):
        pages.free(page)
    assert pages.allocate(near=2, want=2) == 8
    assert pages.allocate(near=8) == 9
    assert pages.allocate(want=9) == 4, "none is large enough: the largest"
    assert pages.allocate(near=9) == 1, "the last page has no neighbour"


def test_a_full_arena_gives_nothing() -> None:
    pages = arena(2)
    assert {pages.allocate(), pages.allocate()} == {0, 1}
    assert pages.allocate() is None
    assert pages.allocate(near=0) is None
    assert pages.free_pages == 0


def test_a_page_cannot_be_freed_twice() -> None:
    pages = arena(2)
    page = pages.allocate()
    assert page is not None
    pages.free(page)
    with pytest.raises(ValueError, match="free already"):
        pages.free(page)
    assert pages.free_pages == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60))
def test_any_history_keeps_pages_apart_and_the_count_right(history: list[tuple[bool, int]]) -> None:
    pages = arena(12)
    taken: set[int] = set()
    for take, number in history:
        if take:
            page = pages.allocate(near=number)
            assert (page is None) == (len(taken) == 12)
            if page is not None:
                assert page not in taken, "one page for two owners"
                if number + 1 < 12 and number + 1 not in taken:
                    assert page == number + 1
                taken.add(page)
        elif number in taken:
            pages.free(number)
            taken.remove(number)
        assert pages.free_pages == 12 - len(taken)
