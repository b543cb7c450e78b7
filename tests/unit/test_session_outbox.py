"""Delivery to the requests of several sessions: what is handed to many at once is what each alone would have got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service import subscription
from scheduler_service.core.intake import Outputs
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.metrics import Metrics
from scheduler_service.session_outbox import Outbox
from scheduler_service.subscription import Subscribers

MAX_UNREAD = 3
NUM_REQUESTS = 12


class Side:
    """Subscribers of twelve requests: of two sessions by turns, and every fifth alone."""

    def __init__(self) -> None:
        self.subscribers = Subscribers(Metrics(), MAX_UNREAD)
        self.outboxes = [Outbox(64, MAX_UNREAD, self.subscribers.note_overflow) for _ in range(2)]
        self.singles: dict[str, Any] = {}
        self.requests = [a_request(str(number)) for number in range(NUM_REQUESTS)]
        for number, request in enumerate(self.requests):
            if number % 5 == 4:
                self.singles[request.request_id] = self.subscribers.add(request, None)
            else:
                self.subscribers.follow(self.outboxes[number % 2].member(number + 1, request, None))

    def deliver(self, numbers: list[int], tokens: list[int]) -> None:
        """A step's tokens."""
        self.subscribers.deliver(Outputs([self.requests[number] for number in numbers], tokens))

    def take(self, number: int) -> Any:
        """What one of the sessions has to write."""
        parcel = self.outboxes[number].take()
        return parcel.numbers.tolist(), parcel.tokens.tolist(), self.outboxes[number].changed.is_set()

    def rest(self) -> Any:
        """All that is left, and who has overflowed."""
        singles = {name: list(single._tokens) for name, single in self.singles.items()}
        return [self.take(0), self.take(1)], singles, sorted(self.subscribers.take_overflowed())


def a_request(name: str) -> Request:
    """A live request."""
    return Request(name, np.array([1], np.int32), max_tokens=9, limit_len=10, limit_reason=FinishReason.LENGTH, arrival=1)


def a_step(draw: Callable[..., Any], steps: list[list[int]]) -> list[int]:
    """Requests that get a token: mostly those of the step before."""
    if steps and draw(st.integers(0, 5)):
        return steps[-1]
    return draw(st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=16, unique=draw(st.booleans())))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_many_at_once_get_what_each_alone_gets(data: st.DataObject) -> None:
    """Steps of the same and of other requests, taken at once or late, up to what a session may leave unread and beyond."""
    together, alone = Side(), Side()
    steps: list[list[int]] = []
    for number in range(data.draw(st.integers(1, 14))):
        steps.append(a_step(data.draw, steps))
        tokens = [100 * number + place for place in range(len(steps[-1]))]
        together.deliver(steps[-1], tokens)
        usual, subscription._MIN_AGAIN = subscription._MIN_AGAIN, 1000
        alone.deliver(steps[-1], tokens)
        subscription._MIN_AGAIN = usual
        for outbox in range(2):
            if data.draw(st.integers(0, 3)):
                assert together.take(outbox) == alone.take(outbox)
    assert together.rest() == alone.rest()


def test_run_of_steps_leaves_as_columns() -> None:
    """Four steps of the same requests: numbers and tokens of each session, in the order of the step."""
    side = Side()
    numbers = list(range(NUM_REQUESTS))
    for step in range(4):
        side.deliver(numbers, [1000 * step + number for number in numbers])
        assert side.take(0) == ([1, 3, 7, 9, 11], [1000 * step + number for number in (0, 2, 6, 8, 10)], False)
        assert side.take(1) == ([2, 4, 6, 8, 12], [1000 * step + number for number in (1, 3, 5, 7, 11)], False)
    assert side.subscribers._again is not None
