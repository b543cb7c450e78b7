"""How the two processes end: signals, drains, the death of one of them, and a runtime that is started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler_service.client import Client, Piece, RpcFailedError

Continuation = Callable[[list[int], int], list[int]]


async def append_rest(pieces: AsyncIterator[Piece], tokens: list[int]) -> None:
    """Append what is still to come."""
    async for piece in pieces:
        tokens += piece.tokens


async def test_sigterm_drains_and_a_second_one_does_not_wait(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """After SIGTERM new requests are refused while a live one goes on; after another its stream ends with UNAVAILABLE."""
    async with commands.serving(
        commands.up("--model", "fingerprint", "--max-pages-per-row", "4096"), child_env, short_tmp / "log"
    ) as served:
        children = served.children()
        async with Client(served.target) as client, Client(served.target) as other:
            tokens: list[int] = []
            pieces = client.generate([1, 2, 3], max_tokens=60_000)
            async for piece in pieces:
                tokens += piece.tokens
                if piece.tokens:
                    break
            served.process.send_signal(signal.SIGTERM)

            async def is_draining() -> bool:
                try:
                    async for _ in other.generate([4], max_tokens=1):
                        pass
                except RpcFailedError as error:
                    assert error.code is grpc.StatusCode.UNAVAILABLE
                    return "shutting down" in error.details
                return False

            await commands.until(is_draining)
            async for piece in pieces:
                tokens += piece.tokens
                if piece.tokens:
                    break
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(RpcFailedError) as caught:
                await append_rest(pieces, tokens)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert tokens == continuation([1, 2, 3], len(tokens))
        assert await served.end() == 0, served.errors.read_text()
        assert not any(map(commands.is_running, children.values()))


async def test_drain_waits_for_the_last_request(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """A request that runs at SIGTERM is served to its end, and the exit status is 0."""
    async with commands.serving(commands.up("--model", "fingerprint"), child_env, short_tmp / "log") as served:
        async with Client(served.target) as client:
            tokens: list[int] = []
            async for piece in client.generate([1, 2, 3], max_tokens=600):
                if not tokens and piece.tokens:
                    served.process.send_signal(signal.SIGTERM)
                tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 600)
        assert await served.end() == 0, served.errors.read_text()


async def test_when_the_scheduler_dies_the_runtime_is_ended(commands: Any, child_env: dict[str, str], short_tmp: Path) -> None:
    """The scheduler's death ends both, with a message and a status other than 0, and leaves no file behind."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    async with commands.serving(commands.up("--model", "fingerprint"), env, short_tmp / "log") as served:
        children = served.children()
        os.kill(children["scheduler"], signal.SIGKILL)
        assert await served.end() == 1
        assert "pagemirror up: the scheduler ended by signal SIGKILL" in served.errors.read_text()
        assert not any(map(commands.is_running, children.values()))
        assert [path for path in short_tmp.iterdir() if path.name != "log"] == []


async def test_children_do_not_outlive_a_killed_parent(commands: Any, child_env: dict[str, str], short_tmp: Path) -> None:
    """Even when `up` itself is killed, neither process stays."""
    env = child_env | {"TMPDIR": str(short_tmp)}  # what a killed process leaves behind goes with the test
    async with commands.serving(commands.up("--model", "fingerprint"), env, short_tmp / "log") as served:
        children = served.children()
        served.process.kill()
        await commands.until(lambda: not any(map(commands.is_running, children.values())))


async def test_runtime_that_is_killed_and_started_again_is_a_pause(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """Two commands instead of one: the runtime is killed in the middle of a stream, comes back, and no token is wrong."""
    address = f"unix:{short_tmp}/r.sock"
    runtime = ["runtime", "--listen", address, "--model", "fingerprint", "--max-pages-per-row", "1024"]
    runtime_ready = re.compile(r"pagemirror runtime ready on (\S+)")
    scheduler = ["scheduler", "--runtime", address, "--listen", "127.0.0.1:0", "--heartbeat-timeout", "30"]
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(commands.serving(runtime, child_env, short_tmp / "runtime-log", runtime_ready))
        served = await stack.enter_async_context(commands.serving(scheduler, child_env, short_tmp / "log"))
        client = await stack.enter_async_context(Client(served.target))
        tokens: list[int] = []
        async for piece in client.generate([1, 2, 3], max_tokens=2500):
            if not tokens and piece.tokens:
                first.process.kill()
                await first.process.wait()
                await stack.enter_async_context(
                    commands.serving(runtime, child_env, short_tmp / "runtime-log-2", runtime_ready)
                )
            tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 2500)
        assert "session_lost" in served.errors.read_text()
