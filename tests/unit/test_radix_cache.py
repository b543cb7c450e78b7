"""RadixCache: matching, publishing, locks, splits and eviction, on pages named by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.radix_cache import Insertion, Match, Node, RadixCache


def _ids(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def _insert(cache: RadixCache, tokens: Sequence[int], pages: Sequence[int], node: Node | None = None) -> Insertion:
    return cache.insert_prefix(node or cache.root(), _ids(tokens), _ids(pages))


def _match(cache: RadixCache, tokens: Sequence[int], namespace: str = "") -> Match:
    return cache.match_prefix(_ids(tokens), namespace)


def _hit(cache: RadixCache, tokens: Sequence[int], namespace: str = "") -> list[int]:
    return _match(cache, tokens, namespace).pages.tolist()


def _tree(cache: RadixCache) -> list[tuple[list[int], list[int], int, int]]:
    """Each node as (pages, tokens, depth, locks), ordered."""
    return sorted((node.pages.tolist(), node.tokens.tolist(), node.depth, node.locks) for node in cache.nodes())


def _counts(cache: RadixCache) -> tuple[int, int, int]:
    return cache.num_pages, cache.num_locked, cache.num_evictable


@pytest.fixture
def cache() -> RadixCache:
    """An empty tree over pages of two tokens."""
    return RadixCache(page_size=2)


# Matching


def test_empty_tree_matches_nothing(cache: RadixCache) -> None:
    """A match in an empty tree ends at the root, with no pages."""
    match = _match(cache, [1, 2, 3, 4])
    assert (match.node, match.pages.tolist(), match.num_evictable) == (cache.root(), [], 0)
    assert match.pages.dtype == np.int32


def test_match_is_the_longest_whole_page_prefix(cache: RadixCache) -> None:
    """A last page of which only a part is asked for is no hit."""
    _insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert _hit(cache, [1, 2, 3, 4, 5, 6, 7]) == [7, 8, 9]
    assert _hit(cache, [1, 2, 3, 4, 5]) == [7, 8]
    assert _hit(cache, [1]) == []
    assert _hit(cache, []) == []


def test_match_compares_every_token(cache: RadixCache) -> None:
    """A difference in any place of any page ends the match at the page before."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    assert _hit(cache, [1, 2, 3, 9]) == [7]
    assert _hit(cache, [1, 2, 9, 4]) == [7]
    assert _hit(cache, [1, 9, 3, 4]) == []
    assert _hit(cache, [9, 2, 3, 4]) == []


def test_same_page_at_another_depth_is_no_hit(cache: RadixCache) -> None:
    """The same two tokens behind another prefix are another page."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    assert _hit(cache, [3, 4, 1, 2]) == []
    assert _hit(cache, [3, 4]) == []


def test_match_inside_a_node_splits_at_the_page(cache: RadixCache) -> None:
    """A match that ends inside a run returns only its pages and splits the run there; the split keeps every entry."""
    _insert(cache, [0, 1, 2, 3, 4, 5], [7, 8, 9])
    match = _match(cache, [0, 1, 2, 9, 9])
    assert match.pages.tolist() == [7]
    assert match.node.pages.tolist() == [7]
    assert _tree(cache) == [([7], [0, 1], 1, 0), ([8, 9], [2, 3, 4, 5], 3, 0)]
    assert _hit(cache, [0, 1, 2, 3, 9, 9]) == [7, 8]
    assert _hit(cache, [0, 1, 2, 3, 4, 5]) == [7, 8, 9]
    assert _counts(cache) == (3, 0, 3)


def test_namespaces_share_nothing(cache: RadixCache) -> None:
    """The same tokens under another namespace are another tree."""
    _insert(cache, [1, 2], [7])
    cache.insert_prefix(cache.root("tenant"), _ids([1, 2]), _ids([8]))
    assert _hit(cache, [1, 2, 3]) == [7]
    assert _hit(cache, [1, 2, 3], "tenant") == [8]
    assert _hit(cache, [1, 2, 3], "other") == []


def test_match_counts_what_could_be_evicted(cache: RadixCache) -> None:
    """Of the matched pages, those of nodes nobody has locked."""
    first = _insert(cache, [1, 2], [7]).node
    _insert(cache, [3, 4, 5, 6], [8, 9], first)
    assert _match(cache, [1, 2, 3, 4, 5, 6]).num_evictable == 3
    cache.lock(first)
    assert _match(cache, [1, 2, 3, 4, 5, 6]).num_evictable == 2
    assert _match(cache, [1, 2, 3, 4, 9]).num_evictable == 1


# Publishing


def test_first_insert_takes_all_pages(cache: RadixCache) -> None:
    """Into an empty tree every page goes, as one run."""
    insertion = _insert(cache, [1, 2, 3, 4], [7, 8])
    assert insertion.inserted.tolist() == [7, 8]
    assert insertion.canonical.tolist() == [7, 8]
    assert insertion.duplicates.tolist() == []
    assert _tree(cache) == [([7, 8], [1, 2, 3, 4], 2, 0)]


def test_insert_keeps_the_canonical_page(cache: RadixCache) -> None:
    """Where the tree has the tokens already, its page stays and the caller's is a duplicate."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    insertion = _insert(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert insertion.canonical.tolist() == [7, 8, 13]
    assert insertion.inserted.tolist() == [13]
    assert insertion.duplicates.tolist() == [11, 12]
    assert insertion.node.depth == 3
    assert _hit(cache, [1, 2, 3, 4, 5, 6]) == [7, 8, 13]
    assert _counts(cache) == (3, 0, 3)


