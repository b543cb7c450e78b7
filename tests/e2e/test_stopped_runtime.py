"""A runtime that is stopped in the middle of a step, as processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from scheduler_service.client import Client

POOL = ["--page-size", "4", "--num-pages", "120", "--max-pages-per-row", "40"]


async def test_health_of_a_stopped_runtime_and_of_one_that_goes_on(
    pair_of: Any, continuation: Callable[[list[int], int], list[int]]
) -> None:
    """With a step awaited a stopped runtime is NOT_SERVING long before its heartbeats are missed, and SERVING as it goes on."""
    async with pair_of(POOL, ["--stuck-timeout", "0.4", "--heartbeat-timeout", "60"]) as pair, Client(pair.target) as client:
        health = client.watch_health()
        async with asyncio.timeout(60):
            assert await anext(health) is True
            stream = client.generate([1, 2, 3], max_tokens=150)
            tokens = (await anext(stream)).tokens
            pair.runtime.process.send_signal(signal.SIGSTOP)
            assert await anext(health) is False
            pair.runtime.process.send_signal(signal.SIGCONT)
            assert await anext(health) is True
            tokens += sum([piece.tokens async for piece in stream], [])
            assert tokens == continuation([1, 2, 3], 150)
            await health.aclose()
