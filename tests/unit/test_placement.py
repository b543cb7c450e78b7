"""Placement: whole moves of a row between pool, prefix tree and row table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.page_pool import PageState
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.row_table import Phase


class Bench:
    """A placement of pages of two tokens, and requests for it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.placement = Placement(config, keep_sent=True)
        self._arrivals = 0

    def request(self, tokens: Sequence[int], priority: int = 0, **options: Any) -> Request:
        self._arrivals += 1
        return Request(
            f"r{self._arrivals}",
            np.array(tokens, dtype=np.int32),
            max_tokens=8,
            limit_len=len(tokens) + 8,
            limit_reason=FinishReason.LENGTH,
            arrival=self._arrivals,
            priority=priority,
            **options,
        )

    def enter(self, tokens: Sequence[int], computed: int | None = None, **options: Any) -> Request:
        """A request that holds a row for all its tokens, of which `computed` (or all) are computed and sent."""
        request = self.request(tokens, **options)
        self.placement.enter(request, self.placement.match(request), len(tokens))
        rows = self.placement.rows
        rows.num_computed[request.row] = len(tokens) if computed is None else computed
        rows.mark_sent(np.array([request.row], dtype=np.int32), np.array([0], dtype=np.int32))
        return request

    def row(self, request: Request) -> list[int]:
        pages: list[int] = self.placement.rows.row_pages(request.row).tolist()
        return pages

    @property
    def free(self) -> list[int]:
        """Free pages, the next one granted first."""
        pages: list[int] = self.placement.pool.free_pages()[::-1].tolist()
        return pages

    @property
    def cached(self) -> list[int]:
        pages: list[int] = self.placement.pool.pages_in(PageState.CACHED).tolist()
        return pages


@pytest.fixture
def bench(make_config: Callable[..., SchedulerConfig]) -> Bench:
    """Eight pages of two tokens."""
    return Bench(make_config(page_size=2, num_pages=8, max_rows=3, max_pages_per_row=6))


def test_pages_for(bench: Bench) -> None:
    """A page that is begun is needed."""
    assert [bench.placement.pages_for(count) for count in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]


def test_enter_cold(bench: Bench) -> None:
    """Without a match every page is granted, and nothing counts as computed."""
    request = bench.request([1, 2, 3])
    row = bench.placement.enter(request, bench.placement.match(request), 3)
    rows = bench.placement.rows
    assert (row, request.row, bench.row(request)) == (1, 1, [1, 2])
    assert (rows.num_computed[row], rows.num_known[row], rows.limit_len[row], rows.num_tree[row]) == (0, 3, 11, 0)
    assert rows.phase[row] == Phase.PREFILLING
    assert bench.placement.request_of_row[row] is request
    assert request.node is bench.placement.cache.root()


def test_enter_takes_pages_for_the_chunk_only(bench: Bench) -> None:
    """A first chunk of three tokens takes two pages of a prompt of five."""
    request = bench.request([1, 2, 3, 4, 5])
    bench.placement.enter(request, bench.placement.match(request), 3)
    assert bench.row(request) == [1, 2]
    assert bench.placement.rows.num_known[request.row] == 5


def test_enter_with_a_match(bench: Bench) -> None:
    """Matched pages come first, are the tree's, locked and computed; only the rest is granted."""
    bench.placement.leave(bench.enter([1, 2, 3, 4, 9]).row, publish_pages=2)
    assert bench.cached == [1, 2]
    request = bench.request([1, 2, 3, 4, 5])
    match = bench.placement.match(request)
    assert match is not None
    assert match.pages.tolist() == [1, 2]
    bench.placement.enter(request, match, 5)
    rows = bench.placement.rows
    assert bench.row(request) == [1, 2, 3]
    assert (rows.num_computed[request.row], rows.num_tree[request.row]) == (4, 2)
    assert bench.placement.cache.num_locked == 2


def test_last_known_token_is_never_matched(bench: Bench) -> None:
    """A prompt that is in the tree to its last token keeps its last page to compute."""
    bench.placement.leave(bench.enter([1, 2, 3, 4, 9]).row, publish_pages=2)
    for tokens, expected in (([1, 2, 3, 4], [1]), ([1, 2], []), ([1], []), ([1, 2, 3], [1])):
        match = bench.placement.match(bench.request(tokens))
        assert match is not None
        assert match.pages.tolist() == expected


def test_request_without_prefix_cache_neither_reads_nor_feeds(bench: Bench) -> None:
    """It matches nothing, holds no node, and leaves nothing behind."""
    bench.placement.leave(bench.enter([1, 2, 3]).row, publish_pages=1)
    request = bench.enter([1, 2, 3], prefix_cache=False)
    assert bench.placement.match(request) is None
    assert request.node is None
    assert bench.row(request) == [2, 3]
    bench.placement.publish(request.row)
    bench.placement.leave(request.row, publish_pages=1)
    assert bench.cached == [1]
    assert bench.free == [3, 2, 4, 5, 6, 7, 8]


