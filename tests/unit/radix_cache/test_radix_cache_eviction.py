"""RadixCache: locks, what they keep, eviction and resets, on pages named by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import PageAccountingError

# Locks


def test_lock_holds_the_node_and_its_ancestors(cache: Any) -> None:
    """Every page from the root to the locked node is kept, and no other."""
    first = cache.publish([1, 2], [7]).node
    second = cache.publish([3, 4], [8], first).node
    cache.publish([5, 6], [9], first)
    cache.lock(second)
    assert cache.counts() == (3, 2, 1)
    assert cache.evict(1).tolist() == [9]
    with pytest.raises(PageAccountingError):
        cache.evict(1)
    cache.unlock(second)
    assert cache.counts() == (2, 0, 2)


@pytest.mark.parametrize("locked_before", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 3), (1, 3), (2, 3), (1, 2), (3, 3)])
def test_deepening_a_lock_is_locking_and_unlocking(make_cache: Any, start: int, end: int, *, locked_before: bool) -> None:
    """Counts, the lock that is left, ages and with them the order of eviction are those of the two calls."""
    told = []
    for deepens in (False, True):
        cache = make_cache(2)
        path = [cache.root()]
        for i in range(3):
            path.append(cache.publish([2 * i, 2 * i + 1], [7 + i], path[-1]).node)
        cache.publish([90, 91], [20], path[1])
        if locked_before:
            cache.lock(path[2])
        cache.lock(path[start])
        if deepens:
            cache.deepen_lock(path[start], path[end])
        else:
            cache.lock(path[end])
            cache.unlock(path[start])
        told.append([cache.shape(), cache.counts(), cache.clock, [node.last_use for node in path]])
        cache.unlock(path[end])
        if locked_before:
            cache.unlock(path[2])
        told[-1].append(cache.evict(4).tolist())
    assert told[0] == told[1]


def test_locks_count(cache: Any) -> None:
    """A page locked twice is free after two unlocks, and is counted once."""
    first = cache.publish([1, 2], [7]).node
    second = cache.publish([3, 4], [8], first).node
    cache.lock(second)
    cache.lock(first)
    assert cache.counts() == (2, 2, 0)
    cache.unlock(second)
    assert cache.counts() == (2, 1, 1)
    cache.unlock(first)
    assert cache.counts() == (2, 0, 2)


def test_unlock_too_often_changes_nothing(cache: Any) -> None:
    """An unlock without a lock raises."""
    node = cache.publish([1, 2], [7]).node
    before = cache.shape(), cache.clock
    with pytest.raises(PageAccountingError, match="unlocked more often"):
        cache.unlock(node)
    assert (cache.shape(), cache.clock) == before


def test_split_keeps_both_halves_locked(cache: Any) -> None:
    """A holder's node still ends where its prefix ends, and its unlock frees both halves."""
    node = cache.publish([1, 2, 3, 4, 5, 6], [7, 8, 9]).node
    cache.lock(node)
    cache.find([1, 2, 9, 9])
    assert cache.shape() == [([7], [1, 2], 1, 1), ([8, 9], [3, 4, 5, 6], 3, 1)]
    assert cache.path_pages(node).tolist() == [7, 8, 9]
    assert cache.counts() == (3, 3, 0)
    cache.unlock(node)
    assert cache.counts() == (3, 0, 3)


# Eviction


def test_evict_takes_the_least_recently_used_leaf(cache: Any) -> None:
    """Age is the last insert, lock or unlock."""
    old = cache.publish([1, 2], [7]).node
    cache.publish([3, 4], [8])
    cache.publish([5, 6], [9])
    cache.lock(old)
    cache.unlock(old)
    assert cache.evict(1).tolist() == [8]
    assert cache.evict(2).tolist() == [9, 7]


def test_match_alone_refreshes_no_age(cache: Any) -> None:
    """A look that leads to nothing does not keep a page."""
    cache.publish([1, 2], [7])
    cache.publish([3, 4], [8])
    cache.find([1, 2, 9])
    assert cache.evict(1).tolist() == [7]


def test_insert_refreshes_the_way(cache: Any) -> None:
    """Publishing a duplicate uses the page it is a duplicate of."""
    cache.publish([1, 2], [7])
    cache.publish([3, 4], [8])
    cache.publish([1, 2], [11])
    assert cache.evict(1).tolist() == [8]


def test_evict_goes_from_the_leaves_to_the_root(cache: Any) -> None:
    """A parent cannot go before its child, however old it is."""
    first = cache.publish([1, 2], [7]).node
    cache.publish([3, 4], [8], first)
    cache.publish([5, 6], [9])
    assert cache.evict(3).tolist() == [8, 7, 9]
    assert cache.shape() == []
    assert cache.counts() == (0, 0, 0)


