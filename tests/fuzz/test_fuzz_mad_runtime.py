"""A scheduler whose runtime answers with changed bytes: it starts over, and serves rightly once the runtime does."""

from __future__ import annotations

import asyncio
from typing import Any

from fuzz_generation import MadClients, continuation
from fuzz_mad_runtime import MadRuntime

WAIT_S = 100.0
SHARE = 1 / 25
"""Of the number of messages: after each changed answer the scheduler starts over."""
OUTCOMES = {"OK", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
"""How a request may end while its runtime is mad."""


async def test_changed_answers(spawner: Any, num_ops: int, seed: int) -> None:
    """No answer ends the scheduler or keeps a page; each request ends, and a clean runtime is all it takes for exact tokens."""
    async with MadRuntime(seed) as runtime:
        options = ("--heartbeat-timeout", "2", "--step-timeout", "1", "--log-level", "error", "--check")
        served = await asyncio.to_thread(
            lambda: spawner.ready(
                *spawner.start(
                    *("-m", "scheduler_service.cli", "scheduler", "--runtime", runtime.address, "--listen", "127.0.0.1:0"),
                    *options,
                )
            )
        )
        async with MadClients(served.address, seed) as clients:
            runtime.rate = 0.2
            number = 0
            while runtime.counts["changed"] < num_ops * SHARE:
                number += 1
                ended = await asyncio.gather(*(clients.run([number, other], 12) for other in range(4)))
                assert {status for status, _ in ended} <= OUTCOMES
                assert served.process.poll() is None, served.log.read_text()[-3000:]
            runtime.rate = 0.0
            async with asyncio.timeout(WAIT_S):
                while await clients.run([7], 12) != ("OK", continuation([7], 12)):
                    await asyncio.sleep(0.1)  # what was wrong before may still be under way
            for other in range(4):
                assert await clients.run([other], 12) == ("OK", continuation([other], 12))
            info = await clients.until_idle()
    assert info.free_pages + info.cached_pages == info.num_pages
    assert served.process.poll() is None, served.log.read_text()[-3000:]
