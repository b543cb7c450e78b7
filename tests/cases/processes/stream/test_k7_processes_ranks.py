"""Case B55: two runtimes that receive the same ops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagemirror.v1 import runtime_pb2
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.errors import QueueWaitError

Continuation = Callable[[Sequence[int], int], list[int]]


async def test_b55_ranks_have_no_clocks(harness: Any, stream: Any, continuation: Continuation) -> None:
    """Each rank times requests out by its own clock, and the ranks wait for each other (sgl-project/sglang#27221)."""
    num_rounds, changed = 200, []

    def change(response: runtime_pb2.ExecuteResponse) -> None:
        """Once, rank 1 says another token than rank 0."""
        if wrong.is_set() and response.WhichOneof("message") == "result" and any(response.result.tokens):
            response.result.tokens = bytes([response.result.tokens[0] ^ 1]) + response.result.tokens[1:]
            changed.append(response.result.step)
            wrong.clear()

    wrong = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(stream.runtime(max_rows=2)) for _ in range(2)]
        # Rank 1 is late by about as much as the deadlines are long.
        relays = [
            stream.Relay(runtimes[0].address),
            stream.Relay(runtimes[1].address, change=change, delay_s=0.003),
        ]
        addresses = [await stack.enter_async_context(relay.listening()) for relay in relays]
        engine = await stack.enter_async_context(stream.engine(",".join(addresses)))

        async def one(number: int) -> str:
            options = SubmitOptions(max_tokens=2 + number % 3, queue_wait_ms=1 + number % 60)
            subscription = engine.submit(f"r{number}", np.array([number, 1], np.int32), options)
            try:
                tokens = await stream.collect(subscription)
            except QueueWaitError:
                return "expired"
            assert tokens == continuation([number, 1], 2 + number % 3)
            return "served"

        ends: list[str] = []
        for first in range(0, num_rounds, 10):
            ends += await asyncio.gather(*(one(number) for number in range(first, first + 10)))
        assert len(ends) == num_rounds
        assert set(ends) == {"served", "expired"}, "deadlines fell before and after"
        assert engine.connection.session_no == 1, engine.connection.trouble
        assert relays[0].ops == relays[1].ops
        assert len(relays[0].ops) > 100

        wrong.set()
        subscription = engine.submit("last", np.array([7, 8, 9], np.int32), SubmitOptions(max_tokens=12))
        assert await stream.collect(subscription) == continuation([7, 8, 9], 12)
        assert len(changed) == 1
        assert engine.connection.session_no == 2, "both ranks began again, once"
        await engine.wait_quiet()
        assert relays[0].ops == relays[1].ops
