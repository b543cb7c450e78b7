"""Clients that read slowly, or not at all: what is kept for them is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service import call_gate
from scheduler_service.columns import int32_from_bytes, int32_to_bytes

Code = grpc.StatusCode
Narrow = Callable[[str], aio.Channel]


def ask(channel: aio.Channel, request_id: str, max_tokens: int) -> Any:
    """Begin a request whose tokens nobody reads yet."""
    request = generation_pb2.GenerateRequest(request_id=request_id, prompt=int32_to_bytes([1, 2, 3]), max_tokens=max_tokens)
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)


async def read_all(call: Any) -> tuple[list[int], grpc.StatusCode, str]:
    """What a client finds that reads late: tokens, status, message."""
    tokens: list[int] = []
    try:
        while (response := await call.read()) is not aio.EOF:
            tokens += int32_from_bytes(response.tokens, "tokens").tolist()
    except aio.AioRpcError as error:
        return tokens, error.code(), error.details() or ""
    return tokens, await call.code(), ""


async def test_slow_reader_beside_fast_ones(
    serving: Callable[..., Any], narrow: Narrow, until: Callable[..., Any], continuation: Callable[..., list[int]]
) -> None:
    """Fast readers get everything; the slow one's request ends when too much is unread, its pages are free at once, and when it
    reads it finds a right beginning and then the reason.
    """
    async with serving(max_unread_tokens=50) as served, served.client() as client:
        call = ask(narrow(served.front.address), "slow", 450)
        await call.read()
        fast = [asyncio.ensure_future(anext_all(client, [5, 6, n], 200)) for n in range(4)]
        await until(lambda: "slow" not in served.engine.core.requests)
        unread = served.engine.metrics.calls_refused.labels("unread")._value.get()
        assert await asyncio.gather(*fast) == [continuation([5, 6, n], 200) for n in range(4)]
        assert served.engine.core.stats().private == 0
        assert unread == 1
        tokens, code, details = await asyncio.wait_for(read_all(call), 30)
        assert code is Code.RESOURCE_EXHAUSTED
        assert details == "request 'slow': its output was left unread beyond 50 values (--max-unread-tokens)"
        assert 0 < len(tokens) < 100
        assert tokens == continuation([1, 2, 3], 450)[: len(tokens)]


async def anext_all(client: Any, prompt: list[int], count: int) -> list[int]:
    """All tokens of a request."""
    return sum([piece.tokens async for piece in client.generate(prompt, max_tokens=count)], [])


async def test_late_reader_within_the_limit_gets_everything(
    serving: Callable[..., Any], narrow: Narrow, until: Callable[..., Any], continuation: Callable[..., list[int]]
) -> None:
    """A client that reads after its request has ended finds every token and the account, as long as they were few enough."""
    async with serving(max_unread_tokens=450) as served:
        call = ask(narrow(served.front.address), "late", 450)
        await call.read()
        await until(lambda: "late" not in served.engine.core.requests)
        assert await asyncio.wait_for(read_all(call), 30) == (continuation([1, 2, 3], 450), Code.OK, "")


@pytest.mark.parametrize("max_tokens", [20, 450], ids=["request over", "request running"])
async def test_reader_that_reads_nothing_is_cut_off(
    serving: Callable[..., Any], narrow: Narrow, until: Callable[..., Any], max_tokens: int
) -> None:
    """After the time to write has passed its call ends, whether or not its request has, and it is told so past what it never
    read; nothing of it is left, and others are served meanwhile.
    """
    async with serving(write_timeout=0.4, max_unread_tokens=100_000) as served, served.client() as client:
        call = ask(narrow(served.front.address), "mute", max_tokens)
        await call.read()
        await until(lambda: served.front.gate.num_open == 1)
        await until(lambda: served.front.gate.num_open == 0)
        assert served.engine.core.requests == {}
        tokens, code, details = await asyncio.wait_for(read_all(call), 30)
        assert (code, details) == (Code.RESOURCE_EXHAUSTED, "nothing was read for 0.4 s (--write-timeout)")
        assert len(tokens) < max_tokens
        assert len(await anext_all(client, [9], 5)) == 5


async def test_without_a_way_to_cut_a_call_off_its_request_ends_all_the_same(
    serving: Callable[..., Any], narrow: Narrow, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a version of gRPC have no such way, what is held for the call is freed; its peer learns it at the server's end."""
    monkeypatch.setattr(call_gate.cygrpc, "peer_identity_key", None)
    async with serving(write_timeout=0.4) as served:
        call = ask(narrow(served.front.address), "mute", 450)
        await call.read()
        await until(lambda: served.front.gate.num_open == 1)
        await until(lambda: served.front.gate.num_open == 0 and not served.engine.core.requests)
        assert not call.done()
    assert (await asyncio.wait_for(read_all(call), 30))[1] is Code.UNAVAILABLE


async def test_reader_that_is_slow_but_reads_is_not_cut_off(
    serving: Callable[..., Any], narrow: Narrow, continuation: Callable[..., list[int]]
) -> None:
    """Each message has the whole time: a client that takes one every now and then, and needs many times that, gets all."""
    async with serving(write_timeout=1.0) as served:
        call = ask(narrow(served.front.address), "slow", 60)
        tokens: list[int] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (response := await call.read()) is not aio.EOF:
            tokens += int32_from_bytes(response.tokens, "tokens").tolist()
            if loop.time() - began < 2.5:
                await asyncio.sleep(0.1)
        assert tokens == continuation([1, 2, 3], 60)
