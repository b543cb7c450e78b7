"""pagemirror's scheduler as a party of bench_scheduler.py and bench_scaling.py.

The core and its side of the wire, in one process without a runtime: results are bytes that were made beforehand.

A decode step has these stages: `plan` (`Scheduler.plan`), `encode` (op → message → bytes), `decode` (bytes of the result →
message → columns) and `complete` (`Scheduler.complete`, and `take_outputs`, which has each token with its request). An
admission has `submit` (from a numpy prompt) and `plan`, whose op has the prompt's columns; `encode` and what follows when the
request ends, `leave`, are not counted.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
from _scheduler_lines import (
    PAGE_SIZE,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    WARM_UP,
    num_pages,
    pages_for_prompts,
    prompt_of_row,
    prompt_to_admit,
)
from _workers import Answer, serve

from pagemirror.v1 import forward_pb2
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.wire import op_to_proto, result_from_proto

STEP_STAGES = ("plan", "encode", "decode", "complete")
ADMISSION_STAGES = ("submit", "plan", "encode", "leave")
MOST_FUNCTIONS = 12


def finish_step(scheduler: Scheduler, op: ForwardOp, token: int = 7) -> None:
    """Answer an op at once; not timed."""
    tokens = np.where(op.sample, np.int32(token), np.int32(-1)).astype(np.int32)
    scheduler.complete(StepResult(op.session_no, op.step, tokens))
    scheduler.take_outputs()


def result_bytes(step: int, num_rows: int, token: int) -> bytes:
    """What the runtime answers to a step in which every row samples."""
    tokens = np.full(num_rows, token, np.int32).tobytes()
    return forward_pb2.StepResult(session_no=1, step=step, tokens=tokens).SerializeToString()


def timed_step(scheduler: Scheduler, num_rows: int, token: int = 7) -> list[int]:
    """Nanoseconds of each stage of one decode step. Raises RuntimeError when it is not a step of so many decode rows."""
    answer = result_bytes(scheduler.last_step + 1, num_rows, token)
    begin = perf_counter_ns()
    op = scheduler.plan()
    planned = perf_counter_ns()
    if op is None or op.num_rows != num_rows or op.num_extend_rows:
        found = "nothing" if op is None else f"{op.num_rows} rows, {op.num_extend_rows} of them with prompts"
        raise RuntimeError(f"a step of {num_rows} decode rows was to be planned, not of {found}")
    before_encoding = perf_counter_ns()
    op_to_proto(op).SerializeToString()
    encoded = perf_counter_ns()
    result = result_from_proto(forward_pb2.StepResult.FromString(answer), num_rows)
    decoded = perf_counter_ns()
    scheduler.complete(result)
    scheduler.take_outputs()
    completed = perf_counter_ns()
    return [planned - begin, encoded - before_encoding, decoded - encoded, completed - decoded]


def fill_rows(scheduler: Scheduler, rows: int, context: int, max_tokens: int, vocab_size: int = VOCAB_SIZE) -> None:
    """Bring so many rows of that context to decoding, in one step: the scheduler's budget and chunks hold them."""
    for row in range(rows):
        scheduler.submit(f"row-{row}", prompt_of_row(row, context, vocab_size), max_tokens=max_tokens)
    num_decodes = 0
    while num_decodes < rows:
        op = scheduler.plan()
        if op is None:
            raise RuntimeError(f"{rows} rows of {context} tokens do not fit into this pool")
        num_decodes = op.num_rows if op.num_extend_rows == 0 else 0
        finish_step(scheduler, op)


