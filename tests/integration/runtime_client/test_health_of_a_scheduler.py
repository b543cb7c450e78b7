"""The health of a scheduler process from its start to its end, and that of a front end behind it, as a watcher sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from scheduler_service import app, frontend_worker
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.frontend_settings import load_frontend_settings
from scheduler_service.settings import load_settings

Process = tuple[asyncio.Future[Any], asyncio.Future[str]]

LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def running(
    serve: Callable[[Callable[[str], None]], Any],
) -> AsyncIterator[tuple[asyncio.Future[Any], asyncio.Future[str]]]:
    """A process's whole life as a task, and its readiness line."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    life = asyncio.ensure_future(serve(ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield life, ready
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def gated(runtime: Any) -> asyncio.Event:
    """Ops are answered while this is set."""
    gate, answer = asyncio.Event(), runtime._answer
    gate.set()

    async def wait_and_answer(message: Any, context: Any) -> None:
        await gate.wait()
        await answer(message, context)

    runtime._answer = wait_and_answer
    return gate


async def test_serving_from_a_warm_up_to_a_drain(
    make_runtime: Any, listening: Any, continuation: Callable[[list[int], int], list[int]], tmp_path: Any
) -> None:
    """NOT_SERVING until a step has run, while none is answered, while the runtime is gone, and from the first signal on, which
    lets a stream end and nothing begin; a call that comes too early waits.
    """
    there, here = f"unix:{tmp_path}/r", f"unix:{tmp_path}/s"
    settings = load_settings(runtime=there, listen=here, stuck_timeout=0.2, heartbeat_timeout=30.0)
    runtime = make_runtime()
    gate = gated(runtime)
    async with running(lambda announce: app.serve(settings, announce)) as (life, ready), Client(here) as client:
        health = client.watch_health()
        assert await anext(health) is False
        early = asyncio.ensure_future(client.info())
        gate.clear()
        async with listening(runtime, there):
            while not runtime.num_streams:
                await asyncio.sleep(0.01)
            assert not early.done()
            assert not ready.done()
            gate.set()
            assert await anext(health) is True
            assert (await early).model == "fingerprint"
            assert await ready == f"pagemirror ready on {here} (model fingerprint)"
            assert runtime.num_ops >= 1
            gate.clear()
            stream = client.generate([1, 2, 3], max_tokens=9)
            await anext(stream)  # it is accepted
            assert await anext(health) is False
            gate.set()
            assert await anext(health) is True
            assert sum([piece.tokens async for piece in stream], []) == continuation([1, 2, 3], 9)
        assert await anext(health) is False
        async with listening(runtime, there):
            assert await anext(health) is True
            gate.clear()
            stream = client.generate([4, 5, 6], max_tokens=9)
            await anext(stream)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await anext(health) is False
            with pytest.raises(RpcFailedError, match="the scheduler is shutting down") as caught:
                await anext(client.generate([7], max_tokens=1))
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            gate.set()
            assert sum([piece.tokens async for piece in stream], []) == continuation([4, 5, 6], 9)
            assert await life == 0
            assert runtime.holder == 0  # the op stream has ended, too


async def test_a_front_end_is_as_well_as_its_scheduler(make_runtime: Any, listening: Any, tmp_path: Any) -> None:
    """Its health follows the scheduler's, whose runtime goes and comes, and then the scheduler itself goes."""
    there, here, front = f"unix:{tmp_path}/r", f"unix:{tmp_path}/s", f"unix:{tmp_path}/f"
    settings = load_settings(runtime=there, listen=here, heartbeat_timeout=30.0)
    worker = load_frontend_settings(scheduler=here, listen=front, grace=1.0)
    runtime = make_runtime()
    async with running(lambda announce: frontend_worker.serve(worker, announce)), Client(front) as client:
        health = client.watch_health()
        async with running(lambda announce: app.serve(settings, announce)) as (_, ready):
            assert await anext(health) is False
            async with listening(runtime, there):
                await ready
                assert await anext(health) is True
            assert await anext(health) is False
            async with listening(runtime, there):
                assert await anext(health) is True
        assert await anext(health) is False
