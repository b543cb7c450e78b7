"""Cases B56, B59, B63 and B64: processes that die, stop, end on demand, or start others."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from scheduler_service.channels import open_channel
from scheduler_service.client import Client, Piece, RpcFailedError
from scheduler_service.engine_loop import SubmitOptions

Continuation = Callable[[Sequence[int], int], list[int]]
Code = grpc.StatusCode


async def until_tokens(pieces: AsyncIterator[Piece], tokens: list[int]) -> None:
    """Append tokens up to and including the first piece that has some."""
    async for piece in pieces:
        tokens += piece.tokens
        if piece.tokens:
            return
    raise AssertionError("the request ended without a token")


async def status_at_the_end(pieces: AsyncIterator[Piece], tokens: list[int]) -> grpc.StatusCode:
    """Append all other tokens; the status that the stream ends with."""
    try:
        async for piece in pieces:
            tokens += piece.tokens
    except RpcFailedError as error:
        return error.code
    return Code.OK


async def test_b56_runtime_restarts(harness: Any, stream: Any, spawner: Any, continuation: Continuation) -> None:
    """The runtime comes back empty and is sent deltas (llm-d/llm-d-router#2853, smg-project/smg#2225)."""
    shape = ("--page-size", "2", "--num-pages", "4096", "--max-pages-per-row", "2048")
    first = spawner.serve(*harness.runtime_command, *shape)
    command = ["runtime_service", "--listen", first.address, *harness.quick, *shape]
    async with stream.engine(first.address, check=False, runtime_timeout=harness.limit_s) as engine:
        shared, epoch = list(range(50, 58)), engine.facts.runtime_epoch

        async def cached(count: int) -> int:
            subscription = engine.submit(f"shared-{count}", np.array(shared, np.int32), SubmitOptions(max_tokens=3))
            assert await stream.collect(subscription) == continuation(shared, 3)
            return int(subscription.request.cached_tokens)

        assert [await cached(0), await cached(1)] == [0, 6]
        a = engine.submit("A", np.array([1, 2, 3], np.int32), SubmitOptions(max_tokens=600))
        tokens = await a.take()
        assert not a.finished
        os.kill(first.pid, signal.SIGKILL)
        assert await first.end() == -signal.SIGKILL
        second = spawner.start(*command)
        await asyncio.to_thread(spawner.ready, second)
        assert [await cached(2), await cached(3)] == [0, 6], "the tree of the old runtime is gone, and a new one grows"
        assert await stream.collect(a, tokens) == continuation([1, 2, 3], 600)
        assert engine.facts.runtime_epoch not in {0, epoch}
    # Even from a scheduler that went on with its deltas, the runtime that came back takes none.
    async with open_channel(second.address) as channel:
        without_hello = stream.Peer(channel)
        delta = stream.op(57, [1, 1, 10], begin=2, computed=4)
        await without_hello.send(op=delta)
        assert await asyncio.wait_for(without_hello.call.code(), harness.limit_s) is Code.INVALID_ARGUMENT
        peer = stream.Peer(channel)
        await peer.hello(session_no=1, epoch=77)
        await peer.send(op=delta)
        assert await peer.answer() == (57, "STEP_OUT_OF_ORDER")
        await peer.reset(2)
        await peer.send(op=stream.op(1, [1, 2, 10], begin=2, computed=4, session_no=2))
        assert (await peer.answer())[1] in {"LEASE_NOT_STARTED", "GAP"}
        assert await peer.rows() == []


async def test_b59_shutdown_with_open_streams(harness: Any, stream: Any, spawner: Any, continuation: Continuation) -> None:
    """A graceful stop waits for a stream that is never read (userver-framework/userver#440, grpc/grpc#37239)."""
    runtime = spawner.serve(*harness.runtime_command, "--max-rows", "8", "--num-pages", "65536", "--max-pages-per-row", "65536")
    options = (*harness.scheduler_command, "--runtime", runtime.address, "--heartbeat-timeout", "30", "--grace")
    # The first signal: requests have the grace to end, and are then ended.
    draining = spawner.serve(*options, "1")
    async with Client(draining.address) as client:
        tokens: list[int] = []
        pieces = client.generate([1, 2, 3], max_tokens=200_000)
        await until_tokens(pieces, tokens)
        draining.popen.send_signal(signal.SIGTERM)
        assert await status_at_the_end(pieces, tokens) is Code.UNAVAILABLE
        assert tokens == continuation([1, 2, 3], len(tokens))
        assert await draining.end() == 0, draining.log()
    # A second signal: at once, also with a stream that its client does not read.
    patient = spawner.serve(*options, "600")
    async with Client(patient.address) as client, Client(patient.address) as other:
        tokens = []
        pieces, unread = client.generate([4, 5], max_tokens=200_000), other.generate([6], max_tokens=200_000)
        await until_tokens(pieces, tokens)
        await anext(unread)
        patient.popen.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                await harness.generate(other, [1], 1)
            except RpcFailedError as error:
                return error.code is Code.UNAVAILABLE
            return False

        await harness.until(refuses)
        assert patient.popen.poll() is None
        patient.popen.send_signal(signal.SIGTERM)
        assert await status_at_the_end(pieces, tokens) is Code.UNAVAILABLE
        assert tokens == continuation([4, 5], len(tokens))
        assert await patient.end() == 0, patient.log()
    # The runtime: one idle op stream, one with an op that is not answered yet.
    async with open_channel(runtime.address) as channel:
        idle = stream.Peer(channel)
        await idle.hello()
        await idle.send(op=stream.op(1, [1], [1, 2, 3]))
        assert await idle.answer() == (1, [20])
        for _ in range(2):
            runtime.popen.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(idle.call.code(), harness.limit_s) is Code.UNAVAILABLE
        assert await runtime.end() == 0, runtime.log()


async def test_b63_alive_but_not_working(harness: Any, spawner: Any, continuation: Continuation) -> None:
    """Health says that the process exists, not that it works (vllm-project/vllm#36451, vllm-project/vllm#39863)."""
    runtime = spawner.serve(*harness.runtime_command, "--num-pages", "8192", "--max-pages-per-row", "8192")
    limits = ("--heartbeat-timeout", "1", "--runtime-timeout", "2")
    scheduler = spawner.serve(*harness.scheduler_command, "--runtime", runtime.address, *limits)

    async def is_serving() -> bool:
        return bool(await harness.health(scheduler.address) == "SERVING")

    async def is_not_serving() -> bool:
        return bool(await harness.health(scheduler.address) == "NOT_SERVING")

    async with Client(scheduler.address) as client:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            await harness.until(is_serving)
            assert await harness.generate(client, [7, 8, 9], 30) == continuation([7, 8, 9], 30)
            tokens: list[int] = []
            pieces = client.generate([1, 2, 3], max_tokens=30_000)
            await until_tokens(pieces, tokens)
            os.kill(runtime.pid, number)
            # After a second of silence; what gRPC notices by itself takes it forty.
            await harness.until(is_not_serving, limit_s=20)
            assert await status_at_the_end(pieces, tokens) is Code.UNAVAILABLE
            assert tokens == continuation([1, 2, 3], len(tokens))
            with pytest.raises(RpcFailedError) as caught:
                await harness.generate(client, [1], 1)
            assert caught.value.code is Code.UNAVAILABLE
            if number == signal.SIGSTOP:
                # What it had read or computed before it stopped belongs to a session that is over.
                os.kill(runtime.pid, signal.SIGCONT)
        assert await is_not_serving()
        assert scheduler.popen.poll() is None


async def test_b64_children_while_grpc_is_up(harness: Any, stream: Any, project_root: Path, continuation: Continuation) -> None:
    """A child that was forked under gRPC's threads hangs on their locks (grpc/grpc#17986, #37259, #13873)."""
    num_children = 200

    def run_children() -> None:
        for number in range(num_children):
            done = subprocess.run(["true"], start_new_session=number % 2 == 0, timeout=harness.limit_s, check=False)
            assert done.returncode == 0

    async with stream.runtime(num_pages=512, max_pages_per_row=128) as runtime, stream.engine(runtime.address) as engine:
        children = asyncio.create_task(asyncio.to_thread(run_children))
        num_streams = 0
        while not children.done() or num_streams < 3:
            prompt = [num_streams % 997, 2, 3]
            subscription = engine.submit(f"r{num_streams}", np.array(prompt, np.int32), SubmitOptions(max_tokens=200))
            assert await stream.collect(subscription) == continuation(prompt, 200)
            num_streams += 1
        await children
        assert engine.connection.session_no == 1, engine.connection.trouble
    # A child that goes on in Python after the fork (`os.fork`, multiprocessing, preexec_fn) runs gRPC's handlers while its
    # threads are in the middle of something, and may abort. Ours are new programs, all of them.
    forking = re.compile(r"\bos\.fork\b|\bmultiprocessing\b|\bpreexec_fn\b|\bforkpty\b|ProcessPoolExecutor")
    sources = [path for package in ("scheduler_service", "runtime_service") for path in (project_root / package).rglob("*.py")]
    assert len(sources) > 50
    assert [str(path) for path in sources if forking.search(path.read_text())] == []
