"""Two ranks as processes behind one scheduler process: one of them is killed, and comes back with an empty memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from scheduler_service.client import Client

Continuation = Callable[[list[int], int], list[int]]

LIMIT_S = 60.0
PROMPTS = [[n, 2 * n + 1, 3] for n in range(4)]
NUM_TOKENS = 300


@contextlib.asynccontextmanager
async def rank_on(
    address: str, rank: int, env: dict[str, str], log: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.Task[bytes]]]:
    """A process for that rank of two, and its readiness line."""
    options = ["--page-size", "4", "--num-pages", "1024", "--rank", str(rank), "--world-size", "2", "--grace-s", "0.2"]
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "runtime_service", "--listen", address, *options,
            env=env, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    assert process.stdout is not None
    ready = asyncio.create_task(process.stdout.readline())
    try:
        yield process, ready
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        ready.cancel()


async def test_rank_is_killed_and_comes_back(
    commands: Any, child_env: dict[str, str], short_tmp: Path, continuation: Continuation
) -> None:
    """Four streams over two ranks: one rank dies and is started again, and all four end with exactly their tokens."""
    addresses = [f"unix:{short_tmp}/{rank}.sock" for rank in range(2)]
    log = short_tmp / "log"
    async with contextlib.AsyncExitStack() as stack:
        _, ready = await stack.enter_async_context(rank_on(addresses[0], 0, child_env, log))
        victim, victim_ready = await stack.enter_async_context(rank_on(addresses[1], 1, child_env, log))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(ready, victim_ready)
        # Listed in the other order: their own word counts.
        options = ["--runtime", f"{addresses[1]},{addresses[0]}", "--listen", f"unix:{short_tmp}/s.sock"]
        command = ["scheduler", *options, "--heartbeat-timeout", "30"]
        served = await stack.enter_async_context(commands.serving(command, child_env, short_tmp / "scheduler-log"))
        client = await stack.enter_async_context(Client(served.target))
        outputs: list[list[int]] = [[] for _ in PROMPTS]

        async def read(number: int) -> None:
            async for piece in client.generate(PROMPTS[number], max_tokens=NUM_TOKENS):
                outputs[number] += piece.tokens

        readers = asyncio.gather(*map(read, range(len(PROMPTS))))
        await commands.until(lambda: all(outputs))
        victim.kill()
        await stack.enter_async_context(rank_on(addresses[1], 1, child_env, log))
        async with asyncio.timeout(LIMIT_S):
            await readers
        assert outputs == [continuation(prompt, NUM_TOKENS) for prompt in PROMPTS]
        assert (await client.info()).raw.num_ranks == 2
        status, out, _ = await commands.run(child_env, "rows", "--target", served.target, "--json")
        assert (status, json.loads(out)["rows"]) == (0, [])
    assert f"rank 1: {addresses[1]}" in (short_tmp / "scheduler-log").read_text()
