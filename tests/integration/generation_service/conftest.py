"""Both services in one process, in front of them a client; the runtime runs the exact test model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest

from pagemirror.v1 import generation_pb2_grpc
from runtime_service import app as runtime_app
from runtime_service.execution import ExecutionThread
from runtime_service.executors.base import Capacity
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.servicer import RuntimeServicer
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.client import Client, Ending, Piece, RpcFailedError
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.generation_servicer import GenerationServicer
from scheduler_service.settings import SchedulerSettings

LIMIT_S = 30.0


@dataclasses.dataclass
class Stack:
    """Both services in this process, and a client of each."""

    engine: EngineLoop
    client: Client
    executor: FingerprintExecutor
    runner: StepRunner

    async def run(self, prompt: list[int], num_tokens: int, **options: Any) -> tuple[list[int], Ending]:
        """One request, start to end."""
        tokens: list[int] = []
        ending = None
        async for piece in self.client.generate(prompt, max_tokens=num_tokens, **options):
            tokens += piece.tokens
            ending = piece.ending
        assert ending is not None
        return tokens, ending

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    @staticmethod
    async def first_token(pieces: AsyncIterator[Piece]) -> list[int]:
        """Tokens up to and including the first piece that has some."""
        async for piece in pieces:
            if piece.tokens:
                return piece.tokens
        raise AssertionError("the request ended without a token")

    @staticmethod
    async def rest_of(pieces: AsyncIterator[Piece]) -> tuple[list[int], Ending | None]:
        """Everything that is still to come."""
        tokens: list[int] = []
        ending = None
        async for piece in pieces:
            tokens += piece.tokens
            ending = piece.ending
        return tokens, ending

    @staticmethod
    async def refused(call: Awaitable[Any]) -> RpcFailedError:
        """The error with which a call ends."""
        with pytest.raises(RpcFailedError) as caught:
            await call
        return caught.value


@contextlib.asynccontextmanager
async def stack_of(
    page_size: int = 4,
    num_pages: int = 64,
    max_rows: int = 8,
    max_pages_per_row: int = 32,
    stop_ids: tuple[int, ...] = (),
    max_context: int | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start a runtime of this shape, a scheduler with these settings, and a client."""
    async with contextlib.AsyncExitStack() as stack:
        executor = FingerprintExecutor(num_pages=num_pages, page_size=page_size)
        executor._info = dataclasses.replace(executor.info, default_stop_ids=stop_ids)
        thread = ExecutionThread()
        stack.callback(thread.stop)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = RuntimeServicer(thread)
        servicer.register(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.callback(servicer.shut_down)
        runtime_settings = RuntimeSettings(
            model="fingerprint", page_size=page_size, num_pages=num_pages, max_rows=max_rows, max_context=max_context
        )
        create = lambda _: (executor, Capacity(num_pages=num_pages, max_pages_per_row=max_pages_per_row))  # noqa: E731
        runner, facts = await thread.call(lambda: runtime_app.load(runtime_settings, create))
        servicer.set_ready(runner, facts)

        values = {"heartbeat_timeout": 30.0, "check": True, "chunk_size": 8, "token_budget": 32}
        engine = EngineLoop(SchedulerSettings(runtime=address, **(values | settings)))
        front = grpc.aio.server(options=SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(engine), front)
        front_address = bind(front, "127.0.0.1:0")
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
        stack.push_async_callback(engine.stop)
        await front.start()
        stack.push_async_callback(front.stop, 0)
        client = await stack.enter_async_context(Client(front_address))
        async with asyncio.timeout(LIMIT_S):
            yield Stack(engine, client, executor, runner)
        assert not engine.failed.is_set()
        assert executor.violations == []


@pytest.fixture(name="stack_of")
def stack_of_shape() -> Callable[..., AbstractAsyncContextManager[Stack]]:
    """Both services and a client; keyword arguments are the runtime's shape and the scheduler's settings."""
    return stack_of
