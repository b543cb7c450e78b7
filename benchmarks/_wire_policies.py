"""Bytes and microseconds of a step for each refresh policy, see `bench_wire.py`."""

from __future__ import annotations

from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
from _wire_peers import PAGE_SIZE, VOCAB_SIZE

from pagemirror.v1 import runtime_pb2
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.wire import op_from_proto
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.ops import StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.runtime_client import encode

POLICIES = (RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS)
NUM_ROWS, NUM_PAGES, MAX_PAGES_PER_ROW = 64, 2048, 128
MIN_WAITING = 8
RETRACT_EVERY = 20  # steps


class Trace:
    """Requests that share prefixes and arrive all the time; the same ones in every process and for every policy."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rng = np.random.default_rng(7)  # noqa: TID251  (seeded data, not the product)
        self._shared = [self._rng.integers(0, VOCAB_SIZE, 256) for _ in range(8)]
        self._num_submitted = 0

    def advance(self, step: int) -> None:
        """What clients do before this step, and a retraction by force now and then."""
        rng, scheduler = self._rng, self._scheduler
        while scheduler.num_waiting < MIN_WAITING:
            prompt = np.concatenate((self._shared[rng.integers(8)], rng.integers(0, VOCAB_SIZE, rng.integers(16, 384))))
            scheduler.submit(str(self._num_submitted), prompt.astype(np.int32), max_tokens=int(rng.integers(32, 256)))
            self._num_submitted += 1
        if step % RETRACT_EVERY == RETRACT_EVERY - 1 and scheduler.num_running:
            victims = [request for request, _ in scheduler.rows().values() if request.state.holds_row]
            scheduler.retract(victims[int(rng.integers(len(victims)))].request_id)


class Receiver:
    """What the runtime does with an op before its model sees it."""

    def __init__(self) -> None:
        self._session = SessionState(NUM_ROWS, MAX_PAGES_PER_ROW, NUM_PAGES, PAGE_SIZE, VOCAB_SIZE)
        self._session.open(1, 1, 0)
        self._mirror = ReqToPage(NUM_ROWS, MAX_PAGES_PER_ROW, NUM_PAGES, PAGE_SIZE)

    def apply(self, sent: bytes) -> None:
        """Decode, check, write."""
        received: ForwardOp = op_from_proto(runtime_pb2.ExecuteRequest.FromString(sent).op)
        self._session.check(received)
        self._session.commit(received)
        self._mirror.apply(received, request_ids=self._session.request_ids)


def policy_trace(policy: RefreshPolicy, num_steps: int) -> dict[str, Any]:
    """One policy on the trace: bytes of each step, refreshed rows, and microseconds of each part."""
    config = SchedulerConfig(
        PAGE_SIZE, NUM_PAGES, NUM_ROWS, MAX_PAGES_PER_ROW, VOCAB_SIZE, refresh_policy=policy, overlap_depth=0
    )
    scheduler = Scheduler(config)
    trace, receiver = Trace(scheduler), Receiver()
    sizes: list[int] = []
    times: dict[str, list[float]] = {"plan_us": [], "encode_us": [], "apply_us": []}
    num_refreshed = num_named = num_ended = num_retractions = 0
    while len(sizes) < num_steps:
        trace.advance(len(sizes))
        moments = [perf_counter()]
        op = scheduler.plan()
        if op is None:
            continue
        moments.append(perf_counter())
        sent = encode(op)
        moments.append(perf_counter())
        receiver.apply(sent)
        moments.append(perf_counter())
        for name, begin, end in zip(times, moments, moments[1:], strict=False):
            times[name].append((end - begin) * 1e6)
        sizes.append(len(sent))
        num_refreshed += int(op.full_refresh.sum())
        num_named += op.num_rows
        tokens = np.where(op.sample, 1, -1).astype(np.int32)
        scheduler.complete(StepResult(op.session_no, op.step, tokens, np.zeros(op.num_rows, dtype=np.uint8)))
        ended = scheduler.take_outputs().finished
        num_ended += len(ended)
        num_retractions += sum(request.num_retractions for request in ended)
    return {
        "steps": len(sizes),
        "rows_per_step": round(num_named / len(sizes), 1),
        "refreshed_rows_per_step": round(num_refreshed / len(sizes), 2),
        "requests_ended": num_ended,
        "retractions_of_these": num_retractions,
        "bytes_mean": round(mean(sizes)),
        "bytes_median": round(median(sizes)),
        **{name: round(median(values), 1) for name, values in times.items()},
    }
