"""Queues of requests without a row: order, and leaving from the middle."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.states import Event, State
from scheduler_service.core.waiting import RetractedList, WaitingQueue


def _request(arrival: int, priority: int = 0) -> Request:
    prompt = np.array([1], dtype=np.int32)
    return Request(
        f"r{arrival}",
        prompt,
        max_tokens=1,
        limit_len=2,
        limit_reason=FinishReason.LENGTH,
        arrival=arrival,
        priority=priority,
    )


def _end(queue: WaitingQueue, request: Request) -> None:
    request.move(Event.FINISH, State.FINISHED)
    queue.note_gone()


def _drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (head := queue.head()) is not None:
        assert queue.pop() is head
        head.state = State.PREFILLING
        names.append(head.request_id)
    assert len(queue) == 0
    return names


def test_queue_orders_by_priority_then_arrival() -> None:
    """A smaller priority number comes first, then who came first."""
    queue = WaitingQueue()
    for arrival, priority in ((1, 1), (2, 0), (3, -5), (4, 0)):
        queue.push(_request(arrival, priority))
    assert len(queue) == 4
    assert _drain(queue) == ["r3", "r2", "r4", "r1"]


def test_head_does_not_take() -> None:
    """Looking at the head leaves it there."""
    queue = WaitingQueue()
    first = _request(1)
    queue.push(first)
    assert queue.head() is first
    assert queue.head() is first
    assert len(queue) == 1


def test_empty_queue_has_no_head() -> None:
    """Nobody waits."""
    queue = WaitingQueue()
    assert queue.head() is None
    assert len(queue) == 0


def test_ended_requests_are_skipped_and_not_counted() -> None:
    """A request that ended while it waited is no head, wherever in the order it stood."""
    queue = WaitingQueue()
    requests = [_request(arrival) for arrival in range(1, 6)]
    for request in requests:
        queue.push(request)
    for index in (0, 2, 4):
        _end(queue, requests[index])
    assert len(queue) == 2
    assert _drain(queue) == ["r2", "r4"]


def test_ended_requests_are_let_go() -> None:
    """Requests that ended do not pile up behind a head that stays."""
    queue = WaitingQueue()
    queue.push(_request(0))
    for arrival in range(1, 2001):
        request = _request(arrival)
        queue.push(request)
        _end(queue, request)
    assert len(queue) == 1
    assert len(queue._heap) < 200
    assert _drain(queue) == ["r0"]


def test_order_survives_the_rebuild() -> None:
    """When ended entries are thrown out together, the others keep their order."""
    queue = WaitingQueue()
    requests = [_request(arrival, priority=arrival % 3) for arrival in range(1, 301)]
    for request in requests:
        queue.push(request)
    kept = [request for request in requests if request.arrival % 7 == 0]
    for request in requests:
        if request not in kept:
            _end(queue, request)
    assert len(queue) == len(kept) == 42
    assert _drain(queue) == [request.request_id for request in sorted(kept, key=lambda request: request.order)]


def test_retracted_are_listed_in_order() -> None:
    """Whatever the order in which requests lose their rows, (priority, arrival) decides."""
    retracted = RetractedList()
    requests = {arrival: _request(arrival, priority) for arrival, priority in ((3, 0), (1, 1), (2, 0), (4, -1))}
    for request in requests.values():
        retracted.add(request)
    assert [request.arrival for request in retracted.requests()] == [4, 2, 3, 1]
    assert len(retracted) == 4


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_any_retracted_request_can_leave(gone: int) -> None:
    """Removal takes exactly the request it names."""
    retracted = RetractedList()
    requests = [_request(arrival) for arrival in (1, 2, 3)]
    for request in requests:
        retracted.add(request)
    retracted.remove(requests[gone - 1])
    assert [request.arrival for request in retracted.requests()] == [arrival for arrival in (1, 2, 3) if arrival != gone]


def test_retracted_list_handed_out_is_a_copy() -> None:
    """Who iterates may remove."""
    retracted = RetractedList()
    for arrival in (1, 2, 3):
        retracted.add(_request(arrival))
    for request in retracted.requests():
        retracted.remove(request)
    assert len(retracted) == 0


def test_retracted_requests_have_places() -> None:
    """Each is found at its place of the order, and behind the last there is none."""
    retracted = RetractedList()
    requests = [_request(arrival) for arrival in (3, 1, 2)]
    for request in requests:
        retracted.add(request)
    assert [retracted.at(place) for place in range(4)] == [requests[1], requests[2], requests[0], None]
