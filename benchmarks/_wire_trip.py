"""The round trip of a step between two processes, see `bench_wire.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import grpc
from _wire_peers import METHOD
from _wire_session import connect, decoding_scheduler, next_outcome, peer

from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.runtime_client import encode

WARM_UP = 20  # steps


async def measure_trip(folder: Path, num_steps: int, num_rows: int) -> dict[str, Any]:
    """Round trips of the same ops through the product and through a bare stream, in microseconds."""
    wake = asyncio.Event()
    result_bytes = 4 * num_rows + 12
    trips: dict[str, list[float]] = {"runtime": [], "echo": []}
    async with peer(folder, "runtime", 0) as runtime, peer(folder, "echo", result_bytes) as echo:
        link = await connect(runtime, 0, wake, 1)
        async with grpc.aio.insecure_channel(echo, options=[("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.stream_stream(METHOD)(wait_for_ready=True)
            scheduler = decoding_scheduler(num_rows, 0, 1)
            num_bytes: list[int] = []

            async def echo_trip(sent: bytes) -> None:
                begin = perf_counter()
                await call.write(sent)
                await call.read()
                trips["echo"].append((perf_counter() - begin) * 1e6)

            async def runtime_trip(op: ForwardOp, sent: bytes) -> StepResult:
                begin = perf_counter()
                link.send(op, sent)
                outcome = await next_outcome(link, wake)
                trips["runtime"].append((perf_counter() - begin) * 1e6)
                return outcome

            for number in range(num_steps):
                op = scheduler.plan()
                assert op is not None
                sent = encode(op)
                num_bytes.append(len(sent))
                if number % 2:
                    await echo_trip(sent)
                outcome = await runtime_trip(op, sent)
                if not number % 2:
                    await echo_trip(sent)
                scheduler.complete(outcome)
                scheduler.take_outputs()
            await call.done_writing()
        await link.close()
    warm = min(WARM_UP, num_steps // 2)
    ours, bare = trips["runtime"][warm:], trips["echo"][warm:]
    return {
        "rows": num_rows,
        "steps": len(ours),
        "op_bytes": median(num_bytes[warm:]),
        "result_bytes": result_bytes,
        "runtime_us": round(median(ours), 1),
        "runtime_p90_us": round(quantiles(ours, n=10)[-1], 1),
        "echo_us": round(median(bare), 1),
        "echo_p90_us": round(quantiles(bare, n=10)[-1], 1),
        "ratio": round(median(ours) / median(bare), 3),
    }
