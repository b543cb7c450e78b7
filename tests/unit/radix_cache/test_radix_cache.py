"""RadixCache: matching and publishing, on pages named by hand. Locks and eviction are in test_radix_cache_eviction.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import PageAccountingError

# Matching


def test_empty_tree_matches_nothing(cache: Any) -> None:
    """A match in an empty tree ends at the root, with no pages."""
    match = cache.find([1, 2, 3, 4])
    assert (match.node, match.pages.tolist(), match.num_evictable) == (cache.root(), [], 0)
    assert match.pages.dtype == np.int32


def test_match_is_the_longest_whole_page_prefix(cache: Any) -> None:
    """A last page of which only a part is asked for is no hit."""
    cache.publish([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.hit([1, 2, 3, 4, 5, 6, 7]) == [7, 8, 9]
    assert cache.hit([1, 2, 3, 4, 5]) == [7, 8]
    assert cache.hit([1]) == []
    assert cache.hit([]) == []


def test_match_compares_every_token(cache: Any) -> None:
    """A difference in any place of any page ends the match at the page before."""
    cache.publish([1, 2, 3, 4], [7, 8])
    assert cache.hit([1, 2, 3, 9]) == [7]
    assert cache.hit([1, 2, 9, 4]) == [7]
    assert cache.hit([1, 9, 3, 4]) == []
    assert cache.hit([9, 2, 3, 4]) == []


def test_same_page_at_another_depth_is_no_hit(cache: Any) -> None:
    """The same two tokens behind another prefix are another page."""
    cache.publish([1, 2, 3, 4], [7, 8])
    assert cache.hit([3, 4, 1, 2]) == []
    assert cache.hit([3, 4]) == []


def test_match_inside_a_node_splits_at_the_page(cache: Any) -> None:
    """A match that ends inside a run returns only its pages and splits the run there; the split keeps every entry."""
    cache.publish([0, 1, 2, 3, 4, 5], [7, 8, 9])
    match = cache.find([0, 1, 2, 9, 9])
    assert match.pages.tolist() == [7]
    assert match.node.pages.tolist() == [7]
    assert cache.shape() == [([7], [0, 1], 1, 0), ([8, 9], [2, 3, 4, 5], 3, 0)]
    assert cache.hit([0, 1, 2, 3, 9, 9]) == [7, 8]
    assert cache.hit([0, 1, 2, 3, 4, 5]) == [7, 8, 9]
    assert cache.counts() == (3, 0, 3)


def test_namespaces_share_nothing(cache: Any) -> None:
    """The same tokens under another namespace are another tree."""
    cache.publish([1, 2], [7])
    cache.publish([1, 2], [8], cache.root("tenant"))
    assert cache.hit([1, 2, 3]) == [7]
    assert cache.hit([1, 2, 3], "tenant") == [8]
    assert cache.hit([1, 2, 3], "other") == []


def test_match_counts_what_could_be_evicted(cache: Any) -> None:
    """Of the matched pages, those of nodes nobody has locked."""
    first = cache.publish([1, 2], [7]).node
    cache.publish([3, 4, 5, 6], [8, 9], first)
    assert cache.find([1, 2, 3, 4, 5, 6]).num_evictable == 3
    cache.lock(first)
    assert cache.find([1, 2, 3, 4, 5, 6]).num_evictable == 2
    assert cache.find([1, 2, 3, 4, 9]).num_evictable == 1


# Publishing


def test_first_insert_takes_all_pages(cache: Any) -> None:
    """Into an empty tree every page goes, as one run."""
    insertion = cache.publish([1, 2, 3, 4], [7, 8])
    assert insertion.inserted.tolist() == [7, 8]
    assert insertion.canonical.tolist() == [7, 8]
    assert insertion.duplicates.tolist() == []
    assert cache.shape() == [([7, 8], [1, 2, 3, 4], 2, 0)]


def test_insert_keeps_the_canonical_page(cache: Any) -> None:
    """Where the tree has the tokens already, its page stays and the caller's is a duplicate."""
    cache.publish([1, 2, 3, 4], [7, 8])
    insertion = cache.publish([1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert insertion.canonical.tolist() == [7, 8, 13]
    assert insertion.inserted.tolist() == [13]
    assert insertion.duplicates.tolist() == [11, 12]
    assert insertion.node.depth == 3
    assert cache.hit([1, 2, 3, 4, 5, 6]) == [7, 8, 13]
    assert cache.counts() == (3, 0, 3)


def test_insert_of_what_is_there_adds_nothing(cache: Any) -> None:
    """Publishing a known run frees all of it, and ends inside the longer run, which is split."""
    cache.publish([1, 2, 3, 4, 5, 6], [7, 8, 9])
    insertion = cache.publish([1, 2, 3, 4], [11, 12])
    assert (insertion.canonical.tolist(), insertion.inserted.tolist()) == ([7, 8], [])
    assert insertion.duplicates.tolist() == [11, 12]
    assert insertion.node.pages.tolist() == [7, 8]
    assert cache.num_pages == 3


def test_insert_of_nothing_stays_at_its_node(cache: Any) -> None:
    """Publishing no page returns the node it was asked at."""
    node = cache.publish([1, 2], [7]).node
    insertion = cache.publish([], [], node)
    assert insertion.node is node
    assert insertion.canonical.tolist() == insertion.inserted.tolist() == insertion.duplicates.tolist() == []


def test_insert_forks_at_a_page(cache: Any) -> None:
    """Two runs that differ in their second page share the first, which becomes a node of its own."""
    cache.publish([1, 2, 3, 4], [7, 8])
    cache.publish([1, 2, 5, 6], [11, 12])
    assert cache.shape() == [([7], [1, 2], 1, 0), ([8], [3, 4], 2, 0), ([12], [5, 6], 2, 0)]


def test_insert_below_a_node_goes_on_from_there(cache: Any) -> None:
    """A run is published relative to the node, and `path_pages` spells the whole way."""
    node = cache.publish([1, 2], [7]).node
    deeper = cache.publish([3, 4], [8], node).node
    assert cache.path_pages(deeper).tolist() == [7, 8]
    assert cache.hit([1, 2, 3, 4]) == [7, 8]


def test_insert_copies_the_callers_arrays(cache: Any) -> None:
    """What the caller does with its arrays later does not reach the tree."""
    tokens, pages = np.array([1, 2], dtype=np.int32), np.array([7], dtype=np.int32)
    cache.insert_prefix(cache.root(), tokens, pages)
    tokens[:], pages[:] = 9, 9
    assert cache.shape() == [([7], [1, 2], 1, 0)]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1], [1, 2, 3, 4, 5, 6]])
