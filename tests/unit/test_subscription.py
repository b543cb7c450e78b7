"""scheduler_service.subscription: tokens of one request, for one client, however slow."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.ops import SamplingParams, TokenLogprobs
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.errors import OutputUnreadError
from scheduler_service.subscription import Subscription


def a_subscription(num_logprobs: int | None = None, **options: Any) -> Subscription:
    """Of a request of one prompt token."""
    request = Request(
        "a",
        np.array([1], np.int32),
        max_tokens=9,
        limit_len=10,
        limit_reason=FinishReason.LENGTH,
        arrival=1,
        sampling=SamplingParams(num_logprobs=num_logprobs),
    )
    return Subscription(request, **options)


async def test_slow_client_gets_what_piled_up_in_one_piece() -> None:
    """Many tokens added between two takes are one list, in order, and are handed out once."""
    subscription = a_subscription()
    for token in range(1000):
        subscription.add(token)
    assert await subscription.take() == list(range(1000))
    subscription.add(7)
    assert await subscription.take() == [7]


async def test_take_waits_for_something_to_take() -> None:
    """Nothing is returned before a token or the end comes."""
    subscription = a_subscription()
    taking = asyncio.create_task(subscription.take())
    await asyncio.sleep(0)
    assert not taking.done()
    subscription.add(5)
    assert await taking == [5]


async def test_end_comes_with_the_last_tokens_and_stays() -> None:
    """After the end, take never waits: first the tokens that were left, then none."""
    subscription = a_subscription()
    subscription.add(5)
    subscription.finish()
    assert await subscription.take() == [5]
    assert subscription.finished
    assert await subscription.take() == []
    assert subscription.error is None


async def test_error_that_was_set_first_is_the_one_told() -> None:
    """A request that is aborted because the scheduler drains is told of the draining, not of the abort."""
    subscription = a_subscription()
    first = PagemirrorError("first")
    subscription.error = first
    subscription.finish(PagemirrorError("second"))
    assert subscription.error is first


async def test_end_cancels_the_queue_timer() -> None:
    """A timer that could expire a later request of the same id is gone with the end."""
    subscription = a_subscription()
    subscription.queue_timer = asyncio.get_running_loop().call_later(60, lambda: None)
    subscription.finish()
    assert subscription.queue_timer.cancelled()


@pytest.mark.parametrize(("num_logprobs", "most"), [(None, 84), (0, 42), (20, 2)])
async def test_most_that_may_be_left_unread(num_logprobs: int | None, most: int) -> None:
    """With room for 84 values: that many tokens, or so many with their log probabilities; one more and all is dropped, once."""
    noted: list[Subscription] = []
    subscription = a_subscription(num_logprobs, max_unread=84, on_overflow=noted.append)
    for token in range(most):
        subscription.add(token)
    assert not subscription.overflowed
    assert await subscription.take() == list(range(most))
    for token in range(most + 3):
        subscription.add(token)
    assert subscription.overflowed
    assert noted == [subscription]
    assert isinstance(subscription.error, OutputUnreadError)
    subscription.finish(PagemirrorError("later"))
    assert await subscription.take() == []
    assert subscription.exhausted
    assert isinstance(subscription.error, OutputUnreadError)


async def test_much_is_handed_out_in_pieces_that_fit_into_messages() -> None:
    """At most 64 KiB of values a piece, log probabilities beside their tokens, and the end after the last of them."""
    subscription = a_subscription(20)
    entries = [TokenLogprobs(-float(n), [], []) for n in range(500)]
    for token, entry in enumerate(entries):
        subscription.add(token, entry)
    subscription.finish()
    lengths = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while not subscription.exhausted:
        tokens += (piece := await subscription.take())
        logprobs += (beside := subscription.take_logprobs())
        assert len(piece) == len(beside)
        lengths.append(len(piece))
    assert lengths == [195, 195, 110]
    assert tokens == list(range(500))
    assert logprobs == entries
