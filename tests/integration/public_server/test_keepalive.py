"""Quiet connections: a stream on which nothing is said lives on, and one whose other end has vanished is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.channels import open_channel
from scheduler_service.columns import int32_to_bytes

KEEPALIVE_S = 1.0  # a busy machine must have the time to answer a ping
NEVER_S = 3600.0


class Relay:
    """Carries bytes between a client and a server, counts them, and can lose them from some moment on."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.carried = {"up": 0, "down": 0}
        self.is_cut = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, and one to the server."""
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        for way, source, sink in (("up", reader, far_writer), ("down", far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._carry(way, source, sink)))

    async def _carry(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                self.carried[way] += len(data)
                if not self.is_cut:
                    sink.write(data)
        if not self.is_cut:
            sink.close()

    async def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[tuple[Relay, str]]:
    """A relay, and where it listens."""
    relay = Relay(target)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    try:
        yield relay, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await relay.close()


def ask(channel: aio.Channel, max_tokens: int) -> Any:
    """Begin a request."""
    request = generation_pb2.GenerateRequest(request_id="a", prompt=int32_to_bytes([1, 2, 3]), max_tokens=max_tokens)
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


@pytest.mark.parametrize(
    ("of_client", "of_server"), [(KEEPALIVE_S, KEEPALIVE_S), (NEVER_S, KEEPALIVE_S)], ids=["both ask", "server asks"]
)
async def test_quiet_stream_lives_on(
    serving: Callable[..., Any], until: Callable[..., Any], of_client: float, of_server: float
) -> None:
    """While planning pauses only pings are said for some intervals, which the other side puts up with; then it goes on."""
    async with serving(keepalive=of_server) as served, relay_to(served.front.address) as (relay, address):
        channel = open_channel(address, keepalive_s=of_client)
        served.engine.pause()
        call = ask(channel, 5)
        assert await call.read() is not aio.EOF
        before = dict(relay.carried)
        # 17 bytes a ping, and as many for its answer.
        await until(lambda: all(relay.carried[way] >= before[way] + 2 * 17 for way in before))
        served.engine.resume()
        pieces = 0
        while await call.read() is not aio.EOF:
            pieces += 1
        assert pieces
        assert await call.code() is grpc.StatusCode.OK
        await channel.close()


async def test_client_that_vanished_is_noticed(serving: Callable[..., Any], until: Callable[..., Any]) -> None:
    """Nothing comes any more and nothing is refused, as when a machine loses power: the request ends by the keepalive."""
    async with serving(keepalive=KEEPALIVE_S) as served, relay_to(served.front.address) as (relay, address):
        channel = open_channel(address, keepalive_s=NEVER_S)
        served.engine.pause()
        call = ask(channel, 5)
        assert await call.read() is not aio.EOF
        assert "a" in served.engine.core.requests
        relay.is_cut = True
        await until(lambda: not served.engine.core.requests)
        served.engine.resume()
        call.cancel()
        await channel.close()


async def test_server_that_vanished_is_noticed(serving: Callable[..., Any]) -> None:
    """The client's stream ends with UNAVAILABLE instead of waiting for ever."""
    async with serving() as served, relay_to(served.front.address) as (relay, address):
        channel = open_channel(address, keepalive_s=KEEPALIVE_S)
        served.engine.pause()
        call = ask(channel, 5)
        assert await call.read() is not aio.EOF
        relay.is_cut = True
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        served.engine.resume()
        await channel.close()
