"""The scheduler's end of the runtime stream against a runtime that refuses, breaks off, falls silent or answers nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import InternalError
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.errors import RequestFailedError, RuntimeUnavailableError
from scheduler_service.settings import SchedulerSettings

MakeRuntime = Callable[..., Any]
Listening = Callable[..., AbstractAsyncContextManager[str]]
EngineOn = Callable[..., AbstractAsyncContextManager[EngineLoop]]

LIMIT_S = 60.0


async def test_first_numbers(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any) -> None:
    """The tokens of the definition come back over the wire: 1, 2, 3 → 20 104 629 421 384 473."""
    async with listening(make_runtime()) as address, engine_on(address) as engine:
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=6))
        assert await clients.collect(subscription) == [20, 104, 629, 421, 384, 473]
        assert engine.num_steps > 0


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
async def test_window_is_overlap_depth_plus_one(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, overlap_depth: int
) -> None:
    """Never more ops are unanswered than overlap_depth + 1, and outputs do not depend on it."""
    runtime = make_runtime()
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        assert await clients.run_all(engine) == clients.expected
    assert runtime.most_unanswered <= overlap_depth + 1
    assert runtime.num_streams == 1
    assert runtime.num_resets == 0


@pytest.mark.parametrize("fault", ["refuse", "alien_token", "short", "wrong_step", "break"])
@pytest.mark.parametrize("overlap_depth", [0, 1])
async def test_one_fault_is_a_pause(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any, fault: str, overlap_depth: int
) -> None:
    """A refusal, a nonsensical result and a broken stream lose nothing: the same outputs come, from a later session."""
    runtime = make_runtime(fault=lambda number: fault if number in {3, 7} else "")
    async with listening(runtime) as address, engine_on(address, overlap_depth=overlap_depth) as engine:
        assert await clients.run_all(engine) == clients.expected
        assert engine.metrics.registry.get_sample_value("pagemirror_runtime_connected") == 1
    assert runtime.sessions == sorted(set(runtime.sessions))
    assert len(runtime.sessions) == 3
    same_stream = fault in {"refuse", "alien_token"}
    assert (runtime.num_resets, runtime.num_streams) == ((2, 1) if same_stream else (0, 3))


async def test_silence_is_noticed(make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any) -> None:
    """A runtime that neither answers nor beats is given up after the heartbeat limit, and its successor serves."""
    runtime = make_runtime(fault=lambda number: "freeze" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address, heartbeat_timeout=0.3) as engine:
        assert await clients.run_all(engine) == clients.expected
        assert "no sign of life" in engine.connection.trouble
    assert runtime.num_streams == 2


async def test_step_limit_is_separate_from_heartbeats(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """A runtime that beats but never answers a step is given up after the step limit."""
    runtime = make_runtime(fault=lambda number: "ignore" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address, heartbeat_timeout=0.5, step_timeout=0.4) as engine:
        assert await clients.run_all(engine) == clients.expected
        assert "took" in engine.connection.trouble
    assert runtime.num_streams == 2


async def test_late_result_of_an_old_session_is_dropped(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """The true result of a refused op arrives before and after the reset, and its tokens are not delivered twice."""
    runtime = make_runtime(fault=lambda number: "late" if number == 4 else "")
    async with listening(runtime) as address, engine_on(address) as engine:
        assert await clients.run_all(engine) == clients.expected
    assert runtime.num_resets == 1
    assert runtime.num_late == 2


async def test_no_runtime_for_too_long_is_unavailable_and_comes_back(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """Clients wait through runtime_timeout, are then told UNAVAILABLE, and are served again when a runtime is back."""
    runtime = make_runtime()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address = await first.enter_async_context(listening(runtime))
        engine = await stack.enter_async_context(engine_on(address, runtime_timeout=0.4))
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=50))
        await subscription.take()
        await first.aclose()
        with pytest.raises(RuntimeUnavailableError, match=r"0\.4 s"):
            await clients.collect(subscription)
        with pytest.raises(RuntimeUnavailableError):
            engine.submit("b", np.array([1], np.int32), SubmitOptions())
        await stack.enter_async_context(listening(runtime, address))
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert await clients.run_all(engine) == clients.expected


async def test_fault_that_always_comes_back_ends_each_request(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """A runtime that lives and refuses each op does not make it loop for ever: every request ends, on its third refusal."""
    runtime = make_runtime(fault=lambda number: "refuse")
    async with listening(runtime) as address, engine_on(address) as engine:
        outcomes = await asyncio.gather(*map(clients.collect, clients.submit_all(engine)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RequestFailedError] * 4
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert (runtime.num_resets, runtime.num_streams) == (12, 1)
        runtime.fault = lambda number: ""
        assert await clients.run_all(engine) == clients.expected


async def test_runtime_that_is_lost_with_every_op_is_unavailable(
    make_runtime: MakeRuntime, listening: Listening, engine_on: EngineOn, clients: Any
) -> None:
    """A stream that breaks with each op: clients get UNAVAILABLE when no session has lasted for runtime_timeout in all."""
    runtime = make_runtime(fault=lambda number: "break")
    async with listening(runtime) as address, engine_on(address, runtime_timeout=0.15) as engine:
        outcomes = await asyncio.gather(*map(clients.collect, clients.submit_all(engine)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RuntimeUnavailableError] * 4
        assert "broken on demand" in str(outcomes[0])
        assert runtime.num_streams > 2
        runtime.fault = lambda number: ""
        async with asyncio.timeout(LIMIT_S):
            await engine.wait_quiet()
        assert await clients.run_all(engine) == clients.expected


async def test_error_of_our_own_ends_streams_and_the_loop(
    make_runtime: MakeRuntime, listening: Listening, clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contradiction inside the core is no pause: streams end with it, `failed` is set, and nothing more is accepted."""
    async with listening(make_runtime()) as address:
        engine = EngineLoop(SchedulerSettings(runtime=address, heartbeat_timeout=30.0))
        await engine.start()

        def explode() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(engine.core, "plan", explode)
        subscription = engine.submit("a", np.array([1, 2, 3], np.int32), SubmitOptions())
        with pytest.raises(InternalError, match="the scheduler failed"):
            await clients.collect(subscription)
        assert engine.failed.is_set()
        with pytest.raises(InternalError):
            engine.submit("b", np.array([1], np.int32), SubmitOptions())
        await engine.stop()