def test_namespaces_do_not_match_each_other(bench: Bench) -> None:
    """What one tenant published, another one computes anew."""
    bench.placement.leave(bench.enter([1, 2, 3], cache_namespace="a").row, publish_pages=1)
    for namespace, expected in (("a", [1]), ("b", []), ("", [])):
        match = bench.placement.match(bench.request([1, 2, 3], cache_namespace=namespace))
        assert match is not None
        assert match.pages.tolist() == expected


def test_take_evicts_what_is_missing(bench: Bench) -> None:
    """Free pages go first, then the least recently used cached ones, in exactly the number that is missing."""
    bench.placement.leave(bench.enter([1, 2, 3, 4, 5]).row, publish_pages=2)
    bench.enter([7] * 10)
    assert (bench.free, bench.cached, bench.placement.num_available) == ([8], [1, 2], 3)
    assert bench.placement.take(2).tolist() == [2, 8]
    assert (bench.free, bench.cached) == ([], [1])


def test_publish_moves_full_computed_pages(bench: Bench) -> None:
    """Full pages become the tree's; the open page stays private; the row does not change."""
    request = bench.enter([1, 2, 3, 4, 5])
    bench.placement.publish(request.row)
    rows = bench.placement.rows
    assert (bench.row(request), bench.cached) == ([1, 2, 3], [1, 2])
    assert rows.num_tree[request.row] == 2
    assert not rows.dirty[request.row]
    assert bench.placement.cache.num_locked == 2
    assert bench.placement.pool.num_private == 1


