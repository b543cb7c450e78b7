"""A client that vanishes, at whatever point of its request's life: the request ends, its pages come back, others go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.client import Client, RpcFailedError
from scheduler_service.columns import int32_to_bytes

Continuation = Callable[[list[int], int], list[int]]

pytestmark = pytest.mark.timeout(300)  # processes are started several times, perhaps beside others

NUM_PAGES = 40
SLOW = "slow 0.01 300"


@contextlib.asynccontextmanager
async def vanishing(target: str, prompt: list[int], max_tokens: int, priority: int = 1) -> AsyncIterator[Any]:
    """A stream that is not read, on a connection of its own, which is closed without a word at the end."""
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = generation_pb2.GenerateRequest(
            request_id="gone", prompt=int32_to_bytes(prompt), max_tokens=max_tokens, priority=priority
        )
        yield generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


async def test_client_vanishes_at_every_point(pair_of: Any, continuation: Continuation, commands: Any) -> None:
    """Waiting, prefilling, decoding, retracted, over but not read: each leaves nothing behind, and its neighbour is exact."""
    runtime = ["--page-size", "4", "--num-pages", str(NUM_PAGES), "--max-pages-per-row", "40", "--max-rows", "2"]
    async with pair_of(runtime, ["--chunk-size", "4"]) as pair, Client(pair.target) as client:

        async def state() -> str:
            try:
                info = await client.state("gone")
            except RpcFailedError as error:
                assert error.code is grpc.StatusCode.NOT_FOUND
                return "unknown"
            return generation_pb2.RequestState.Name(info.state).removeprefix("REQUEST_STATE_")

        async def vanish_when(wanted: str, prompt: list[int], max_tokens: int) -> None:
            """Ask until it is so, then close the connection; the request is over soon after."""
            async with vanishing(pair.target, prompt, max_tokens) as call:
                if wanted == "unknown":
                    await call.read()  # its id: it was accepted

                async def is_there() -> bool:
                    return await state() == wanted

                await commands.until(is_there)

            async def is_gone() -> bool:
                return await state() == "unknown"

            await commands.until(is_gone)

        async def stream(prompt: list[int], max_tokens: int, started: asyncio.Event | None = None) -> None:
            tokens: list[int] = []
            async for piece in client.generate(prompt, max_tokens=max_tokens):
                tokens += piece.tokens
                if tokens and started is not None:
                    started.set()
            assert tokens == continuation(prompt, max_tokens)

        async def beside(wanted: str, prompt: list[int], max_tokens: int, neighbours: list[int]) -> None:
            """The same while others stream so many tokens."""
            started = [asyncio.Event() for _ in neighbours]
            async with asyncio.timeout(3 * commands.LIMIT_S), asyncio.TaskGroup() as tasks:
                for number, (count, event) in enumerate(zip(neighbours, started, strict=True)):
                    tasks.create_task(stream([8, number], count, event))
                for event in started:
                    await event.wait()
                await vanish_when(wanted, prompt, max_tokens)

        assert pair.runtime.order(SLOW)
        await beside("SUBMITTED", [1, 2, 3], 20, [60, 60])
        await beside("PREFILLING", list(range(100)), 20, [60])
        await beside("DECODING", [1, 2, 3], 140, [60])
        # Two thirds of the pool each: the one that is later in order has to give way.
        await beside("RETRACTED", [1, 2, 3], 140, [140])
        await beside("unknown", [1, 2, 3], 3, [60])

        info = (await client.info()).raw
        assert (info.num_waiting, info.num_running, info.num_retracted) == (0, 0, 0)
        assert info.free_pages + info.cached_pages == NUM_PAGES
        assert (await client.rows()).rows == []
        assert await client.reset_prefix_cache() == info.cached_pages
