"""The pool of physical KV pages.

Every page id in [1, num_pages] is in exactly one state: free, private (in one request's row and in no other) or cached (owned
by the prefix tree). Page 0 is reserved: kernels send what must not be stored there. Free pages form a stack, the lowest id on
top at the start, so that grants are slices and the page most recently released is granted first.

No page is ever held back for an acknowledgement: ops are applied in the order of one stream, so an op that reuses a page runs
after the op that used it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.journal import Journal, Restore
from scheduler_service.core.ops import Int32Array


class PageState(IntEnum):
    """Who owns a page."""

    FREE = 0
    PRIVATE = 1
    CACHED = 2


_INTP = np.dtype(np.intp)
_FREE, _PRIVATE, _CACHED = (np.uint8(state) for state in PageState)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages by owner; the three add up to num_pages."""

    free: int
    cached: int
    private: int


class PagePool:
    """Free stack and state of every page; all calls take and return int32 arrays of page ids.

    Every call checks first and changes state last, so a call that raises `PageAccountingError` has changed nothing.
    """

    def __init__(self, num_pages: int, journal: Journal | None = None) -> None:
        self._journal = journal or Journal()
        self._journal.watch(self._snapshot)
        self.num_pages = num_pages
        self._stack: Int32Array = np.empty(num_pages, dtype=np.int32)
        self._states = np.empty(num_pages + 1, dtype=np.uint8)
        self.reset()

    def reset(self) -> None:
        """Free every page."""
        self._stack[:] = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._states[:] = PageState.FREE
        self._states[0] = PageState.CACHED  # never granted, never given
        self.num_free = self.num_pages
        self.num_cached = 0

    @property
    def num_private(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def stats(self) -> PoolStats:
        """How the pool is divided at this moment."""
        return PoolStats(self.num_free, self.num_cached, self.num_private)

    def take(self, count: int) -> Int32Array:
        """Grant `count` pages, top of the stack first; they become private."""
        if count > self.num_free:
            raise PageAccountingError(f"{count} pages wanted, {self.num_free} free")
        low = self.num_free - count
        pages = self._stack[low : self.num_free][::-1].copy()
        self._states[pages.astype(_INTP)] = _PRIVATE
        self.num_free = low
        return pages

    def reuse(self, pages: Int32Array) -> None:
        """Grant cached pages that were evicted: as if they were given back and taken at once."""
        if np.count_nonzero(self._states[pages] == _CACHED) < len(pages) or not pages.all():
            bad = pages[(self._states[pages] != _CACHED) | (pages == 0)]
            raise PageAccountingError(f"pages {bad.tolist()} are granted anew, but are not cached")
        self._set_states(pages, _CACHED, _PRIVATE)
        self.num_cached -= len(pages)

    def give(self, pages: Int32Array) -> None:
        """Free private or cached pages, pushed in the order given: the last one is granted next."""
        count = len(pages)
        if count == 0:
            return
        states = self._states[pages]
        ordered = np.sort(pages)
        if np.count_nonzero(states) < count or ordered[0] < 1:
            bad = pages[(states == _FREE) | (pages < 1)]
            raise PageAccountingError(f"pages {bad.tolist()} are given back, but are free already or reserved")
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise PageAccountingError(f"pages {pages.tolist()} are given back, one of them twice")
        self._note_stack(self.num_free, count)
        self._set_states(pages, states, _FREE)
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count
        self.num_cached -= int(np.count_nonzero(states == _CACHED))

    def publish(self, pages: Int32Array) -> None:
        """Hand private pages to the prefix tree."""
        if not len(pages):
            return
        states = self._states[pages]
        if np.count_nonzero(states == _PRIVATE) < len(pages):
            bad = pages[states != _PRIVATE]
            raise PageAccountingError(f"pages {bad.tolist()} are published, but are not private")
        self._set_states(pages, _PRIVATE, _CACHED)
        self.num_cached += len(pages)

    def free_pages(self) -> Int32Array:
        """Copy of the free stack, bottom first; for audits."""
        return self._stack[: self.num_free].copy()

    def pages_in(self, state: PageState) -> Int32Array:
        """All page ids in `state`, ascending; O(num_pages), for audits."""
        return (np.flatnonzero(self._states[1:] == state) + 1).astype(np.int32)

    def _snapshot(self) -> Restore:
        num_free, num_cached = self.num_free, self.num_cached

        def restore() -> None:
            self.num_free, self.num_cached = num_free, num_cached
            self._states[self._stack[:num_free]] = _FREE  # granting a page leaves it where it is

        return restore

    def _set_states(self, pages: Int32Array, before: npt.NDArray[np.uint8] | np.uint8, state: np.uint8) -> None:
        places = pages.astype(_INTP)
        if self._journal.is_open:
            self._journal.note(lambda: self._states.__setitem__(places, before))
        self._states[places] = state

    def _note_stack(self, start: int, count: int) -> None:
        if self._journal.is_open:
            old = self._stack[start : start + count].copy()
            self._journal.note(lambda: self._stack.__setitem__(slice(start, start + count), old))
