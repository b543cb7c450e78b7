"""Case B54: keepalive on an idle stream, by the HTTP/2 frames that pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc import aio

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from runtime_service import app as runtime_app
from scheduler_service import channels

FASTER = 20
"""Every time is divided by this; what matters is how they relate."""
KEEPALIVE_S, NUM_PINGS = 1.0, 15  # a client that pings every second, and no data for 15 seconds
PING, GOAWAY = 0x6, 0x7  # types of HTTP/2 frames
PREFACE_LEN, HEAD_LEN = 24, 9


class PingingRelay:
    """A TCP relay that puts pings of its own between a client's frames, as a client with keepalive sends them.

    gRPC's own client sends none more often than once a second, whatever it is told.
    """

    def __init__(self) -> None:
        self.num_connections = 0
        self.sent_away = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._to_server: asyncio.StreamWriter | None = None

    @contextlib.asynccontextmanager
    async def relaying(self, target: str) -> AsyncIterator[str]:
        """Relay to the target; yields the address to dial."""
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._relay(target, reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ping(self, count: int) -> None:
        """Ping the server so often, each time so long after it has answered; ends early when it sends the client away."""
        assert self._to_server is not None
        for _ in range(count):
            self._acknowledged.clear()
            self._to_server.write(b"\0\0\x08" + bytes([PING, 0]) + b"\0\0\0\0" + b"measured")
            waits = [asyncio.ensure_future(event.wait()) for event in (self._acknowledged, self.sent_away)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self.sent_away.is_set():
                return
            await asyncio.sleep(KEEPALIVE_S / FASTER)

    async def _relay(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, _, port = target.rpartition(":")
        from_server, self._to_server = await asyncio.open_connection(host, int(port))
        self._to_server.write(await reader.readexactly(PREFACE_LEN))
        try:
            await asyncio.gather(self._copy(reader, self._to_server), self._copy(from_server, writer))
        finally:
            self._to_server.close()
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(HEAD_LEN)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == PING and payload == b"measured":
                self._acknowledged.set()
                continue
            if head[3] == GOAWAY and writer is not self._to_server:
                self.sent_away.set()
            writer.write(head + payload)
            await writer.drain()


class Echo(runtime_pb2_grpc.RuntimeServiceServicer):
    """Answers each message with one."""

    async def Execute(self, requests: Any, context: Any) -> None:
        async for _ in requests:
            await context.write(runtime_pb2.ExecuteResponse(heartbeat=runtime_pb2.Heartbeat()))


def scaled(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The options with the times about pings shorter."""
    return [(name, value // FASTER if "ping_interval" in name else value) for name, value in options]


async def test_b54_keepalive_is_not_punished(harness: Any) -> None:
    """A server sends away a client that pings a quiet stream (sgl-project/sglang#19986, llm-d/llm-d-kv-cache#359)."""

    async def exchange(call: Any) -> None:
        await call.write(runtime_pb2.ExecuteRequest())
        assert isinstance(await asyncio.wait_for(call.read(), harness.limit_s), runtime_pb2.ExecuteResponse)

    async def sends_away(options: list[tuple[str, Any]]) -> bool:
        server, relay = aio.server(options=options), PingingRelay()
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(Echo(), server)
        address = channels.bind(server, "127.0.0.1:0")
        await server.start()
        try:
            async with relay.relaying(address) as relayed, channels.open_channel(relayed) as channel:
                call = runtime_pb2_grpc.RuntimeServiceStub(channel).Execute()
                await exchange(call)
                await asyncio.wait_for(relay.ping(NUM_PINGS), harness.limit_s)
                if relay.sent_away.is_set():
                    return True
                await exchange(call)
                assert relay.num_connections == 1
                return relay.sent_away.is_set()
        finally:
            await server.stop(0)

    public, private = scaled(channels.SERVER_OPTIONS), scaled(runtime_app.SERVER_OPTIONS)
    assert await asyncio.gather(sends_away(public), sends_away(private)) == [False, False]
    assert await sends_away([("grpc.so_reuseport", 0)]), "this is what a server with gRPC's own limits does"
    pings = [dict(options)["grpc.keepalive_time_ms"] for options in (channels.CLIENT_OPTIONS, channels.SERVER_OPTIONS)]
    assert min(pings) >= KEEPALIVE_S * 1000, "our own clients ping less often than that"
