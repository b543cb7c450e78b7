"""Both services in one process, and sessions with them: by the client's helper, and message by message."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from pagemirror.v1 import generation_pb2
from runtime_service import app as runtime_app
from runtime_service.executors.base import Capacity
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.settings import RuntimeSettings
from scheduler_service.client import Client
from scheduler_service.columns import int32_from_bytes, int32_to_bytes
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.session_client import Session
from scheduler_service.session_output import SessionCallError, SessionOutput

LIMIT_S = 30.0


def request_of(request_id: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> generation_pb2.GenerateRequest:
    """A request, as a front end submits it."""
    column = int32_to_bytes(list(prompt))
    return generation_pb2.GenerateRequest(request_id=request_id, prompt=column, max_tokens=max_tokens, **fields)


async def read_all(output: SessionOutput) -> tuple[list[int], generation_pb2.Finished]:
    """Tokens and account of a request that ends with OK."""
    tokens: list[int] = []
    while True:
        piece = await output.take()
        tokens += piece.tokens
        if piece.finished is not None:
            return tokens, piece.finished


class RawSession:
    """A session by its messages; what has come is kept by request."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.accepted: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, generation_pb2.SessionEnd] = {}
        self.num_messages = 0

    async def hello(self) -> int:
        """Say hello; the window."""
        await self.call.write(generation_pb2.SessionRequest(hello=generation_pb2.SessionHello()))
        return (await self.call.read()).welcome.window

    async def send(self, *submits: tuple[int, generation_pb2.GenerateRequest], aborts: Sequence[int] = ()) -> None:
        """One message."""
        message = generation_pb2.SessionRequest(aborts=int32_to_bytes(list(aborts)))
        for number, request in submits:
            message.submits.add(number=number, request=request)
        await self.call.write(message)

    async def read(self) -> bool:
        """Take one message in; False at the end."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        if isinstance(message, bytes):
            message = generation_pb2.SessionResponse.FromString(message)
        self.num_messages += 1
        self.accepted += int32_from_bytes(message.accepted, "accepted").tolist()
        numbers, tokens = int32_from_bytes(message.numbers, "numbers"), int32_from_bytes(message.tokens, "tokens")
        for number, token in zip(numbers.tolist(), tokens.tolist(), strict=True):
            assert number in self.accepted
            assert number not in self.ended
            self.tokens.setdefault(number, []).append(token)
        for end in message.ended:
            assert end.number not in self.ended
            self.ended[end.number] = end
        return True

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Read on to the end; the status."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.read():
                pass
        return await self.call.code(), await self.call.details()

    async def read_until(self, condition: Callable[[], bool]) -> None:
        """Read on until it is so."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                assert await self.read()


class Bench:
    """Both services, and sessions of them."""

    def __init__(self, engine: EngineLoop, client: Client) -> None:
        self.engine = engine
        self.client = client

    async def open(self, **options: Any) -> Session:
        """A session by the helper."""
        return await Session.open(self.client.stub, **options)

    def raw(self, call: Any = None) -> RawSession:
        """A session that has not begun."""
        return RawSession(self.client.stub.Session() if call is None else call)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    @staticmethod
    async def refusal(output: SessionOutput) -> tuple[grpc.StatusCode, str]:
        """The status with which a request ends."""
        with pytest.raises(SessionCallError) as caught:
            await read_all(output)
        return caught.value.code, caught.value.details


@contextlib.asynccontextmanager
async def bench_of(both_services: Callable[..., Any], **settings: Any) -> AsyncIterator[Bench]:
    """A runtime of 64 rows with pages of 4 tokens, and a scheduler with these settings."""
    executor = FingerprintExecutor(num_pages=2048, page_size=4)
    runtime_settings = RuntimeSettings(model="fingerprint", page_size=4, num_pages=2048, max_rows=64)
    create = lambda _: (executor, Capacity(num_pages=2048, max_pages_per_row=128))  # noqa: E731
    load = functools.partial(runtime_app.load, runtime_settings, create)
    async with both_services(load, limit_s=LIMIT_S, **{"check": True} | settings) as (engine, client, _):
        yield Bench(engine, client)
    assert executor.violations == []


@pytest.fixture
def bench(both_services: Callable[..., Any]) -> Callable[..., contextlib.AbstractAsyncContextManager[Bench]]:
    """Start both services; keyword arguments are the scheduler's settings."""
    return functools.partial(bench_of, both_services)


@pytest.fixture(name="request_of")
def make_request() -> Callable[..., generation_pb2.GenerateRequest]:
    """Makes a request."""
    return request_of


@pytest.fixture(name="read_all")
def read_to_the_end() -> Callable[..., Any]:
    """Reads a request's output."""
    return read_all
