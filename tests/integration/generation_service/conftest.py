"""Both services in one process, in front of them a client; the runtime runs the exact test model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from runtime_service import app as runtime_app
from runtime_service.executors.base import Capacity
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner
from scheduler_service.client import Client, Ending, Piece, RpcFailedError
from scheduler_service.engine_loop import EngineLoop

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
    both_services: Callable[..., Any],
    page_size: int = 4,
    num_pages: int = 64,
    max_rows: int = 8,
    max_pages_per_row: int = 32,
    stop_ids: tuple[int, ...] = (),
    max_context: int | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start a runtime of this shape, a scheduler with these settings, and a client."""
    executor = FingerprintExecutor(num_pages=num_pages, page_size=page_size)
    executor._info = dataclasses.replace(executor.info, default_stop_ids=stop_ids)
    runtime_settings = RuntimeSettings(
        model="fingerprint", page_size=page_size, num_pages=num_pages, max_rows=max_rows, max_context=max_context
    )
    create = lambda _: (executor, Capacity(num_pages=num_pages, max_pages_per_row=max_pages_per_row))  # noqa: E731
    load = functools.partial(runtime_app.load, runtime_settings, create)
    values = {"check": True, "chunk_size": 8, "token_budget": 32} | settings
    async with both_services(load, limit_s=LIMIT_S, **values) as (engine, client, runner):
        yield Stack(engine, client, executor, runner)
    assert executor.violations == []


@pytest.fixture(name="stack_of")
def stack_of_shape(both_services: Callable[..., Any]) -> Callable[..., AbstractAsyncContextManager[Stack]]:
    """Both services and a client; keyword arguments are the runtime's shape and the scheduler's settings."""
    return functools.partial(stack_of, both_services)
