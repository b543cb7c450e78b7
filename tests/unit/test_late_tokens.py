"""LateTokens: requests have each token when somebody looks, whether or not it was handed out before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from scheduler_driver import DEFAULTS, Driver
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.late_tokens import NUM_STEPS, LateTokens
from scheduler_service.core.request import FinishReason, Request


@pytest.fixture
def late() -> LateTokens:
    return LateTokens()


def _requests(late: LateTokens, count: int) -> list[Request]:
    """Request i has the prompt [i]."""
    fixed = {"max_tokens": 99, "limit_len": 99, "limit_reason": FinishReason.LENGTH}
    return [Request(f"r{i}", np.array([i], np.int32), arrival=i, late=late, **fixed) for i in range(count)]


def _add(late: LateTokens, requests: list[Request], first: int) -> None:
    """Request i of them gets first + i."""
    late.add(requests, np.arange(first, first + len(requests), dtype=np.int32))


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_reading_one_request_hands_out_to_all(late: LateTokens, num_steps: int) -> None:
    """Tokens wait until one request is read; then each request has its own, in the order of the steps."""
    requests = _requests(late, 3)
    for step in range(num_steps):
        _add(late, requests, 10 * (step + 1))
    assert [request.stored.tolist() for request in requests] == [[0], [1], [2]]
    assert requests[1].output == [10 * (step + 1) + 1 for step in range(num_steps)]
    assert late.count == 0
    for i, request in enumerate(requests):
        assert request.stored.tolist() == [i] + [10 * (step + 1) + i for step in range(num_steps)]


def test_other_requests_come_after_those_before(late: LateTokens) -> None:
    """A step with other requests hands out what waits: the one in both gets its tokens in order."""
    first = _requests(late, 2)
    second = [first[1]]
    _add(late, first, 10)
    _add(late, second, 20)
    assert (late.count, first[0].stored.tolist(), first[1].stored.tolist()) == (1, [0, 10], [1, 11])
    assert first[1].tokens.tolist() == [1, 11, 20]


def test_nothing_waits_longer_than_so_many_steps(late: LateTokens) -> None:
    """After NUM_STEPS steps the tokens are handed out unasked, and the next ones wait anew."""
    requests = _requests(late, 2)
    for step in range(NUM_STEPS + 1):
        _add(late, requests, step)
    assert (late.count, requests[0].stored.tolist()) == (1, [0, *range(NUM_STEPS)])
    assert requests[1].tokens.tolist() == [1, *range(1, NUM_STEPS + 2)]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_failing_to_hand_out_gives_nobody_anything(late: LateTokens, num_steps: int) -> None:
    """When one request cannot grow, none does, and once it can each token is there once."""
    requests = _requests(late, 3)
    for step in range(num_steps):
        _add(late, requests, 10 * step)
    with memoryview(requests[1].stored), pytest.raises(BufferError):
        late.hand_out()
    assert [request.stored.tolist() for request in requests] == [[0], [1], [2]]
    assert requests[2].output == [10 * step + 2 for step in range(num_steps)]


def test_steady_rows_leave_their_tokens_late() -> None:
    """Requests of a scheduler that decodes the same rows get no token one by one, and have all of them when they end."""
    driver = Driver(SchedulerConfig(**DEFAULTS | {"num_pages": 100, "max_pages_per_row": 40}))
    scheduler = driver.scheduler
    requests = [scheduler.submit(name, [1, 2], max_tokens=3 * NUM_STEPS) for name in "ab"]
    lengths, found = [], {request: [] for request in requests}
    while scheduler.has_work:
        op = scheduler.plan()
        assert op is not None
        scheduler.complete(driver.runtime.run(op))
        lengths.append(len(requests[0].stored))
        outputs = scheduler.take_outputs()
        for request, token in zip(*outputs.columns, strict=True):
            found[request].append(token)
    steps = [later - earlier for earlier, later in pairwise(lengths)]
    assert (steps.count(1), steps.count(NUM_STEPS)) == (1, 2)
    assert steps.count(0) > 2 * (NUM_STEPS - 2)
    assert [request.output for request in requests] == [found[request] for request in requests]