def test_insert_of_what_is_there_adds_nothing(cache: RadixCache) -> None:
    """Publishing a known run frees all of it, and ends inside the longer run, which is split."""
    _insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    insertion = _insert(cache, [1, 2, 3, 4], [11, 12])
    assert (insertion.canonical.tolist(), insertion.inserted.tolist()) == ([7, 8], [])
    assert insertion.duplicates.tolist() == [11, 12]
    assert insertion.node.pages.tolist() == [7, 8]
    assert cache.num_pages == 3


def test_insert_of_nothing_stays_at_its_node(cache: RadixCache) -> None:
    """Publishing no page returns the node it was asked at."""
    node = _insert(cache, [1, 2], [7]).node
    insertion = _insert(cache, [], [], node)
    assert insertion.node is node
    assert insertion.canonical.tolist() == insertion.inserted.tolist() == insertion.duplicates.tolist() == []


def test_insert_forks_at_a_page(cache: RadixCache) -> None:
    """Two runs that differ in their second page share the first, which becomes a node of its own."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    _insert(cache, [1, 2, 5, 6], [11, 12])
    assert _tree(cache) == [([7], [1, 2], 1, 0), ([8], [3, 4], 2, 0), ([12], [5, 6], 2, 0)]


def test_insert_below_a_node_goes_on_from_there(cache: RadixCache) -> None:
    """A run is published relative to the node, and `path_pages` spells the whole way."""
    node = _insert(cache, [1, 2], [7]).node
    deeper = _insert(cache, [3, 4], [8], node).node
    assert cache.path_pages(deeper).tolist() == [7, 8]
    assert _hit(cache, [1, 2, 3, 4]) == [7, 8]


def test_insert_copies_the_callers_arrays(cache: RadixCache) -> None:
    """What the caller does with its arrays later does not reach the tree."""
    tokens, pages = _ids([1, 2]), _ids([7])
    cache.insert_prefix(cache.root(), tokens, pages)
    tokens[:], pages[:] = 9, 9
    assert _tree(cache) == [([7], [1, 2], 1, 0)]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1], [1, 2, 3, 4, 5, 6]])
def test_insert_of_part_of_a_page_changes_nothing(cache: RadixCache, tokens: list[int]) -> None:
    """Only whole pages can be published."""
    _insert(cache, [1, 2], [7])
    before = _tree(cache), _counts(cache), cache.clock
    with pytest.raises(PageAccountingError, match="2 pages of 2 tokens are published with"):
        _insert(cache, tokens, [8, 9])
    assert (_tree(cache), _counts(cache), cache.clock) == before


@pytest.mark.parametrize(
    ("locked", "tokens", "expected"),
    [
        (False, [1, 2, 3, 4, 5, 6], 0),
        (True, [1, 2, 3, 4, 5, 6], 2),
        (True, [1, 2], 1),
        (True, [1, 2, 9, 9], 1),
        (True, [9, 9], 0),
        (True, [], 0),
    ],
)
def test_count_locked_says_what_publishing_gains(cache: RadixCache, *, locked: bool, tokens: list[int], expected: int) -> None:
    """The locked pages on the way are what a publication frees beyond what it makes unevictable; asking changes nothing."""
    node = _insert(cache, [1, 2, 3, 4], [7, 8]).node
    if locked:
        cache.lock(node)
    before = _tree(cache)
    assert cache.count_locked(cache.root(), _ids(tokens)) == expected
    assert _tree(cache) == before


# Locks


def test_lock_holds_the_node_and_its_ancestors(cache: RadixCache) -> None:
    """Every page from the root to the locked node is kept, and no other."""
    first = _insert(cache, [1, 2], [7]).node
    second = _insert(cache, [3, 4], [8], first).node
    _insert(cache, [5, 6], [9], first)
    cache.lock(second)
    assert _counts(cache) == (3, 2, 1)
    assert cache.evict(1).tolist() == [9]
    with pytest.raises(PageAccountingError):
        cache.evict(1)
    cache.unlock(second)
    assert _counts(cache) == (2, 0, 2)


def test_locks_count(cache: RadixCache) -> None:
    """A page locked twice is free after two unlocks, and is counted once."""
    first = _insert(cache, [1, 2], [7]).node
    second = _insert(cache, [3, 4], [8], first).node
    cache.lock(second)
    cache.lock(first)
    assert _counts(cache) == (2, 2, 0)
    cache.unlock(second)
    assert _counts(cache) == (2, 1, 1)
    cache.unlock(first)
    assert _counts(cache) == (2, 0, 2)


def test_unlock_too_often_changes_nothing(cache: RadixCache) -> None:
    """An unlock without a lock raises."""
    node = _insert(cache, [1, 2], [7]).node
    before = _tree(cache), cache.clock
    with pytest.raises(PageAccountingError, match="unlocked more often"):
        cache.unlock(node)
    assert (_tree(cache), cache.clock) == before


def test_split_keeps_both_halves_locked(cache: RadixCache) -> None:
    """A holder's node still ends where its prefix ends, and its unlock frees both halves."""
    node = _insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9]).node
    cache.lock(node)
    _match(cache, [1, 2, 9, 9])
    assert _tree(cache) == [([7], [1, 2], 1, 1), ([8, 9], [3, 4, 5, 6], 3, 1)]
    assert cache.path_pages(node).tolist() == [7, 8, 9]
    assert _counts(cache) == (3, 3, 0)
    cache.unlock(node)
    assert _counts(cache) == (3, 0, 3)