def test_insert_of_part_of_a_page_changes_nothing(cache: Any, tokens: list[int]) -> None:
    """Only whole pages can be published."""
    cache.publish([1, 2], [7])
    before = cache.shape(), cache.counts(), cache.clock
    with pytest.raises(PageAccountingError, match="2 pages of 2 tokens are published with"):
        cache.publish(tokens, [8, 9])
    assert (cache.shape(), cache.counts(), cache.clock) == before


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
def test_count_locked_says_what_publishing_gains(cache: Any, *, locked: bool, tokens: list[int], expected: int) -> None:
    """The locked pages on the way are what a publication frees beyond what it makes unevictable; asking changes nothing."""
    node = cache.publish([1, 2, 3, 4], [7, 8]).node
    if locked:
        cache.lock(node)
    before = cache.shape()
    assert cache.count_locked(cache.root(), np.array(tokens, dtype=np.int32)) == expected
    assert cache.shape() == before


def test_page_size_one(make_cache: Callable[[int], Any]) -> None:
    """With pages of one token every token is a boundary."""
    cache = make_cache(1)
    cache.publish([5, 6, 7], [1, 2, 3])
    assert cache.hit([5, 6, 9]) == [1, 2]
    assert cache.shape() == [([1, 2], [5, 6], 2, 0), ([3], [7], 3, 0)]
