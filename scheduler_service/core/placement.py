"""Where requests are: the pool, the prefix tree and the row table, and the moves between them.

Each method is one whole move of one row and leaves the three consistent. When to make which move is `policy`'s affair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.journal import Journal, Restore
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.page_pool import PagePool
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.core.radix_node import Match
from scheduler_service.core.request import Request
from scheduler_service.core.row_table import Phase, RowTable

_NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)
_PREFILLING = int(Phase.PREFILLING)


class Placement:
    """Pages, prefix tree and rows of one scheduler."""

    def __init__(self, config: SchedulerConfig, *, keep_sent: bool = False) -> None:
        self.config = config
        self.page_size = config.page_size
        self.journal = Journal()
        self.keep: Callable[[Request], None] = self.journal.keep
        """The request is about to be changed: note what it is now."""
        self.pool = PagePool(config.num_pages, self.journal)
        self.cache = RadixCache(config.page_size, self.journal)
        keep_sent = keep_sent or config.refresh_policy is RefreshPolicy.DIFF
        sizes = (config.max_rows, config.max_pages_per_row, config.page_size)
        self.rows = RowTable(*sizes, keep_sent=keep_sent, journal=self.journal)
        self.journal.watch(self._snapshot)
        self.request_of_row = np.full(config.max_rows + 1, None, dtype=object)
        self.released_rows: list[int] = []  # since the last op
        self._holders: list[tuple[tuple[int, int], int]] = []  # ((priority, arrival), row), sorted
        self._holder_places = np.empty(config.max_rows, dtype=np.intp)  # rows of `_holders`

    @property
    def num_holders(self) -> int:
        """Requests that hold a row."""
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Pages that can be granted: free ones and evictable ones."""
        return self.pool.num_free + self.cache.num_evictable

    def holder_rows(self) -> Int32Array:
        """Rows in use in the order of their requests, first in order first; int32, a copy."""
        return self.holder_places().astype(np.int32)

    def holder_places(self) -> npt.NDArray[np.intp]:
        """The same in the dtype with which numpy looks up fastest; a view, valid until a request gains or loses a row."""
        return self._holder_places[: len(self._holders)]

    def rows_in_use(self) -> dict[int, tuple[Request, Int32Array]]:
        """Row number → the request that holds it and a copy of its page row."""
        return {row: (self.request_of_row[row], self.rows.row_pages(row).copy()) for row in self.holder_rows().tolist()}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> Int32Array:
        """Grant `count` pages, evicting what is missing; the caller has compared with `num_available`."""
        missing = count - self.pool.num_free
        if missing <= 0:
            return self.pool.take(count)
        evicted = self.cache.evict(missing)
        self.pool.reuse(evicted)
        free = self.pool.take(count - missing)
        return np.concatenate((evicted, free)) if len(free) else evicted

    def take_one_by_one(self, count: int) -> Int32Array:
        """Grant what `count` calls of `take(1)` would: the free pages first, then evicted ones."""
        num_free = min(count, self.pool.num_free)
        free = self.pool.take(num_free)
        return free if num_free == count else np.concatenate((free, self.take(count - num_free)))

    def match(self, request: Request, known: Int32Array | None = None) -> Match | None:
        """The request's cached prefix; the last known token is never matched, since its logits are wanted.

        Args:
            known: all known tokens of the request; None: they have yet to be copied.
        """
        if not request.prefix_cache:
            return None
        if known is None:
            known = request.token_slice(0, len(request.tokens))
        return self.cache.match_prefix(known[:-1], request.cache_namespace)

    def enter(self, request: Request, match: Match | None, num_tokens: int) -> int:
        """Give the request a row that starts with `match` and has pages for `num_tokens`; returns the row number."""
        self.keep(request)
        rows = self.rows
        tail_only = self.config.refresh_policy is RefreshPolicy.TAIL_ONLY
        row = rows.begin_lease(preferred=request.row if tail_only else 0)
        if tail_only:
            rows.sent_len[row] = request.sent_len
        matched = 0
        pages = _NO_ROWS
        if match is not None:
            self.cache.lock(match.node)
            request.node = match.node
            pages = match.pages
            rows.num_tree[row] = matched = len(pages)
        more = self.take(self.pages_for(num_tokens) - matched)
        rows.append(row, np.concatenate((pages, more)) if matched else more)
        rows.num_computed[row] = matched * self.page_size
        rows.num_known[row] = len(request.tokens)
        rows.limit_len[row] = request.limit_len
        rows.phase[row] = _PREFILLING
        rows.set_stop_ids(row, request.stop_ids)
        if request.sampling.num_logprobs is not None:
            rows.ask_logprobs(row, request.sampling.num_logprobs)
        request.row = row
        self.request_of_row[row] = request
        holder = (request.order, row)
        place = bisect_left(self._holders, holder)
        self._holders.insert(place, holder)
        order, count = self._holder_places, len(self._holders)
        if place + 1 < count:
            order[place + 1 : count] = order[place : count - 1]
        order[place] = row
        return row

    def publishable_pages(self, row: int) -> int:
        """Full pages whose tokens are known and computed by ops planned before this step."""
        return min(int(self.rows.num_known[row]), int(self.rows.num_computed[row])) // self.page_size

    def publish_gain(self, row: int) -> int:
        """By how many pages `publish` would raise `num_available`; changes nothing."""
        request = self.request_of_row[row]
        start, stop = int(self.rows.num_tree[row]), self.publishable_pages(row)
        if request.node is None or stop <= start:
            return 0
        return self.cache.count_locked(request.node, request.token_slice(start * self.page_size, stop * self.page_size))

    def publish(self, row: int) -> None:
        """Move the row's publishable pages into the tree and repoint the row to the tree's copies; duplicates are freed."""
        request: Request = self.request_of_row[row]
        start, stop = int(self.rows.num_tree[row]), self.publishable_pages(row)
        if request.node is None or stop <= start:
            return
        self.keep(request)
        own = self.rows.pages[row, start:stop].copy()
        tokens = request.token_slice(start * self.page_size, stop * self.page_size)
        insertion = self.cache.insert_prefix(request.node, tokens, own)
        self.cache.deepen_lock(request.node, insertion.node)
        request.node = insertion.node
        self.pool.publish(insertion.inserted)
        self.rows.num_tree[row] = stop
        self.rows.version += 1
        if len(insertion.duplicates):
            self.rows.repoint(row, start, insertion.canonical)
            self.pool.give(insertion.duplicates)

    def leave(self, row: int, publish_pages: int) -> None:
        """End the lease: publish the first `publish_pages` pages as far as they are not yet, free the rest."""
        rows = self.rows
        request: Request = self.request_of_row[row]
        self.keep(request)
        pages = rows.row_pages(row).copy()
        start = int(rows.num_tree[row])
        stop = publish_pages if request.node is not None and publish_pages > start else start
        duplicates = _NO_ROWS
        if request.node is not None:
            if stop > start:
                tokens = request.token_slice(start * self.page_size, stop * self.page_size)
                insertion = self.cache.insert_prefix(request.node, tokens, pages[start:stop])
                self.pool.publish(insertion.inserted)
                duplicates = insertion.duplicates
            self.cache.unlock(request.node)
            request.node = None
        self.pool.give(np.concatenate((duplicates, pages[stop:])))
        self._forget(row)

    def drop_all(self) -> list[Request]:
        """End every lease without publishing and empty tree and pool: the memory behind the pages is gone."""
        requests = [self.request_of_row[row] for row in self.holder_rows().tolist()]
        for request in requests:
            if request.node is not None:
                self.cache.unlock(request.node)
                request.node = None
            self._forget(request.row)
        self.cache.reset()
        self.pool.reset()
        self.rows.reset()
        self.released_rows.clear()
        return requests

    def reset_cache(self) -> int:
        """Empty the tree, which nobody has locked; returns how many pages that freed."""
        pages = self.cache.reset()
        self.pool.give(np.sort(pages)[::-1])
        return len(pages)

    def _forget(self, row: int) -> None:
        request: Request = self.request_of_row[row]
        request.num_computed = int(self.rows.num_computed[row])
        request.num_outstanding += int(self.rows.num_outstanding[row])
        request.sent_len = int(self.rows.sent_len[row])
        if self.journal.is_open:
            self.journal.note(lambda: self.request_of_row.__setitem__(row, request))
        place = bisect_left(self._holders, (request.order, row))
        del self._holders[place]
        order, count = self._holder_places, len(self._holders)
        order[place:count] = order[place + 1 : count + 1]
        self.request_of_row[row] = None
        self.rows.end_lease(row)
        self.released_rows.append(row)

    def _snapshot(self) -> Restore:
        released_rows = self.released_rows.copy()

        def restore() -> None:
            self.released_rows = released_rows
            self.request_of_row[self.rows.live_generation == 0] = None
            holders = ((request.order, row) for row, request in enumerate(self.request_of_row) if request is not None)
            self._holders = sorted(holders)
            self._holder_places[: len(self._holders)] = [row for _, row in self._holders]

        return restore
