"""`pagemirror up` when its runtime dies: it is started again, and clients see a pause and the right tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.client import Client

Continuation = Callable[[list[int], int], list[int]]

pytestmark = pytest.mark.timeout(300)  # processes are started several times, perhaps beside others

NUM_STREAMS = 20
NUM_TOKENS = 500


class Streams:
    """Generations that run at once, and what each has returned so far."""

    def __init__(self, client: Client, num_tokens: int = NUM_TOKENS) -> None:
        self.prompts = [[7, 8, number, 9] for number in range(NUM_STREAMS)]
        self.outputs: list[list[int]] = [[] for _ in self.prompts]
        self._client, self._num_tokens = client, num_tokens
        self.endings: list[str] = []

    async def run(self, number: int) -> None:
        async for piece in self._client.generate(self.prompts[number], max_tokens=self._num_tokens):
            self.outputs[number] += piece.tokens
            if piece.ending:
                self.endings.append(piece.ending.reason)

    def longest(self) -> int:
        return max(map(len, self.outputs))


async def test_twenty_streams_survive_the_death_of_the_runtime(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """Two SIGKILLs of the runtime while 20 generations stream: all end as if nothing had been, and rows agree afterwards."""
    command = ["up", "--model", "fingerprint", "--port", "0"]
    async with commands.serving(command, child_env, short_tmp / "log") as served, Client(served.target) as client:
        streams = Streams(client)
        killed: list[int] = []

        async def kill_twice() -> None:
            for after in (10, 60):
                # Its successor serves, and tokens come from it.
                await commands.until(lambda: served.errors.read_text().count("pagemirror runtime ready") > len(killed))
                await commands.until(lambda after=after: streams.longest() >= after)
                killed.append(served.children()["runtime"])
                os.kill(killed[-1], signal.SIGKILL)

        async with asyncio.timeout(4 * commands.LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(kill_twice())
            for number in range(NUM_STREAMS):
                tasks.create_task(streams.run(number))
        assert streams.outputs == [continuation(prompt, NUM_TOKENS) for prompt in streams.prompts]
        assert streams.endings == ["length"] * NUM_STREAMS
        assert killed[0] != killed[1]
        info = (await client.info()).raw
        assert (info.num_waiting, info.num_running, info.num_retracted) == (0, 0, 0)
        assert info.free_pages + info.cached_pages == info.num_pages
        assert (await client.rows()).rows == []
        log = served.errors.read_text()
        assert log.count("pagemirror up: the runtime ended by signal SIGKILL; it is started again") == 2
        served.process.send_signal(signal.SIGTERM)
        assert await served.end() == 0, served.errors.read_text()


async def test_runtime_that_dies_during_a_drain_is_started_again(
    commands: Any, continuation: Continuation, child_env: dict[str, str], short_tmp: Path
) -> None:
    """SIGTERM, then the runtime is killed: the request that was alive ends whole, and the exit status is 0."""
    command = ["up", "--model", "fingerprint", "--port", "0", "--grace", "200"]
    async with commands.serving(command, child_env, short_tmp / "log") as served:
        async with Client(served.target) as client:
            tokens: list[int] = []
            async for piece in client.generate([1, 2, 3], max_tokens=600):
                if not tokens and piece.tokens:
                    served.process.send_signal(signal.SIGTERM)
                    await commands.until(lambda: "draining" in served.errors.read_text())
                    os.kill(served.children()["runtime"], signal.SIGKILL)
                tokens += piece.tokens
        assert tokens == continuation([1, 2, 3], 600)
        assert await served.end() == 0, served.errors.read_text()


async def test_runtime_that_never_comes_back_ends_the_command(
    commands: Any, child_env: dict[str, str], short_tmp: Path
) -> None:
    """Killed five times before it served again, it is given up: both end, with the reason and a status other than 0."""
    env = child_env | {"TMPDIR": str(short_tmp)}
    async with commands.serving(["up", "--model", "fingerprint", "--port", "0"], env, short_tmp / "log") as served:
        killed: set[int] = set()
        async with asyncio.timeout(2 * commands.LIMIT_S):
            while served.process.returncode is None:
                pid = served.children().get("runtime")
                if pid is not None and pid not in killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
        assert await served.end() == 1
        log = served.errors.read_text()
        assert len(killed) == 5
        assert log.count("it is started again") == 4
        assert "pagemirror up: the runtime ended by signal SIGKILL\n" in log
        assert [path for path in short_tmp.iterdir() if path.name != "log"] == []