@pytest.mark.parametrize(("computed", "published"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_only_what_is_computed_is_published(bench: Bench, computed: int, published: int) -> None:
    """A page whose last token is not in an earlier op is not published."""
    request = bench.enter([1, 2, 3, 4, 5], computed=computed)
    assert bench.placement.publishable_pages(request.row) == published
    bench.placement.publish(request.row)
    assert bench.placement.rows.num_tree[request.row] == published


def test_only_what_is_known_is_published(bench: Bench) -> None:
    """Tokens computed ahead of their results have no ids yet."""
    request = bench.enter([1, 2, 3, 4, 5])
    bench.placement.rows.num_computed[request.row] = 6
    assert bench.placement.publishable_pages(request.row) == 2


def test_publish_adopts_and_frees_duplicates(bench: Bench) -> None:
    """Where the tree has the tokens, the row repoints to its pages, is dirty, and its own are freed."""
    first, second = bench.enter([1, 2, 3, 4, 5]), bench.enter([1, 2, 3, 4, 6])
    assert bench.row(second) == [4, 5, 6]
    bench.placement.publish(first.row)
    bench.placement.publish(second.row)
    assert bench.row(second) == [1, 2, 6]
    assert bench.free == [5, 4, 7, 8]
    assert bench.placement.rows.dirty.tolist() == [False, False, True, False]
    bench.placement.leave(first.row, publish_pages=2)
    assert bench.placement.cache.num_locked == 2, "the second holds them as well"


def test_publish_gain_is_what_publish_gains(bench: Bench) -> None:
    """The gain that is promised beforehand comes true: the duplicate of a locked page is a free page more."""
    first, second = bench.enter([1, 2, 3, 4, 5]), bench.enter([1, 2, 3, 4, 6])
    third = bench.enter([9, 9])
    bench.placement.publish(first.row)
    for request, gain in ((second, 2), (third, 0)):
        before = bench.placement.num_available
        assert bench.placement.publish_gain(request.row) == gain
        bench.placement.publish(request.row)
        assert bench.placement.num_available == before + gain


def test_publish_gain_of_an_evictable_duplicate_is_nothing(bench: Bench) -> None:
    """Freeing a duplicate of a page that could have been evicted gains nothing, since that one is locked now."""
    first, second = bench.enter([1, 2, 3]), bench.enter([1, 2, 4])
    bench.placement.leave(first.row, publish_pages=1)
    before = bench.placement.num_available
    assert bench.placement.publish_gain(second.row) == 0
    bench.placement.publish(second.row)
    assert bench.placement.num_available == before


def test_publish_twice_is_once(bench: Bench) -> None:
    """A second publication of the same pages does nothing."""
    request = bench.enter([1, 2, 3])
    bench.placement.publish(request.row)
    clock = bench.placement.cache.clock
    bench.placement.publish(request.row)
    assert bench.placement.cache.clock == clock
    assert bench.placement.cache.num_locked == 1


def test_leave_pushes_duplicates_first_then_the_rest_in_order(bench: Bench) -> None:
    """The order of the free list is part of the design: page ids in files and tests depend on it."""
    first, second = bench.enter([1, 2, 3, 4, 5]), bench.enter([1, 2, 3, 4, 6])
    bench.placement.leave(first.row, publish_pages=2)
    assert bench.free == [3, 7, 8]
    bench.placement.leave(second.row, publish_pages=2)
    assert bench.free == [6, 5, 4, 3, 7, 8]
    assert bench.cached == [1, 2]


def test_leave_without_publishing_frees_the_private_part(bench: Bench) -> None:
    """What was the tree's before stays there, unlocked; the rest is freed."""
    request = bench.enter([1, 2, 3, 4, 5], computed=2)
    bench.placement.publish(request.row)
    bench.placement.leave(request.row, publish_pages=0)
    assert (bench.cached, bench.free) == ([1], [3, 2, 4, 5, 6, 7, 8])
    assert bench.placement.cache.num_locked == 0


def test_leave_hands_the_rows_counts_to_the_request(bench: Bench) -> None:
    """What the row knew of computed tokens, outstanding steps and sent pages goes with the request."""
    request = bench.enter([1, 2, 3], computed=2)
    bench.placement.rows.num_outstanding[request.row] = 2
    request.num_outstanding = 1
    bench.placement.leave(request.row, publish_pages=1)
    assert (request.num_computed, request.num_outstanding, request.sent_len) == (2, 3, 2)
    assert bench.placement.released_rows == [1]
    assert bench.placement.request_of_row[1] is None
    assert bench.placement.num_holders == 0


def test_holders_are_in_request_order(bench: Bench) -> None:
    """Rows are listed by (priority, arrival) of their requests, whatever their numbers."""
    late, early = bench.enter([1]), bench.enter([2], priority=-1)
    middle = bench.enter([3])
    assert bench.placement.holder_rows().tolist() == [early.row, late.row, middle.row] == [2, 1, 3]
    bench.placement.leave(late.row, publish_pages=0)
    assert bench.placement.holder_rows().tolist() == [2, 3]
    assert bench.placement.num_holders == 2


def test_drop_all_forgets_everything(bench: Bench) -> None:
    """Tree, pool and rows are as new, nothing is published, and the holders come back in order."""
    late, early = bench.enter([1, 2, 3]), bench.enter([4, 5], priority=-1)
    bench.placement.publish(late.row)
    assert bench.placement.drop_all() == [early, late]
    assert bench.free == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (bench.cached, bench.placement.num_holders, bench.placement.released_rows) == ([], 0, [])
    assert (early.node, late.node) == (None, None)
    assert bench.placement.rows.begin_lease() == 1
    assert bench.placement.rows.generation[1] == 2


def test_reset_cache_frees_its_pages(bench: Bench) -> None:
    """An unlocked tree goes back to the pool, the lowest id to be granted next."""
    bench.placement.leave(bench.enter([1, 2, 3, 4, 5]).row, publish_pages=2)
    assert bench.free == [3, 4, 5, 6, 7, 8]
    assert bench.placement.reset_cache() == 2
    assert bench.free == [1, 2, 3, 4, 5, 6, 7, 8]
    assert bench.placement.reset_cache() == 0


def test_tail_only_remembers_the_request_and_its_row(make_config: Callable[..., SchedulerConfig]) -> None:
    """The broken policy counts what was sent per request, and gives it its old row number back if that is free."""
    bench = Bench(make_config(page_size=2, refresh_policy=RefreshPolicy.TAIL_ONLY))
    first, second = bench.enter([1, 2, 3]), bench.enter([4, 5, 6])
    bench.placement.leave(second.row, publish_pages=0)
    bench.placement.leave(first.row, publish_pages=0)
    bench.placement.enter(second, bench.placement.match(second), 3)
    assert second.row == 2
    assert bench.placement.rows.sent_len[2] == 2


def test_diff_policy_keeps_what_was_sent(make_config: Callable[..., SchedulerConfig]) -> None:
    """The policy that compares needs the copy, the others do not."""
    assert Placement(make_config(refresh_policy=RefreshPolicy.DIFF)).rows.sent_pages is not None
    assert Placement(make_config()).rows.sent_pages is None


def test_pages_one_by_one_are_those_of_single_grants(make_config: Callable[..., SchedulerConfig]) -> None:
    """A grant for several rows at once gives each row the page that a grant of its own would have given."""

    def filled() -> Placement:
        placement = Placement(make_config(page_size=1, num_pages=9))
        for token in range(6):
            page = placement.pool.take(1)
            placement.cache.insert_prefix(placement.cache.root(), np.array([token], dtype=np.int32), page)
            placement.pool.publish(page)
        return placement

    for count in range(10):
        together, single = filled(), filled()
        pages = together.take_one_by_one(count).tolist()
        assert pages == [int(single.take(1)[0]) for _ in range(count)]
        assert together.pool.free_pages().tolist() == single.pool.free_pages().tolist()
