"""What tests of several folders share: both services in one process, and the tokens that the fingerprint model returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from pagemirror.v1 import generation_pb2_grpc
from runtime_service.execution import ExecutionThread
from runtime_service.servicer import RuntimeServicer
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.generation_servicer import GenerationServicer
from scheduler_service.settings import SchedulerSettings

Services = tuple[EngineLoop, Client, StepRunner]

VOCAB_SIZE = 997


@pytest.fixture(scope="session")
def continuation() -> Callable[[Sequence[int], int], list[int]]:
    """The fingerprint model by its definition."""

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        known = list(prompt)
        for _ in range(count):
            known.append(sum((i + 1) * (token + 1) for i, token in enumerate(known)) % VOCAB_SIZE)
        return known[len(prompt) :]

    return tokens


@contextlib.asynccontextmanager
async def _both_services(load: Callable[[], Any], *, limit_s: float, **settings: Any) -> AsyncIterator[Services]:
    async with contextlib.AsyncExitStack() as stack:
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        runner, facts = await thread.call(load)
        servicer.set_ready(runner, facts)

        engine = EngineLoop(SchedulerSettings(runtime=address, **({"heartbeat_timeout": 30.0} | settings)))
        front = grpc.aio.server(options=SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(engine), front)
        front_address = bind(front, "127.0.0.1:0")
        async with asyncio.timeout(limit_s):
            await engine.start()
        stack.push_async_callback(engine.stop)
        await front.start()
        stack.push_async_callback(front.stop, 0)
        client = await stack.enter_async_context(Client(front_address))
        async with asyncio.timeout(limit_s):
            yield engine, client, runner
        assert not engine.failed.is_set()


@pytest.fixture(scope="session")
def both_services() -> Callable[..., AbstractAsyncContextManager[Services]]:
    """A runtime of what `load` makes, a scheduler with these settings, and a client of it, over loopback servers."""
    return _both_services
