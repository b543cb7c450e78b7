"""How long a device waits between its steps, see `bench_wire.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _wire_session import connect, decoding_scheduler, next_outcome, peer

DEPTHS = (0, 1, 2)
WARM_UP = 5  # steps


async def measure_bubble(folder: Path, step_ms: float, seconds: float, rounds: int, num_rows: int) -> list[dict[str, Any]]:
    """Steps per second at each overlap depth, as a part of what the device could do."""
    found: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    session_no = 0
    async with peer(folder, "runtime", step_ms) as runtime:
        for _ in range(rounds):
            for depth, rates in found.items():
                session_no += 1
                num_steps = WARM_UP + max(5, round(seconds * 1000 / step_ms))
                rates.append(await steps_per_second(runtime, depth, session_no, num_steps, num_rows))
    ideal = 1000 / step_ms
    return [
        {
            "step_ms": step_ms,
            "overlap": depth,
            "steps_per_second": round(median(rates), 1),
            "of_ideal": round(median(rates) / ideal, 4),
            "bubble_us": round((1 / median(rates) - step_ms / 1000) * 1e6),
        }
        for depth, rates in found.items()
    ]


async def steps_per_second(target: str, depth: int, session_no: int, num_steps: int, num_rows: int) -> float:
    """One session: all rows decode, planned as far ahead as the depth allows."""
    wake = asyncio.Event()
    link = await connect(target, depth, wake, session_no)
    scheduler = decoding_scheduler(num_rows, depth, session_no)
    num_answered, begin = 0, 0.0
    while num_answered < num_steps:
        while scheduler.num_in_flight <= depth and (op := scheduler.plan()) is not None:
            link.send(op)
        scheduler.complete(await next_outcome(link, wake))
        scheduler.take_outputs()
        num_answered += 1
        if num_answered == WARM_UP:
            begin = perf_counter()
    rate = (num_steps - WARM_UP) / (perf_counter() - begin)
    await link.close()
    return rate
