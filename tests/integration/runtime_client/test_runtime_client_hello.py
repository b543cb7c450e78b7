"""The scheduler's first words with a runtime: what must agree, and whose turn it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.errors import RuntimeMismatchError, RuntimeUnavailableError, StartError

MakeRuntime = Callable[..., Any]
Listening = Callable[..., AbstractAsyncContextManager[str]]
EngineOn = Callable[..., AbstractAsyncContextManager[EngineLoop]]


async def test_configured_value_that_disagrees_is_refused_with_both(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn
) -> None:
    """A page_size of our own that the runtime does not have ends the start, and the message has both values."""
    async with listening(make_runtime()) as address:
        with pytest.raises(RuntimeMismatchError, match="page_size: the scheduler says 16, the runtime says 4"):
            async with engine_on(address, page_size=16):
                pass
        with pytest.raises(RuntimeMismatchError, match="num_pages: the scheduler says 31, the runtime says 32"):
            async with engine_on(address, num_pages=31):
                pass
        async with engine_on(address, page_size=4, num_pages=32, max_rows=8, max_pages_per_row=16) as engine:
            assert engine.config.num_pages == 32


async def test_other_protocol_version_is_refused(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn) -> None:
    """A runtime of another protocol version is named as such."""
    async with listening(make_runtime(protocol_version=2)) as address:
        with pytest.raises(RuntimeMismatchError, match="protocol_version: the scheduler says 1, the runtime says 2"):
            async with engine_on(address):
                pass


async def test_configuration_whose_largest_op_fits_no_message_is_refused(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn
) -> None:
    """At hello the largest possible op is held against 64 MiB, and the message says what to lower."""
    runtime = make_runtime()
    async with listening(runtime) as address:
        runtime.shape.max_rows, runtime.shape.max_pages_per_row = 1024, 16384
        with pytest.raises(RuntimeMismatchError, match=r"67,108,864 bytes.*max_rows 1,024 and max_pages_per_row 16,384"):
            async with engine_on(address):
                pass


async def test_runtime_that_serves_another_scheduler_is_waited_for(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """A second scheduler waits while the first one's stream is alive, and is served after it."""
    runtime = make_runtime()
    async with listening(runtime) as address:
        async with engine_on(address) as first:
            with pytest.raises(StartError, match="another scheduler's stream is alive"):
                async with engine_on(address, startup_timeout=0.2):
                    pass
            assert await clients.run_all(first) == clients.expected
        async with engine_on(address) as second:
            assert await clients.run_all(second) == clients.expected


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"num_pages": 31}, "num_pages: the scheduler says 32, the runtime says 31"),
        ({"model": "other"}, "model: the scheduler says fingerprint, the runtime says other"),
    ],
)
async def test_runtime_that_comes_back_as_another_is_refused(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, shape: dict[str, Any], words: str
) -> None:
    """A successor with another pool, or another model, cannot go on: clients are told UNAVAILABLE with both values."""
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address = await first.enter_async_context(listening(make_runtime()))
        engine = await stack.enter_async_context(engine_on(address, runtime_timeout=0.5))
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=50))
        await subscription.take()
        await first.aclose()
        await stack.enter_async_context(listening(make_runtime(**shape), address))
        with pytest.raises(RuntimeUnavailableError, match=words):
            await clients.collect(subscription)
