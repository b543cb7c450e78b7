"""GenerationService over a real loopback server: queue limits, abort, retract, rows, cache reset, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from pagemirror.v1 import generation_pb2
from scheduler_service.client import RpcFailedError

StackOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]

LIMIT_S = 30.0


async def test_full_queue_and_long_wait(stack_of: StackOf, continuation: Continuation) -> None:
    """Beyond max_waiting: RESOURCE_EXHAUSTED; a wait that is too long: DEADLINE_EXCEEDED; who runs is unharmed."""
    async with stack_of(max_rows=1, max_waiting=1) as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100, request_id="runs")
        tokens = await stack.first_token(pieces)
        stack.engine.pause()  # so that the waiting one certainly waits
        waiting = asyncio.create_task(stack.run([4], 1, request_id="waits", max_queue_wait_ms=150))
        await stack.until(lambda: stack.engine.core.num_waiting == 1)
        error = await stack.refused(stack.run([5], 1))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests wait" in error.details
        error = await stack.refused(waiting)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "max_queue_wait_ms = 150" in error.details
        stack.engine.resume()
        tokens += (await stack.rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 100)


async def test_queue_limit_does_not_end_an_admitted_request(stack_of: StackOf, continuation: Continuation) -> None:
    """max_queue_wait_ms counts to the first admission only: a request that runs longer than it ends as it should."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=60, max_queue_wait_ms=50)
        tokens = await stack.first_token(pieces)
        stack.engine.pause()
        await asyncio.sleep(0.08)
        stack.engine.resume()
        tokens += (await stack.rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 60)


async def test_abort_ends_the_stream_with_its_reason(stack_of: StackOf, continuation: Continuation) -> None:
    """Abort closes the stream with reason abort and the tokens so far; an unknown id is NOT_FOUND."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100, request_id="a")
        tokens = await stack.first_token(pieces)
        await stack.client.abort("a")
        more, ending = await stack.rest_of(pieces)
        tokens += more
        assert tokens == continuation([1, 2, 3], len(tokens))
        assert ending is not None
        assert (ending.reason, ending.completion_tokens) == ("abort", len(tokens))
        for call in (stack.client.abort("a"), stack.client.retract("a"), stack.client.state("a")):
            assert (await stack.refused(call)).code is grpc.StatusCode.NOT_FOUND


async def test_retract_in_the_middle_changes_no_token(stack_of: StackOf, continuation: Continuation) -> None:
    """Rows are taken away again and again while tokens stream; the output equals the definition and the account counts it."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3, 4, 5, 6, 7], max_tokens=60, request_id="a")
        tokens = []
        retracted = 0
        async for piece in pieces:
            tokens += piece.tokens
            if piece.tokens and retracted < 5 and not piece.ending:
                try:
                    await stack.client.retract("a")
                    retracted += 1
                except RpcFailedError as error:
                    assert error.code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
            ending = piece.ending
        assert tokens == continuation([1, 2, 3, 4, 5, 6, 7], 60)
        assert retracted > 0
        assert ending is not None
        assert ending.num_retractions == retracted


async def test_retract_of_a_request_without_a_row_is_refused(stack_of: StackOf, continuation: Continuation) -> None:
    """A request that waits holds no row: FAILED_PRECONDITION, and its state says that it waits."""
    async with stack_of(max_rows=1) as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100)
        await stack.first_token(pieces)
        stack.engine.pause()
        waiting = asyncio.create_task(stack.run([4], 1, request_id="waits", priority=3))
        await stack.until(lambda: stack.engine.core.num_waiting == 1)
        assert (await stack.refused(stack.client.retract("waits"))).code is grpc.StatusCode.FAILED_PRECONDITION
        state = await stack.client.state("waits")
        assert (state.state, state.row, state.priority) == (generation_pb2.REQUEST_STATE_SUBMITTED, 0, 3)
        stack.engine.resume()
        await pieces.aclose()
        assert (await waiting)[0] == continuation([4], 1)