class Ours:
    """State between the parent's requests."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._rows = 0
        self._number = 0

    def rows(self, rows: int, context: int, steps: int) -> Answer:
        """Set a decode line up, for so many timed steps."""
        self._scheduler = None
        gc.collect()
        room = steps + WARM_UP + 8
        config = SchedulerConfig(
            PAGE_SIZE, num_pages(rows, context, room), rows, -(-(context + room) // PAGE_SIZE) + 1, VOCAB_SIZE,
            token_budget=rows * context, chunk_size=context,
        )  # fmt: skip
        self._scheduler, self._rows = Scheduler(config), rows
        fill_rows(self._scheduler, rows, context, room)
        self.steps(WARM_UP)
        return {}

    def steps(self, count: int) -> Answer:
        """Time so many steps."""
        assert self._scheduler is not None
        samples = [timed_step(self._scheduler, self._rows) for _ in range(count)]
        return {stage: list(times) for stage, times in zip(STEP_STAGES, zip(*samples, strict=True), strict=True)}

    def idle(self, prompts: int) -> Answer:
        """Set an admission line up: nothing runs, and the pool holds so many prompts."""
        self._scheduler = None
        gc.collect()
        pages_per_row = PROMPT_TOKENS // PAGE_SIZE + 4
        config = SchedulerConfig(
            PAGE_SIZE, pages_for_prompts(prompts), 64, pages_per_row, VOCAB_SIZE, token_budget=8192, chunk_size=PROMPT_TOKENS
        )
        self._scheduler = Scheduler(config)
        for cached in (False, True):
            self.admit(cached, WARM_UP)
        return {}

    def admit(self, cached: bool, count: int, *, profile: cProfile.Profile | None = None) -> Answer:
        """Time so many admissions, one after the other; `cached`: of prompts that were here once, untimed, before."""
        scheduler = self._scheduler
        assert scheduler is not None
        samples = []
        for _ in range(count):
            self._number += 1
            prompt = prompt_to_admit(self._number)
            if cached:
                scheduler.submit(f"first-{self._number}", prompt, max_tokens=1)
                while (op := scheduler.plan()) is not None:
                    finish_step(scheduler, op)
            if profile is None:
                op, times = self._enter(scheduler, prompt)
            else:
                op, times = profile.runcall(self._enter, scheduler, prompt)
            begin = perf_counter_ns()
            op_to_proto(op).SerializeToString()
            encoded = perf_counter_ns()
            finish_step(scheduler, op)
            left = perf_counter_ns()
            found = int(op.num_computed[0])
            if (found >= PROMPT_TOKENS - PAGE_SIZE) != cached or op.num_rows != 1 or scheduler.has_work:
                raise RuntimeError(f"an admission with cached={cached} had {found} cached tokens")
            samples.append([*times, encoded - begin, left - encoded])
        return {stage: list(times) for stage, times in zip(ADMISSION_STAGES, zip(*samples, strict=True), strict=True)}

    def _enter(self, scheduler: Scheduler, prompt: npt.NDArray[np.int32]) -> tuple[ForwardOp, list[int]]:
        begin = perf_counter_ns()
        scheduler.submit(str(self._number), prompt, max_tokens=1)
        submitted = perf_counter_ns()
        op = scheduler.plan()
        planned = perf_counter_ns()
        assert op is not None
        return op, [submitted - begin, planned - submitted]

    def profile(self, count: int, batches: int, cached: bool | None = None) -> Answer:
        """Functions by their own time in a step, or in an admission where `cached` is given: name, share, calls.

        A function's time is its median over batches of `count` steps: one interruption would otherwise look like a function.
        """
        own: dict[str, list[float]] = {}
        calls: dict[str, float] = {}
        for _ in range(batches):
            profile = cProfile.Profile(builtins=False)
            if cached is not None:
                self.admit(cached, count, profile=profile)
            else:
                assert self._scheduler is not None
                for _ in range(count):
                    profile.runcall(timed_step, self._scheduler, self._rows)
            for (file, _, function), entry in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
                if Path(file).parent != Path(__file__).parent:
                    name = f"{Path(file).name} {function}"
                    own.setdefault(name, []).append(entry[2])
                    calls[name] = entry[1] / count
        times = {name: median(seconds + [0.0] * (batches - len(seconds))) for name, seconds in own.items()}
        whole = sum(times.values())
        names = sorted(times, key=lambda name: -times[name])[:MOST_FUNCTIONS]
        return {"functions": [[name, round(times[name] / whole, 4), round(calls[name], 2)] for name in names]}


def main() -> None:
    ours = Ours()
    handlers = (ours.rows, ours.steps, ours.idle, ours.admit, ours.profile)
    serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    main()
