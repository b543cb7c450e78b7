"""Requests survive what happens to the runtime and to the line to it: clients see a pause, and the right tokens."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.client import Client, RpcFailedError

Continuation = Callable[[list[int], int], list[int]]

pytestmark = pytest.mark.timeout(300)  # processes are started several times, perhaps beside others

POOL = ["--page-size", "4", "--num-pages", "120", "--max-pages-per-row", "40"]


async def status_of(target: str) -> int:
    """What the health service says."""
    async with grpc.aio.insecure_channel(target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        return int(answer.status)


async def test_faults_of_runtime_and_line_are_pauses(
    pair_of: Any, load_on: Any, continuation: Continuation, commands: Any
) -> None:
    """Failed and slow steps, cuts within a message, a stopped and a killed runtime are pauses; a new runtime has no cache."""
    scheduler = ["--heartbeat-timeout", "1", "--chunk-size", "8", "--overlap-depth", "2"]
    async with pair_of(POOL, scheduler) as pair:
        load = load_on(pair.target)

        def num_sessions() -> int:
            return len(re.findall("session_started", pair.scheduler.log.read_text()))

        async def cached(client: Client) -> int:
            """Tokens of a prompt of 17 that were found in the cache."""
            tokens: list[int] = []
            found = -1
            async for piece in client.generate(list(range(100, 117)), max_tokens=5):
                tokens += piece.tokens
                found = piece.ending.cached_tokens if piece.ending else found
            assert tokens == continuation(list(range(100, 117)), 5)
            return found

        async def go_on(after: int | None = None) -> None:
            """A new session has begun, where one is awaited, and requests end in it."""
            if after is not None:
                await commands.until(lambda: num_sessions() > after)
            finished = load.num_finished
            await commands.until(lambda: load.num_finished >= finished + 3)

        async def is_not_serving() -> bool:
            return await status_of(pair.target) == health_pb2.HealthCheckResponse.NOT_SERVING

        async with load.running():
            await go_on()
            for _ in range(2):
                before = num_sessions()
                assert pair.runtime.order("fail")
                await go_on(before)
            for num_bytes in (1, 50, 1500):
                before = num_sessions()
                pair.link.cut_after(num_bytes)
                await go_on(before)
            assert pair.runtime.order("slow 0.05 0.5")
            await go_on()
            pair.runtime.process.send_signal(signal.SIGSTOP)
            await commands.until(is_not_serving)
            assert "no sign of life" in pair.scheduler.log.read_text()
            before = num_sessions()
            pair.runtime.process.send_signal(signal.SIGCONT)
            await go_on(before)
            before = num_sessions()
            assert pair.runtime.kill()
            await go_on(before)
        assert pair.runtime.read_log("violation:") == []
        async with Client(pair.target) as client:
            info = (await client.info()).raw
            assert (info.num_waiting, info.num_running, info.num_retracted) == (0, 0, 0)
            assert info.free_pages + info.cached_pages == 120

            async def is_cached() -> bool:
                return await cached(client) == 16

            await commands.until(is_cached)
            before = num_sessions()
            assert pair.runtime.kill()
            await commands.until(lambda: num_sessions() > before)
            assert await cached(client) == 0  # its successor's memory is empty
            await commands.until(is_cached)


async def test_next_scheduler_takes_over_from_a_killed_one(
    pair_of: Any, continuation: Continuation, commands: Any, child_env: dict[str, str], short_tmp: Path
) -> None:
    """A second scheduler waits while the first one serves; when that is killed, its client is told, the second one serves."""
    async with pair_of(POOL, []) as pair:
        second = ["scheduler", "--runtime", f"unix:{short_tmp}/r.sock", "--listen", f"unix:{short_tmp}/2.sock", "--check"]
        waiting = asyncio.create_task(_serve_until_read(commands, second, child_env, short_tmp / "second-log", continuation))
        tokens: list[int] = []
        async with Client(pair.target) as client:
            async for piece in client.generate([1, 2, 3], max_tokens=100):
                tokens += piece.tokens
            await commands.until(lambda: "is alive" in _text(short_tmp / "second-log"))
            try:
                async for piece in client.generate([1, 2, 3], max_tokens=150):
                    if piece.tokens and pair.scheduler.process.returncode is None:
                        assert pair.scheduler.kill(for_good=True)
            except RpcFailedError as error:
                assert error.code is grpc.StatusCode.UNAVAILABLE
        assert tokens == continuation([1, 2, 3], 100)
        await waiting


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _serve_until_read(
    commands: Any, command: list[str], env: dict[str, str], log: Path, continuation: Continuation
) -> None:
    async with commands.serving(command, env, log) as served, Client(served.target) as client:
        tokens: list[int] = []
        async for piece in client.generate([1, 2, 3], max_tokens=140):
            tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 140)
        assert (await client.rows()).rows == []
