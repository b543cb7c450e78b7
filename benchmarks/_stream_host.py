"""The product's scheduler with a stopwatch, for `bench_streaming.py`.

    python benchmarks/_stream_host.py RUNTIME

prints its address, then obeys one JSON request a line and answers each with one line, until its stdin ends:

    {"do": "hold", "count": N}                  plan nothing until N requests have come, so that all begin at once
    {"do": "silent", "count": N, "tokens": T}   submit N requests of T tokens inside the process, so that nobody reads their
                                                output; answered when all have ended
    {"do": "take", "rows": N}                   when planning began, and of the steps since then in which N rows decoded:
                                                microseconds from the result before to theirs, and CPU time of the process

Only the core's public `plan` and `complete` are watched: two clock readings a step.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import numpy as np

from scheduler_service import app, event_loop
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine_loop import EngineLoop, SubmitOptions
from scheduler_service.logs import configure_logs
from scheduler_service.settings import load_settings

MAX_UNREAD = 1 << 20


class Stopwatch:
    """When the result of each step came, and of how many decode rows it was."""

    def __init__(self) -> None:
        self._in_flight: dict[tuple[int, int], int] = {}
        self._steps: list[tuple[int, int, int]] = []  # decode rows (0: a step with a prefill), wall ns, CPU ns
        self._began = 0.0

    def watch(self, core: type[Scheduler]) -> None:
        """Put it around the core's two calls."""
        plan, complete = core.plan, core.complete

        def watched_plan(scheduler: Scheduler) -> ForwardOp | None:
            op = plan(scheduler)
            if op is not None:
                self._in_flight[op.session_no, op.step] = 0 if op.num_extend_rows else op.num_rows
            return op

        def watched_complete(scheduler: Scheduler, result: StepResult) -> None:
            rows = self._in_flight.pop((result.session_no, result.step), 0)
            self._steps.append((rows, time.perf_counter_ns(), time.process_time_ns()))
            complete(scheduler, result)

        core.plan, core.complete = watched_plan, watched_complete  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was before."""
        self._steps = []
        self._began = time.perf_counter()

    def take(self, rows: int) -> dict[str, Any]:
        """The steps of so many decode rows that followed one of as many."""
        steps, self._steps = self._steps, []
        pairs = [(a, b) for a, b in itertools.pairwise(steps) if a[0] == b[0] == rows]
        return {
            "began": self._began,  # of a clock that all processes share
            "step_us": [(b[1] - a[1]) / 1e3 for a, b in pairs],
            "cpu_us": sum(b[2] - a[2] for a, b in pairs) / 1e3,
        }


async def hold(engine: EngineLoop, count: int, watch: Stopwatch) -> None:
    """Let so many requests come before the first step."""
    engine.pause()
    while len(engine.core.requests) < count:  # noqa: ASYNC110  (nothing tells of a submit)
        await asyncio.sleep(0.005)
    watch.begin()
    engine.resume()


async def run_silent(engine: EngineLoop, count: int, tokens: int) -> None:
    """Requests with nobody at the other end."""
    prompt = np.arange(1, 4, dtype=np.int32)
    for number in range(count):
        engine.submit(f"silent-{number}", prompt, SubmitOptions(max_tokens=tokens, prefix_cache=False))
    while engine.core.requests:  # noqa: ASYNC110  (whatever tells of every step would be work that others do not have)
        await asyncio.sleep(0.02)


async def obey(engines: list[EngineLoop], watch: Stopwatch) -> None:
    """Requests from stdin."""
    holding: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer: dict[str, Any] = {}
        match request["do"]:
            case "hold":
                holding = asyncio.create_task(hold(engines[0], request["count"], watch))
            case "silent":
                await run_silent(engines[0], request["count"], request["tokens"])
                answer = {"tokens": request["count"] * request["tokens"], "ended": time.perf_counter()}
            case "take":
                answer = watch.take(request["rows"])
                if holding is not None:
                    await holding
        print(json.dumps(answer), flush=True)


async def main(runtime: str) -> None:
    engines: list[EngineLoop] = []

    class Engine(EngineLoop):
        """One that can be found."""

        async def start(self) -> None:
            await super().start()
            engines.append(self)

    app.EngineLoop = Engine  # type: ignore[misc]
    watch = Stopwatch()
    watch.watch(Scheduler)
    settings = load_settings(
        runtime=runtime,
        listen="127.0.0.1:0",
        log_level="error",
        max_streams=4096,
        max_waiting=4096,
        session_window=4096,
        max_unread_tokens=MAX_UNREAD,
    )
    configure_logs(settings.log_level, as_json=False)
    serving = asyncio.create_task(app.serve(settings, lambda line: print(line, flush=True)))
    obeying = asyncio.create_task(obey(engines, watch))
    await asyncio.wait([serving, obeying], return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, obeying):
        task.cancel()


if __name__ == "__main__":
    event_loop.run(main(sys.argv[1]))
