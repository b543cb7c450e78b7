"""Broken connections to both services: HTTP/2 made by hand, and bytes that are none of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fuzz_generation import MadClients
from fuzz_runtime import MadScheduler
from fuzz_sockets import connections

from pagemirror.v1 import forward_pb2, generation_pb2, runtime_pb2

WAIT_S = 100.0
PAUSE_S = 0.05
"""Without an answer for so long, our side of a connection is closed."""
NUM_SILENT = 200


async def converse(address: str, data: bytes) -> None:
    """Write `data`, read what comes, and go."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), WAIT_S)
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), WAIT_S)
        while await asyncio.wait_for(reader.read(65_536), PAUSE_S):
            pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(writer.wait_closed(), WAIT_S)


async def test_broken_connections_to_a_runtime(runtimes: dict[str, Any], seed: int) -> None:
    """Whatever a connection carries, the runtime serves the next one, its rows are those of no session, and nothing leaks."""
    served = runtimes["pages of 1"]
    hello = runtime_pb2.SchedulerHello(protocol_version=1, scheduler_epoch=seed, session_no=1)
    first = runtime_pb2.ExecuteRequest(hello=hello).SerializeToString()
    second = runtime_pb2.ExecuteRequest(op=forward_pb2.ForwardOp(session_no=1, step=1)).SerializeToString()
    async with MadScheduler(served.address, seed) as mad:
        await mad.reference(mad.sequences[0])
        await mad.close()
        before = served.usage()
        for data in connections("/pagemirror.v1.RuntimeService/Execute", first, second, seed).values():
            await converse(served.address, data)
        async with asyncio.timeout(WAIT_S):
            while (await mad.rows_now()).session_no:
                await asyncio.sleep(0.02)
            await mad.reference(mad.sequences[0])
            await mad.close()
            while served.usage()["fds"] > before["fds"] + 1:
                await asyncio.sleep(0.02)
    served.assert_unharmed()


async def test_broken_connections_to_a_scheduler(scheduler: Any, seed: int) -> None:
    """Whatever a connection carries, requests beside it are exact, and all pages come back."""
    first = generation_pb2.GenerateRequest(prompt=bytes(40), max_tokens=40).SerializeToString()
    async with MadClients(scheduler.address, seed) as mad:
        await mad.fuzz(20)
        before = scheduler.usage()
        broken = connections("/pagemirror.v1.GenerationService/Generate", first, first, seed).values()
        for data in broken:
            await converse(scheduler.address, data)
            await mad.fuzz(3, num_clients=1)
        info = await mad.until_idle()
        assert info.free_pages + info.cached_pages == info.num_pages
        async with asyncio.timeout(WAIT_S):
            while scheduler.usage()["fds"] > before["fds"] + 1:
                await asyncio.sleep(0.02)
    scheduler.assert_unharmed()


async def test_many_connections(scheduler: Any, seed: int) -> None:
    """Connections that are opened and say nothing leave room for those that speak, or are closed in time."""
    host, port = scheduler.address.rsplit(":", 1)
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(NUM_SILENT)]
    async with MadClients(scheduler.address, seed) as mad:
        await mad.fuzz(5)
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    scheduler.assert_unharmed()
