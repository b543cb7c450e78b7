"""PagePool: the free stack and the state of every page."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.page_pool import PagePool, PageState


def _pages(*ids: int) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def _view(pool: PagePool) -> tuple[list[int], list[list[int]], tuple[int, int, int]]:
    states = [pool.pages_in(state).tolist() for state in PageState]
    return pool.free_pages().tolist(), states, (pool.num_free, pool.num_private, pool.num_cached)


def test_lowest_id_is_granted_first() -> None:
    """At the start page 1 is on top of the stack, and page 0 is never granted."""
    pool = PagePool(5)
    assert pool.take(2).tolist() == [1, 2]
    assert pool.take(3).tolist() == [3, 4, 5]
    assert (pool.num_free, pool.num_private, pool.num_cached) == (0, 5, 0)


def test_grants_are_int32_copies() -> None:
    """A grant is an int32 array of its own: writing it does not touch the stack."""
    pool = PagePool(3)
    granted = pool.take(2)
    assert granted.dtype == np.int32
    granted[:] = 99
    pool.give(_pages(1, 2))
    assert pool.free_pages().tolist() == [3, 1, 2]


def test_last_page_given_is_granted_next() -> None:
    """The stack grants what was pushed last first."""
    pool = PagePool(6)
    pool.take(4)
    pool.give(_pages(2, 4, 1))
    assert pool.take(4).tolist() == [1, 4, 2, 5]


def test_take_zero_is_allowed() -> None:
    """A grant of no pages is empty and changes nothing."""
    pool = PagePool(2)
    before = _view(pool)
    assert pool.take(0).tolist() == []
    pool.give(_pages())
    pool.publish(_pages())
    assert _view(pool) == before


def test_published_pages_are_cached() -> None:
    """Publishing moves pages from private to cached, giving frees them from either state."""
    pool = PagePool(4)
    pool.take(3)
    pool.publish(_pages(3, 1))
    assert _view(pool) == ([4], [[4], [2], [1, 3]], (1, 1, 2))
    pool.give(_pages(1, 2))
    assert _view(pool) == ([4, 1, 2], [[1, 2, 4], [], [3]], (3, 0, 1))


def test_take_more_than_free_changes_nothing() -> None:
    """A grant is all or nothing."""
    pool = PagePool(3)
    pool.take(1)
    before = _view(pool)
    with pytest.raises(PageAccountingError, match="3 pages wanted, 2 free"):
        pool.take(3)
    assert _view(pool) == before


@pytest.mark.parametrize("ids", [(3,), (1, 3), (0,), (1, 0), (1, 2, 1), (-1,)])
def test_bad_give_changes_nothing(ids: tuple[int, ...]) -> None:
    """A free page, the reserved page and a page named twice are refused, with the good ones beside them."""
    pool = PagePool(4)
    pool.take(2)
    pool.publish(_pages(2))
    before = _view(pool)
    with pytest.raises(PageAccountingError):
        pool.give(_pages(*ids))
    assert _view(pool) == before


def test_giving_a_page_twice_names_it() -> None:
    """Freeing a free page raises and says which."""
    pool = PagePool(4)
    pool.take(3)
    pool.give(_pages(2))
    with pytest.raises(PageAccountingError, match=r"pages \[2\] are given back, but are free already"):
        pool.give(_pages(1, 2))


@pytest.mark.parametrize("ids", [(3,), (1, 3), (2,), (1, 2), (0,)])
def test_bad_publish_changes_nothing(ids: tuple[int, ...]) -> None:
    """Only private pages can become the tree's: not free, not cached, not the reserved one."""
    pool = PagePool(4)
    pool.take(2)
    pool.publish(_pages(2))
    before = _view(pool)
    with pytest.raises(PageAccountingError, match="are published, but are not private"):
        pool.publish(_pages(*ids))
    assert _view(pool) == before


def test_reset_frees_everything_in_the_first_order() -> None:
    """After a reset the pool is as new, whatever happened before."""
    pool = PagePool(4)
    pool.take(4)
    pool.publish(_pages(4, 2))
    pool.give(_pages(1))
    pool.reset()
    assert _view(pool) == _view(PagePool(4))
    assert pool.take(4).tolist() == [1, 2, 3, 4]


def test_free_pages_is_a_copy() -> None:
    """The audit's view of the stack cannot damage it."""
    pool = PagePool(3)
    pool.free_pages()[:] = 7
    assert pool.take(3).tolist() == [1, 2, 3]


def test_states_partition_the_pool() -> None:
    """Every page but the reserved one is in exactly one state, through a long seeded run of moves."""
    pool = PagePool(13)
    random = np.random.default_rng(5)
    private: list[int] = []
    cached: list[int] = []
    for _ in range(300):
        move = random.integers(3)
        if move == 0 and pool.num_free:
            private += pool.take(int(random.integers(1, pool.num_free + 1))).tolist()
        elif move == 1 and private:
            page = private.pop(int(random.integers(len(private))))
            pool.publish(_pages(page))
            cached.append(page)
        elif move == 2 and private + cached:
            source = private or cached
            pool.give(_pages(source.pop()))
        free, states, counts = _view(pool)
        assert states == [sorted(free), sorted(private), sorted(cached)]
        assert counts == (len(free), len(private), len(cached))
        assert sorted(free + private + cached) == list(range(1, 14))


def test_reuse_is_giving_and_taking() -> None:
    """Cached pages granted anew leave pages and counts as if they had been given back and taken."""
    views = []
    for at_once in (False, True):
        pool = PagePool(6)
        pool.publish(pool.take(4))
        if at_once:
            pool.reuse(_pages(3, 1))
        else:
            pool.give(_pages(1, 3))
            assert pool.take(2).tolist() == [3, 1]
        views.append(_view(pool))
    assert views[0] == views[1]


@pytest.mark.parametrize("page", [0, 2, 5])
def test_only_cached_pages_are_reused(page: int) -> None:
    """A reserved, private or free page is refused, and nothing is changed."""
    pool = PagePool(5)
    pages = pool.take(3)
    pool.publish(pages[[0, 2]])
    before = _view(pool)
    with pytest.raises(PageAccountingError, match=rf"\[{page}\] are granted anew"):
        pool.reuse(_pages(1, page))
    assert _view(pool) == before
