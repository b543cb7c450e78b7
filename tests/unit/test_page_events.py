"""Page events: hashes, records of the tree, portions."""

from __future__ import annotations

import numpy as np
import pytest

from page_followers import hashes_of
from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.page_records import Cleared, Evicted, Record, Stored
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.page_events import (
    EVENT_BYTES,
    MAX_BATCH_BYTES,
    PageHashes,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    batches_of,
    chain_hashes,
    first_hash,
)

FIRST = 0xDF33F2B442BCE18A
SECOND = 0x3D51E9250BAAAD28


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def cache() -> RadixCache:
    """Pages of two tokens, and somebody who wants to know."""
    cache = RadixCache(2)
    cache.records = []
    return cache


def plain(records: list[Record] | None) -> list[tuple[object, ...]]:
    assert records is not None
    as_list = lambda field: field.tolist() if isinstance(field, np.ndarray) else field  # noqa: E731
    return [(type(record).__name__, *map(as_list, record)) for record in records]


def test_hashes_are_those_of_the_definition() -> None:
    """Fixed values, so that a change of the definition is noticed; the definition's second writing agrees."""
    tokens = ints(1, 2, 3, 4, 5, 6)
    assert chain_hashes(first_hash(""), tokens, 2).tolist() == hashes_of([1, 2, 3, 4, 5, 6], 2)
    assert chain_hashes(first_hash("tenant ü"), tokens, 3).tolist() == hashes_of([1, 2, 3, 4, 5, 6], 3, "tenant ü")
    assert first_hash("") == FIRST
    assert chain_hashes(first_hash(""), ints(1, 2), 2).tolist() == [SECOND]
    assert chain_hashes(first_hash("a"), ints(1, 2), 2).tolist() != [SECOND]


def test_stored_pages_name_the_page_before_them(cache: RadixCache) -> None:
    """A run below a root names its namespace, one below a page that page; pages that are there already are not told again."""
    cache.insert_prefix(cache.root(), ints(1, 2, 3, 4), ints(7, 8))
    cache.insert_prefix(cache.root(), ints(1, 2, 5, 6), ints(9, 10))
    cache.insert_prefix(cache.root("tenant"), ints(1, 2), ints(11))
    assert plain(cache.records) == [
        ("Stored", 0, "", [7, 8], [1, 2, 3, 4]),
        ("Stored", 7, "", [10], [5, 6]),
        ("Stored", 0, "tenant", [11], [1, 2]),
    ]


def test_evicted_pages_and_resets_are_told(cache: RadixCache) -> None:
    """Pages are named as they go, the last of a run first; a reset says so even of an empty tree."""
    cache.insert_prefix(cache.root(), ints(1, 2, 3, 4), ints(7, 8))
    cache.records = []
    cache.evict(0)
    cache.evict(1)
    cache.reset()
    cache.reset()
    assert plain(cache.records) == [("Evicted", [8]), ("Cleared",), ("Cleared",)]


def test_nothing_is_noted_for_nobody() -> None:
    """Without a list there is none afterwards."""
    cache = RadixCache(2)
    cache.insert_prefix(cache.root(), ints(1, 2, 3, 4), ints(7, 8))
    cache.evict(1)
    cache.reset()
    assert cache.records is None


def test_calls_that_changed_nothing_are_not_told(cache: RadixCache) -> None:
    """A refused eviction, and a change that was taken back, leave the notes as they were."""
    cache.insert_prefix(cache.root(), ints(1, 2), ints(7))
    before = plain(cache.records)
    with pytest.raises(PageAccountingError):
        cache.evict(2)

    def change() -> None:
        cache.insert_prefix(cache.root(), ints(3, 4), ints(8))
        cache.evict(1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache._journal.run(change)
    assert plain(cache.records) == before


def test_contents_come_parents_first(cache: RadixCache) -> None:
    """What the tree holds can be stored in the order in which it is told."""
    cache.insert_prefix(cache.root(), ints(1, 2, 3, 4, 5, 6), ints(7, 8, 9))
    cache.insert_prefix(cache.root(), ints(1, 2, 9, 9), ints(1, 10))
    seen = {0}
    for record in (node.stored() for node in cache.nodes()):
        assert record.parent in seen
        seen |= set(record.pages.tolist())
    assert seen == {0, 7, 8, 9, 10}


def test_records_become_events() -> None:
    """Page numbers become hashes, also where a page is used anew; a namespace is that of the whole sequence."""
    hashes = PageHashes(9, 2)
    first = hashes.follow(Stored(0, "tenant", ints(3), ints(1, 2)))
    second = hashes.follow(Stored(3, "", ints(4, 5), ints(3, 4, 5, 6)))
    expected = hashes_of([1, 2, 3, 4, 5, 6], 2, "tenant")
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert (first.hashes.tolist(), first.parent, first.namespace) == (expected[:1], None, "tenant")
    assert (second.hashes.tolist(), second.parent, second.namespace) == (expected[1:], expected[0], "tenant")
    removed = hashes.follow(Evicted(ints(5, 4)))
    assert isinstance(removed, PagesRemoved)
    assert removed.hashes.tolist() == [expected[2], expected[1]]
    again = hashes.follow(Stored(0, "", ints(4), ints(3, 4)))
    assert isinstance(again, PagesStored)
    assert (again.hashes.tolist(), again.namespace) == (hashes_of([3, 4], 2), "")
    assert isinstance(hashes.follow(Cleared()), PagesCleared)
    assert hashes._namespaces == {}


def test_large_events_are_cut_between_pages() -> None:
    """No portion is larger than it may be but for a page that alone is; together they are what was given."""
    size = 1000
    tokens = np.arange(400 * size, dtype=np.int32)
    event = PagesStored(chain_hashes(first_hash(""), tokens, size), None, tokens, size)
    gone = PagesRemoved(np.arange(200_000, dtype=np.uint64))
    portions = list(batches_of([event, gone, PagesCleared()]))
    assert max(sum(piece.num_bytes for piece in portion) for portion in portions) <= MAX_BATCH_BYTES
    pieces = [piece for portion in portions for piece in portion]
    stored = [piece for piece in pieces if isinstance(piece, PagesStored)]
    assert np.concatenate([piece.tokens for piece in stored]).tolist() == tokens.tolist()
    assert np.concatenate([piece.hashes for piece in stored]).tolist() == event.hashes.tolist()
    assert [piece.parent for piece in stored] == [None, *(int(piece.hashes[-1]) for piece in stored[:-1])]
    removed = [piece for piece in pieces if isinstance(piece, PagesRemoved)]
    assert np.concatenate([piece.hashes for piece in removed]).tolist() == gone.hashes.tolist()
    assert isinstance(pieces[-1], PagesCleared)
    assert len(portions) <= 8

    huge = PagesStored(np.arange(2, dtype=np.uint64), None, np.zeros(2 * MAX_BATCH_BYTES, dtype=np.int32), MAX_BATCH_BYTES)
    assert [len(portion) for portion in batches_of([huge])] == [1, 1]
    assert list(batches_of([])) == []
    assert PagesCleared().num_bytes == EVENT_BYTES