# Eviction


def test_evict_takes_the_least_recently_used_leaf(cache: RadixCache) -> None:
    """Age is the last insert, lock or unlock."""
    old = _insert(cache, [1, 2], [7]).node
    _insert(cache, [3, 4], [8])
    _insert(cache, [5, 6], [9])
    cache.lock(old)
    cache.unlock(old)
    assert cache.evict(1).tolist() == [8]
    assert cache.evict(2).tolist() == [9, 7]


def test_match_alone_refreshes_no_age(cache: RadixCache) -> None:
    """A look that leads to nothing does not keep a page."""
    _insert(cache, [1, 2], [7])
    _insert(cache, [3, 4], [8])
    _match(cache, [1, 2, 9])
    assert cache.evict(1).tolist() == [7]


def test_insert_refreshes_the_way(cache: RadixCache) -> None:
    """Publishing a duplicate uses the page it is a duplicate of."""
    _insert(cache, [1, 2], [7])
    _insert(cache, [3, 4], [8])
    _insert(cache, [1, 2], [11])
    assert cache.evict(1).tolist() == [8]


def test_evict_goes_from_the_leaves_to_the_root(cache: RadixCache) -> None:
    """A parent cannot go before its child, however old it is."""
    first = _insert(cache, [1, 2], [7]).node
    _insert(cache, [3, 4], [8], first)
    _insert(cache, [5, 6], [9])
    assert cache.evict(3).tolist() == [8, 7, 9]
    assert _tree(cache) == []
    assert _counts(cache) == (0, 0, 0)


def test_evict_takes_a_run_from_its_end(cache: RadixCache) -> None:
    """Part of a run may go: its last pages first, and the rest still matches."""
    _insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.evict(2).tolist() == [9, 8]
    assert _tree(cache) == [([7], [1, 2], 1, 0)]
    assert _hit(cache, [1, 2, 3, 4, 5, 6]) == [7]
    assert cache.evict(1).tolist() == [7]


