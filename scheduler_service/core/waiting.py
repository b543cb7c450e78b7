"""Requests that hold no row: those that never had one, and those that lost it."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable

from scheduler_service.core.request import Request
from scheduler_service.core.states import State


class WaitingQueue:
    """Submitted requests in the order (priority, arrival).

    A heap; a request that ended while it waited stays in it until it comes up, and the heap is rebuilt when such entries are
    the larger part, so that neither joining nor leaving scans the queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def push(self, request: Request) -> None:
        """Put a submitted request into the queue."""
        heapq.heappush(self._heap, (request.order, request))

    def head(self) -> Request | None:
        """The first in order, or None."""
        while self._heap:
            request = self._heap[0][1]
            if request.state is State.SUBMITTED:
                return request
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return None

    def pop(self) -> Request:
        """Remove the head, which `head` has just returned."""
        return heapq.heappop(self._heap)[1]

    def refill(self, requests: Iterable[Request]) -> None:
        """Hold those of `requests` that are submitted, and no others."""
        self._heap = [(request.order, request) for request in requests if request.state is State.SUBMITTED]
        heapq.heapify(self._heap)
        self._num_gone = 0

    def requests(self) -> list[Request]:
        """All of them, in no particular order; for audits."""
        return [request for _, request in self._heap if request.state is State.SUBMITTED]

    def note_gone(self) -> None:
        """A request in the queue has ended; its state says so already."""
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is State.SUBMITTED]
            heapq.heapify(self._heap)
            self._num_gone = 0


class RetractedList:
    """Retracted requests in the order (priority, arrival); few, so a sorted list."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Put a retracted request into the list."""
        insort(self._entries, (request.order, request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        """Take out a request that resumes or ends."""
        del self._entries[bisect_left(self._entries, request.order, key=lambda entry: entry[0])]

    def refill(self, requests: Iterable[Request]) -> None:
        """Hold those of `requests` that are retracted, and no others."""
        self._entries.clear()
        for request in requests:
            if request.state is State.RETRACTED:
                self.add(request)

    def at(self, place: int) -> Request | None:
        """The one at this place of the order, or None behind the last."""
        return self._entries[place][1] if place < len(self._entries) else None

    def requests(self) -> list[Request]:
        """All of them, first in order first."""
        return [request for _, request in self._entries]