def test_evict_takes_a_run_from_its_end(cache: Any) -> None:
    """Part of a run may go: its last pages first, and the rest still matches."""
    cache.publish([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.evict(2).tolist() == [9, 8]
    assert cache.shape() == [([7], [1, 2], 1, 0)]
    assert cache.hit([1, 2, 3, 4, 5, 6]) == [7]
    assert cache.evict(1).tolist() == [7]


def test_evict_is_exact_over_several_leaves(cache: Any) -> None:
    """Exactly as many pages go as were asked for."""
    cache.publish([1, 2, 3, 4], [7, 8])
    cache.publish([5, 6, 7, 8], [9, 10])
    assert cache.evict(3).tolist() == [8, 7, 10]
    assert cache.counts() == (1, 0, 1)
    assert cache.evict(0).tolist() == []


def test_evict_too_much_changes_nothing(cache: Any) -> None:
    """Eviction is all or nothing."""
    node = cache.publish([1, 2], [7]).node
    cache.publish([3, 4, 5, 6], [8, 9])
    cache.lock(node)
    before = cache.shape(), cache.counts()
    with pytest.raises(PageAccountingError, match="3 pages are to be evicted, 2 can be"):
        cache.evict(3)
    assert (cache.shape(), cache.counts()) == before
    assert cache.evict(2).tolist() == [9, 8]


def test_evicted_prefix_is_gone(cache: Any) -> None:
    """A page that went to other content is not found under its old tokens."""
    cache.publish([1, 2], [7])
    cache.evict(1)
    cache.publish([5, 6], [7])
    assert cache.hit([1, 2]) == []
    assert cache.hit([5, 6]) == [7]


def test_parent_becomes_a_leaf(cache: Any) -> None:
    """Once its children are gone a node can go as well, in its turn by age."""
    parent = cache.publish([1, 2], [7]).node
    child = cache.publish([3, 4], [8], parent).node
    cache.publish([5, 6], [9])
    cache.lock(child)
    cache.unlock(child)
    assert cache.evict(1).tolist() == [9]
    assert cache.evict(1).tolist() == [8]
    assert cache.evict(1).tolist() == [7]


def test_heap_is_no_longer_than_the_tree(cache: Any) -> None:
    """Using the same leaves over and over offers each of them once."""
    nodes = [cache.publish([index, index], [index + 1]).node for index in range(5)]
    for _ in range(200):
        for node in nodes:
            cache.lock(node)
            cache.unlock(node)
    assert len(cache._leaves) <= 5
    assert cache.evict(5).tolist() == [1, 2, 3, 4, 5]


# Reset and namespaces


def test_reset_returns_every_page(cache: Any) -> None:
    """An unlocked tree is emptied and can be used again."""
    cache.publish([1, 2, 3, 4], [7, 8])
    cache.publish([1, 2], [9], cache.root("tenant"))
    assert sorted(cache.reset().tolist()) == [7, 8, 9]
    assert cache.counts() == (0, 0, 0)
    assert cache.hit([1, 2, 3, 4]) == []
    cache.publish([1, 2], [3])
    assert cache.evict(1).tolist() == [3]


def test_reset_of_an_empty_tree(cache: Any) -> None:
    """There is nothing to return."""
    pages = cache.reset()
    assert (pages.tolist(), pages.dtype) == ([], np.int32)


def test_reset_with_a_lock_changes_nothing(cache: Any) -> None:
    """Pages in use cannot be taken."""
    node = cache.publish([1, 2, 3, 4], [7, 8]).node
    cache.lock(node)
    before = cache.shape(), cache.counts(), cache.clock
    with pytest.raises(PageAccountingError, match="2 of its pages are locked"):
        cache.reset()
    assert (cache.shape(), cache.counts(), cache.clock) == before


def test_reset_keeps_a_root_that_is_held(cache: Any) -> None:
    """A request without a cached page holds its root: what it publishes later must still be found."""
    root = cache.root("tenant")
    cache.lock(root)
    cache.publish([1, 2], [7], root)
    assert cache.reset().tolist() == [7]
    cache.publish([1, 2], [8], root)
    assert cache.hit([1, 2, 3], "tenant") == [8]
    cache.unlock(root)
    assert cache.evict(1).tolist() == [8]


def test_empty_namespace_is_forgotten(cache: Any) -> None:
    """Clients choose namespaces, so one that holds nothing any more must not stay in memory."""
    root = cache.root("tenant")
    cache.lock(root)
    node = cache.publish([1, 2], [7], root).node
    cache.lock(node)
    cache.unlock(root)
    cache.unlock(node)
    assert "tenant" in cache.roots()
    cache.evict(1)
    assert "tenant" not in cache.roots()


def test_namespace_of_a_miss_is_forgotten(cache: Any) -> None:
    """A root that was held without a page below it goes with its last lock; the default namespace's stays."""
    for namespace in ("tenant", ""):
        root = cache.find([1, 2, 3], namespace).node
        cache.lock(root)
        cache.lock(root)
        cache.unlock(root)
        assert cache.roots()[namespace] is root
        cache.unlock(root)
    assert list(cache.roots()) == [""]