async def test_rows_of_both_sides_are_equal_while_requests_run(stack_of: StackOf, continuation: Continuation) -> None:
    """ListRows shows every holder with equal pages at one step, several times, and the requests go on undisturbed."""
    async with stack_of(num_pages=30) as stack:
        prompts = [[n, 1, 2, 3, 4, 5, 6] for n in range(5)]
        runs = [asyncio.create_task(stack.run(prompt, 40)) for prompt in prompts]
        await stack.until(lambda: stack.engine.core.num_running >= 3)
        steps = []
        for _ in range(5):
            found = await stack.client.rows()
            assert found.rows or all(run.done() for run in runs)
            assert all(row.equal and row.scheduler_pages == row.mirror_pages for row in found.rows)
            assert len({row.row for row in found.rows}) == len(found.rows)
            steps.append(found.step)
        assert steps == sorted(steps)
        for prompt, run in zip(prompts, runs, strict=True):
            assert (await run)[0] == continuation(prompt, 40)
        assert (await stack.client.rows()).rows == []


async def test_row_that_differs_is_shown_as_such(stack_of: StackOf) -> None:
    """When the mirror holds another page than the scheduler's row, ListRows says so and shows both."""
    async with stack_of() as stack:
        stream = stack.client.generate([1, 2, 3, 4, 5], max_tokens=100, request_id="a")
        await stack.first_token(stream)
        stack.engine.pause()
        await stack.engine.wait_quiet()
        row = stack.engine.core.requests["a"].row
        pages = stack.engine.core.rows()[row][1].tolist()
        stack.runner.mirror.table[row, 0] = 63
        found = (await stack.client.rows()).rows[0]
        assert not found.equal
        assert found.scheduler_pages == pages
        assert found.mirror_pages == [63, *pages[1:]]
        stack.runner.mirror.table[row, 0] = pages[0]
        assert (await stack.client.rows()).rows[0].equal
        stack.engine.resume()
        await stream.aclose()


async def test_prefix_cache_reset_refused_then_forced_then_free(stack_of: StackOf, continuation: Continuation) -> None:
    """While pages are in use a reset is FAILED_PRECONDITION; forced it changes no token; idle it frees all that is cached."""
    async with stack_of() as stack:
        prompt = list(range(20, 33))
        await stack.run(prompt, 2)
        pieces = stack.client.generate(prompt, max_tokens=60, request_id="a")
        tokens = await stack.first_token(pieces)
        error = await stack.refused(stack.client.reset_prefix_cache())
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "running requests use" in error.details
        assert await stack.client.reset_prefix_cache(force=True) >= 3
        more, ending = await stack.rest_of(pieces)
        assert tokens + more == continuation(prompt, 60)
        assert ending is not None
        assert ending.num_retractions == 1
        cached = stack.engine.core.stats().cached
        assert cached > 0
        assert await stack.client.reset_prefix_cache() == cached
        assert stack.engine.core.stats().free == 64


async def test_drain_lets_live_requests_end_and_refuses_new_ones(stack_of: StackOf, continuation: Continuation) -> None:
    """While draining, a running request ends as it should, and a new one is UNAVAILABLE."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=60)
        tokens = await stack.first_token(pieces)
        draining = asyncio.create_task(stack.engine.drain(LIMIT_S))
        await stack.until(lambda: stack.engine.draining)
        error = await stack.refused(stack.run([4], 1))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details
        tokens += (await stack.rest_of(pieces))[0]
        assert tokens == continuation([1, 2, 3], 60)
        await draining


async def test_drain_ends_what_outlasts_its_grace(stack_of: StackOf) -> None:
    """When the grace is over, streams end with UNAVAILABLE after the tokens they had."""
    async with stack_of() as stack:
        pieces = stack.client.generate([1, 2, 3], max_tokens=100)
        await stack.first_token(pieces)
        stack.engine.pause()
        await stack.engine.drain(0.05)
        assert (await stack.refused(stack.rest_of(pieces))).code is grpc.StatusCode.UNAVAILABLE
        assert not stack.engine.core.has_work
