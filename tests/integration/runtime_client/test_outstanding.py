"""Ops that are sent and not answered: how many there may be, and what happens to their requests meanwhile.

The runtime here reads every op at once and answers when the test says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from scheduler_service.engine_loop import EngineLoop, SubmitOptions

MakeRuntime = Callable[..., Any]
Listening = Callable[..., AbstractAsyncContextManager[str]]
EngineOn = Callable[..., AbstractAsyncContextManager[EngineLoop]]
Definition = Callable[[list[int], int], list[int]]

LIMIT_S = 60.0
A_TOKENS = [20, 104, 629, 421, 384, 473]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until the condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


class Held:
    """Ops as they arrive at a runtime that does not answer them by itself."""

    def __init__(self, runtime: Any) -> None:
        self.waiting: deque[tuple[Any, Any]] = deque()
        self.most = 0
        self._session = runtime.runner.session
        self._answer = runtime._answer
        runtime._answer = self._keep

    async def _keep(self, message: Any, context: Any) -> None:
        self.waiting.append((message, context))
        self.most = max(self.most, len(self.waiting))

    async def until(self, count: int) -> None:
        """Wait until that many ops are unanswered."""
        await until(lambda: len(self.waiting) >= count)

    async def answer(self) -> None:
        """Answer the oldest, or drop it if a reset has overtaken it."""
        message, context = self.waiting.popleft()
        if message.session_no == self._session.session_no:
            await self._answer(message, context)


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
async def test_slow_runtime_is_never_sent_more_than_the_window(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, overlap_depth: int
) -> None:
    """However long it does not answer, overlap_depth + 1 ops are all it is sent; each answer brings one more op at most."""
    runtime = make_runtime()
    held = Held(runtime)
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        subscriptions = clients.submit_all(engine)
        await held.until(overlap_depth + 1)
        while not all(subscription.finished for subscription in subscriptions):
            # Submissions and wake-ups do not open the window either.
            engine.core.reset_prefix_cache(force=False) if not engine.core.placement.cache.num_locked else None
            for _ in range(10):
                engine._wake.set()
                await asyncio.sleep(0.001)
            assert len(held.waiting) <= overlap_depth + 1
            if held.waiting:
                await held.answer()
        assert dict(zip(clients.expected, [await clients.collect(one) for one in subscriptions], strict=True)) == (
            clients.expected
        )
        assert held.most == overlap_depth + 1


async def test_retracted_with_two_results_outstanding(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """At overlap 2 a request is retracted while two decode steps are out: their tokens count once, none is lost."""
    runtime = make_runtime()
    held = Held(runtime)
    async with listening(runtime) as address, engine_on(address, overlap_depth=2) as engine:
        subscription = engine.submit("A", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        await held.until(3)
        for known in (1, 2):
            await held.answer()
            await until(lambda known=known: subscription.request.num_output == known and len(held.waiting) == 3)
        engine.pause()
        await held.answer()
        await until(lambda: engine.core.num_in_flight == 2)
        engine.retract("A")
        assert (subscription.request.num_output, subscription.request.num_outstanding) == (3, 2)
        engine.resume()
        while not subscription.finished:
            await held.until(1)
            await held.answer()
            for _ in range(5):
                await asyncio.sleep(0.001)
        assert await clients.collect(subscription) == A_TOKENS
        assert subscription.request.num_retractions == 1
    assert runtime.num_resets == 0


async def test_chunk_that_fails_after_its_pages_were_matched(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, continuation: Definition
) -> None:
    """A's first chunk raises when its pages are published already and B computes on them: both say 70, not B 40."""
    runtime = make_runtime(page_size=2, max_pages_per_row=32)
    held = Held(runtime)
    prompt = np.array([1, 2, 3, 4, 5], np.int32)
    cells = runtime.runner.executor
    execute, failures = cells.execute, [RuntimeError("once")]

    def fail_once(batch: Any) -> Any:
        if failures:
            cells.poison()  # whatever it has written is worth nothing
            raise failures.pop()
        return execute(batch)

    cells.execute = fail_once
    async with listening(runtime) as address, engine_on(address, overlap_depth=2, token_budget=4, chunk_size=4) as engine:
        a = engine.submit("A", prompt, SubmitOptions(max_tokens=3))
        b = engine.submit("B", prompt, SubmitOptions(max_tokens=3))
        await held.until(3)
        assert b.request.cached_tokens == 4, "B has matched what A's first chunk was to write"
        pages = {request.request_id: pages.tolist() for request, pages in engine.core.rows().values()}
        assert pages["A"][:2] == pages["B"][:2]
        outputs = asyncio.gather(clients.collect(a), clients.collect(b))
        while not outputs.done():
            if held.waiting:
                await held.answer()
            await asyncio.sleep(0.001)
        assert await outputs == [continuation([1, 2, 3, 4, 5], 3)] * 2
        assert a.request.output[0] == 70
    assert runtime.num_resets == 1


async def test_limits_do_not_count_the_time_this_process_was_stopped(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """An op is out when the whole process stands still for longer than both limits: afterwards it goes on as if nothing was."""
    runtime = make_runtime()
    held = Held(runtime)
    limits = {"heartbeat_timeout": 1.0, "step_timeout": 1.0, "overlap_depth": 0}
    async with listening(runtime) as address, engine_on(address, **limits) as engine:
        subscription = engine.submit("A", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        await held.until(1)
        assert not threading.Event().wait(1.5), "blocks the event loop, and with it everything here"
        while not subscription.finished:
            if held.waiting:
                await held.answer()
            await asyncio.sleep(0.001)
        assert await clients.collect(subscription) == A_TOKENS
        assert engine.connection.trouble == ""


async def test_results_before_a_trouble_are_delivered_before_it_is_dealt_with(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A's last token and the refusal of the next op arrive together: A is over, for its client too, before anything waits."""
    runtime = make_runtime()
    held = Held(runtime)
    async with listening(runtime) as address, engine_on(address, overlap_depth=1) as engine:
        a = engine.submit("A", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=1))
        b = engine.submit("B", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        await held.until(2)
        seen: list[tuple[bool, list[str]]] = []
        settle = engine._verifier.settle

        async def look_and_settle(*arguments: Any) -> Any:
            seen.append((a.finished, engine._subscribers.ids()))
            return await settle(*arguments)

        monkeypatch.setattr(engine._verifier, "settle", look_and_settle)
        wake = engine.link._wake
        engine.link._wake = lambda: None
        await held.answer()
        runtime.refuses = lambda message: (1, "B")
        await held.answer()
        runtime.refuses = lambda message: None
        await until(lambda: len(engine.link.answers) == 2)
        engine.link._wake = wake
        wake()
        while not b.finished:
            if held.waiting:
                await held.answer()
            await asyncio.sleep(0.001)
        assert (await clients.collect(a), await clients.collect(b)) == ([20], A_TOKENS)
        assert seen == [(True, ["B"])]