def test_evict_is_exact_over_several_leaves(cache: RadixCache) -> None:
    """Exactly as many pages go as were asked for."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    _insert(cache, [5, 6, 7, 8], [9, 10])
    assert cache.evict(3).tolist() == [8, 7, 10]
    assert _counts(cache) == (1, 0, 1)
    assert cache.evict(0).tolist() == []


def test_evict_too_much_changes_nothing(cache: RadixCache) -> None:
    """Eviction is all or nothing."""
    node = _insert(cache, [1, 2], [7]).node
    _insert(cache, [3, 4, 5, 6], [8, 9])
    cache.lock(node)
    before = _tree(cache), _counts(cache)
    with pytest.raises(PageAccountingError, match="3 pages are to be evicted, 2 can be"):
        cache.evict(3)
    assert (_tree(cache), _counts(cache)) == before
    assert cache.evict(2).tolist() == [9, 8]


def test_evicted_prefix_is_gone(cache: RadixCache) -> None:
    """A page that went to other content is not found under its old tokens."""
    _insert(cache, [1, 2], [7])
    cache.evict(1)
    _insert(cache, [5, 6], [7])
    assert _hit(cache, [1, 2]) == []
    assert _hit(cache, [5, 6]) == [7]


def test_parent_becomes_a_leaf(cache: RadixCache) -> None:
    """Once its children are gone a node can go as well, in its turn by age."""
    parent = _insert(cache, [1, 2], [7]).node
    child = _insert(cache, [3, 4], [8], parent).node
    _insert(cache, [5, 6], [9])
    cache.lock(child)
    cache.unlock(child)
    assert cache.evict(1).tolist() == [9]
    assert cache.evict(1).tolist() == [8]
    assert cache.evict(1).tolist() == [7]


def test_heap_is_no_longer_than_the_tree(cache: RadixCache) -> None:
    """Using the same leaves over and over offers each of them once."""
    nodes = [_insert(cache, [index, index], [index + 1]).node for index in range(5)]
    for _ in range(200):
        for node in nodes:
            cache.lock(node)
            cache.unlock(node)
    assert len(cache._leaves) <= 5
    assert cache.evict(5).tolist() == [1, 2, 3, 4, 5]


# Reset and namespaces


def test_reset_returns_every_page(cache: RadixCache) -> None:
    """An unlocked tree is emptied and can be used again."""
    _insert(cache, [1, 2, 3, 4], [7, 8])
    cache.insert_prefix(cache.root("tenant"), _ids([1, 2]), _ids([9]))
    assert sorted(cache.reset().tolist()) == [7, 8, 9]
    assert _counts(cache) == (0, 0, 0)
    assert _hit(cache, [1, 2, 3, 4]) == []
    _insert(cache, [1, 2], [3])
    assert cache.evict(1).tolist() == [3]


def test_reset_of_an_empty_tree(cache: RadixCache) -> None:
    """There is nothing to return."""
    pages = cache.reset()
    assert (pages.tolist(), pages.dtype) == ([], np.int32)


def test_reset_with_a_lock_changes_nothing(cache: RadixCache) -> None:
    """Pages in use cannot be taken."""
    node = _insert(cache, [1, 2, 3, 4], [7, 8]).node
    cache.lock(node)
    before = _tree(cache), _counts(cache), cache.clock
    with pytest.raises(PageAccountingError, match="2 of its pages are locked"):
        cache.reset()
    assert (_tree(cache), _counts(cache), cache.clock) == before


def test_reset_keeps_a_root_that_is_held(cache: RadixCache) -> None:
    """A request without a cached page holds its root: what it publishes later must still be found."""
    root = cache.root("tenant")
    cache.lock(root)
    cache.insert_prefix(root, _ids([1, 2]), _ids([7]))
    assert cache.reset().tolist() == [7]
    cache.insert_prefix(root, _ids([1, 2]), _ids([8]))
    assert _hit(cache, [1, 2, 3], "tenant") == [8]
    cache.unlock(root)
    assert cache.evict(1).tolist() == [8]


def test_empty_namespace_is_forgotten(cache: RadixCache) -> None:
    """Clients choose namespaces, so one that holds nothing any more must not stay in memory."""
    root = cache.root("tenant")
    cache.lock(root)
    node = cache.insert_prefix(root, _ids([1, 2]), _ids([7])).node
    cache.lock(node)
    cache.unlock(root)
    cache.unlock(node)
    assert "tenant" in cache.roots()
    cache.evict(1)
    assert "tenant" not in cache.roots()


def test_namespace_of_a_miss_is_forgotten(cache: RadixCache) -> None:
    """A root that was held without a page below it goes with its last lock; the default namespace's stays."""
    for namespace in ("tenant", ""):
        root = _match(cache, [1, 2, 3], namespace).node
        cache.lock(root)
        cache.lock(root)
        cache.unlock(root)
        assert cache.roots()[namespace] is root
        cache.unlock(root)
    assert list(cache.roots()) == [""]


def test_page_size_one() -> None:
    """With pages of one token every token is a boundary."""
    cache = RadixCache(page_size=1)
    _insert(cache, [5, 6, 7], [1, 2, 3])
    assert _hit(cache, [5, 6, 9]) == [1, 2]
    assert _tree(cache) == [([1, 2], [5, 6], 2, 0), ([3], [7], 3, 0)]
