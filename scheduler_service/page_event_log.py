"""The log of page events: one numbered list of batches, and those who read it.

The list is kept up to `MAX_HISTORY_BYTES`. A reader has no buffer of its own but a place in the list, so a slow one takes no
memory: when its place has left the list it is told so. A new reader gets the present state first, or goes on where it was. Only
while there are readers, and for `LINGER_S` after the last one, does the tree take notes and is anything hashed.

The first number comes from the clock, so that the numbers of one process are not taken for those of its predecessor.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from weakref import WeakSet

from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.radix_cache import RadixCache
from scheduler_service.errors import EventsGoneError, EventsMissedError, TooManyFollowersError
from scheduler_service.page_events import (
    PageBatch,
    PageEvent,
    PageHashes,
    PagesCleared,
    SnapshotPart,
    batches_of,
)

MAX_HISTORY_BYTES = 32 * 2**20
"""Of batches that are kept for readers: their tokens, their hashes, and 256 bytes for each event and each batch."""

MAX_FOLLOWERS = 64
"""Readers of one log at a time."""

LINGER_S = 60.0
"""For so long after the last reader has gone can it come back and go on where it was."""


class PageEventLog:
    """Of one prefix tree. Everything happens on one event loop, between two calls of the core."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._cache: RadixCache | None = None
        self._shape = (0, 0)
        self._hashes: PageHashes | None = None
        self._history: deque[PageBatch] = deque()
        self._num_bytes = 0
        self._last = int(now() * 1000) << 10  # 2^53 is 278 years away
        self._followers: WeakSet[PageFollower] = WeakSet()  # one that nobody has any more reads nothing
        self._timer: asyncio.TimerHandle | None = None
        self._error: PagemirrorError | None = None
        self.changed = asyncio.Event()
        """Set when there is more to read, or nothing any more; whoever waits asks for it anew each time."""

    @property
    def last_sequence(self) -> int:
        """Number of the last batch."""
        return self._last

    @property
    def is_recording(self) -> bool:
        """Whether the tree takes notes, so that `drain` is to be called after each change."""
        return self._hashes is not None

    def attach(self, cache: RadixCache, num_pages: int, page_size: int) -> None:
        """From now on it is about this tree, whose pages are 1 … num_pages."""
        self._cache, self._shape = cache, (num_pages, page_size)

    def drain(self) -> None:
        """Take what the tree has noted into the list."""
        cache, hashes = self._cache, self._hashes
        if cache is None or hashes is None or not cache.records:
            return
        records, cache.records = cache.records, []
        for events in batches_of(map(hashes.follow, records)):
            self._append(events)
        self._tell()

    def follow(self, after: int | None = None) -> PageFollower:
        """A reader: of what comes after batch `after`; None or 0: of the present state, and what comes after it.

        Raises:
            EventsGoneError: what comes after batch `after` is not all there any more, or never was.
            TooManyFollowersError: MAX_FOLLOWERS are there.
            PagemirrorError: whatever the log was ended with.
        """
        if self._error is not None:
            raise self._error
        if len(self._followers) >= MAX_FOLLOWERS:
            raise TooManyFollowersError(MAX_FOLLOWERS)
        self._start()
        if after:
            if not self._last - len(self._history) <= after <= self._last:
                self._linger_if_alone()
                raise EventsGoneError(after)
            follower = PageFollower(self, after, deque())
        else:
            follower = PageFollower(self, self._last, deque(self.state()))
        self._followers.add(follower)
        return follower

    def state(self) -> list[PageBatch]:
        """What the cache holds now, as parts of one state. Only while recording."""
        cache, hashes = self._cache, self._hashes
        assert cache is not None
        assert hashes is not None
        self.drain()
        events: list[PageEvent] = [PagesCleared(), *(hashes.describe(node.stored()) for node in cache.nodes())]
        portions, now = list(batches_of(events)), self._now()
        count = len(portions)
        return [
            PageBatch(self._last, now, portion, SnapshotPart(index, count, cache.num_pages))
            for index, portion in enumerate(portions)
        ]

    def since(self, sequence: int) -> list[PageBatch]:
        """The batches after this one that are still kept."""
        return [batch for batch in self._history if batch.sequence > sequence]

    def next_after(self, sequence: int) -> PageBatch | None:
        """The batch after this one; None: there is none yet. Raises EventsMissedError when it is not kept any more."""
        ahead = self._last - sequence
        if not ahead:
            return None
        if ahead > len(self._history):
            raise EventsMissedError(sequence)
        return self._history[-ahead]

    def end(self, error: PagemirrorError) -> None:
        """Nothing comes any more: readers are told `error`, after what they have not read yet."""
        self._error = self._error or error
        self._tell()
        self._stop()

    @property
    def error(self) -> PagemirrorError | None:
        """Why nothing comes any more."""
        return self._error

    def leave(self, follower: PageFollower) -> None:
        """The reader reads no more."""
        self._followers.discard(follower)
        self._linger_if_alone()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._hashes is None:
            assert self._cache is not None, "there is no tree yet"
            self._hashes = PageHashes(*self._shape)
            self._cache.records = []
            for node in self._cache.nodes():
                self._hashes.follow(node.stored())

    def _linger_if_alone(self) -> None:
        if not self._followers and self.is_recording and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        """Take no more notes. What happens until the next start is missed, so the numbers leave a gap for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._cache is not None:
            self._cache.records = None
        self._hashes = None
        if self._error is None:
            self._history.clear()
            self._num_bytes = 0
            self._last += 1

    def _append(self, events: tuple[PageEvent, ...]) -> None:
        self._last += 1
        batch = PageBatch(self._last, self._now(), events)
        self._history.append(batch)
        self._num_bytes += batch.num_bytes
        while self._num_bytes > MAX_HISTORY_BYTES and len(self._history) > 1:
            self._num_bytes -= self._history.popleft().num_bytes

    def _tell(self) -> None:
        # Whoever waits holds the old event, so none is missed and none needs to clear it.
        self.changed.set()
        self.changed = asyncio.Event()


class PageFollower:
    """A reader of the log. To be closed."""

    def __init__(self, log: PageEventLog, sequence: int, state: deque[PageBatch]) -> None:
        self._log = log
        self._sequence = sequence
        self._state = state

    @property
    def is_idle(self) -> bool:
        """Whether everything that has happened was read."""
        return not self._state and self._sequence == self._log.last_sequence

    async def take(self) -> PageBatch:
        """The next batch, as soon as there is one.

        Raises:
            EventsMissedError: batches that were not read yet are not kept any more.
            PagemirrorError: whatever the log was ended with.
        """
        while True:
            if self._state:
                return self._state.popleft()
            batch = self._log.next_after(self._sequence)
            if batch is not None:
                self._sequence = batch.sequence
                return batch
            if self._log.error is not None:
                raise self._log.error
            await self._log.changed.wait()

    async def batches(self) -> AsyncGenerator[PageBatch, None]:
        """All of them, until the log ends. Raises like `take`; closes the reader when it is closed."""
        try:
            while True:
                yield await self.take()
        finally:
            self.close()

    def close(self) -> None:
        """Read no more; harmless when repeated."""
        self._state.clear()
        self._log.leave(self)
