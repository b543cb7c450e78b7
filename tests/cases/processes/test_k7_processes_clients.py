"""Cases B58, B61 and B62: clients that vanish, do not read, or read slowly."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.client import Client, RpcFailedError

Continuation = Callable[[Sequence[int], int], list[int]]


def finished(pair: Any) -> dict[str, float]:
    """How many requests have ended in each way since the scheduler's start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{pair.metrics_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pattern = re.compile(r'pagemirror_requests_finished_total\{.*reason="(\w+)"\} (\S+)')
    counts = {match[1]: float(match[2]) for line in lines if (match := pattern.fullmatch(line))}
    return {reason: count for reason, count in counts.items() if count}


async def at_baseline(harness: Any, pair: Any, client: Client, before: tuple[int, int]) -> None:
    """Wait until no request is alive, every page is free or cached, and no descriptor and no crowd of threads is left over."""
    await harness.until(lambda: harness.idle(client))
    info = (await client.info()).raw
    assert info.free_pages + info.cached_pages == pair.num_pages
    # gRPC keeps a few threads more after a busy time; one a client would be many.
    limits = (before[0], before[1] + 4)
    await harness.until(lambda: all(now <= most for now, most in zip(pair.scheduler.num_handles(), limits, strict=True)))


async def test_b58_request_ends_with_its_client(harness: Any, pair: Any, spawner: Any, continuation: Continuation) -> None:
    """The client is gone and its request lives on (sgl-project/sglang#36333, InternLM/lmdeploy#1788, mini-sglang#15)."""
    rounds, at_once = 300, 30
    async with Client(pair.scheduler.address) as client:
        await harness.generate(client, [1], 1)
        before, ended = pair.scheduler.num_handles(), await asyncio.to_thread(finished, pair)
        turns, unread = iter(range(rounds)), pair.scheduler.log().count("client_reads_too_slowly")

        async def cancel_after_three() -> None:
            for turn in turns:
                tokens: list[int] = []
                pieces = client.generate([turn, 1, 2], max_tokens=1000)
                async for piece in pieces:
                    tokens += piece.tokens
                    if len(tokens) >= 3:
                        break
                await pieces.aclose()
                assert tokens == continuation([turn, 1, 2], len(tokens))

        async with asyncio.timeout(harness.limit_s):
            await asyncio.gather(*(cancel_after_three() for _ in range(at_once)))
        options = ("--tokens", "1,2,3", "--max-tokens", "4000", "--request-id", "killed")
        killed = spawner.start("scheduler_service.cli", "generate", "--target", pair.scheduler.address, *options)
        assert killed.popen.stdout is not None
        assert await asyncio.to_thread(killed.popen.stdout.read, 3) == b"20 "
        os.kill(killed.pid, signal.SIGKILL)
        await killed.end()
        await at_baseline(harness, pair, client, before)
        with pytest.raises(RpcFailedError) as caught:
            await client.state("killed")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        now = await asyncio.to_thread(finished, pair)
        counts = {reason: count - ended.get(reason, 0) for reason, count in now.items()}
        assert sum(counts.values()) == rounds + 1, "exactly one end each"
        # Not because nobody reads, which ends requests as well, but later.
        unread = pair.scheduler.log().count("client_reads_too_slowly") - unread
        assert counts["abort"] - unread > rounds / 2, "they went on without their clients"
        steps = (await client.info()).raw.num_steps
        assert await harness.generate(client, [1, 2, 3], 3) == [20, 104, 629]
        assert (await client.info()).raw.num_steps <= steps + 5, "nothing else is being computed"


async def test_b61_unread_streams_block_nothing(harness: Any, pair: Any) -> None:
    """A handler waits for ever to yield to a caller that has cancelled (grpc/grpc#22874)."""
    async with Client(pair.scheduler.address) as client:
        await harness.generate(client, [1], 1)
        before = pair.scheduler.num_handles()
        requests = [generation_pb2.GenerateRequest(prompt=harness.i32(n, 5), max_tokens=1500) for n in range(128)]
        calls = [client.stub.Generate(request) for request in requests]
        for call in calls:
            await asyncio.wait_for(call.initial_metadata(), harness.limit_s)  # it is being served, and nothing is read
        assert await harness.health(pair.scheduler.address) == "SERVING"
        for call in calls:
            call.cancel()
        assert await harness.health(pair.scheduler.address) == "SERVING"
        await at_baseline(harness, pair, client, before)


async def test_b62_slow_reader(harness: Any, pair: Any, continuation: Continuation) -> None:
    """A client that reads slowly makes the server's memory grow (grpc/grpc#11966, grpc/grpc#37715)."""
    count, num_normal = 2000, 9
    assert count > pair.max_unread
    # No more than a kilobyte of output is taken off the server's hands before somebody reads it.
    options = [("grpc.enable_http_proxy", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with Client(pair.scheduler.address) as client:

        async def normal_clients() -> int:
            steps = (await client.info()).raw.num_steps
            prompts = [[number, 3, 5] for number in range(num_normal)]
            outputs = await asyncio.gather(*(harness.generate(client, prompt, 100) for prompt in prompts))
            assert outputs == [continuation(prompt, 100) for prompt in prompts]
            return (await client.info()).raw.num_steps - steps

        async def is_over() -> bool:
            try:
                await client.state("slow")
            except RpcFailedError as error:
                return error.code is grpc.StatusCode.NOT_FOUND
            return False

        alone = await normal_clients()
        async with grpc.aio.insecure_channel(pair.scheduler.address, options=options) as channel:
            request = generation_pb2.GenerateRequest(request_id="slow", prompt=harness.i32(1, 2, 3), max_tokens=count)
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            tokens: list[int] = []

            async def read() -> None:
                response = await asyncio.wait_for(call.read(), harness.limit_s)
                assert isinstance(response, generation_pb2.GenerateResponse), response
                tokens.extend(np.frombuffer(response.tokens, "<i4").tolist())

            async def read_all() -> None:
                while len(tokens) < count:
                    await read()

            await read()
            before, memory = pair.scheduler.num_handles(), pair.scheduler.resident_mib()
            beside = await normal_clients()
            assert beside <= 2 * alone, "the others are slowed down"
            await read()
            await harness.until(is_over)  # and its pages are free, although nobody reads
            assert pair.scheduler.resident_mib() - memory < 50
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(pair.max_unread) in str(caught.value.details())
            assert tokens == continuation([1, 2, 3], len(tokens))
            await at_baseline(harness, pair, client, before)
