"""What it costs that scheduler and runtime are two processes: bytes, microseconds, the round trip and the bubble.

    python benchmarks/bench_wire.py [--json FILE] [--quick] [--parts policies trip bubble]

policies   Bytes and microseconds of a step for each refresh policy, on one trace: requests that share prefixes arrive all the
           time, the pool is too small for them, and every 20th step one of them is retracted by force. The core plans, an op is
           encoded, decoded, checked and applied to a mirror on the CPU. The policies give the same mirror and differ in bytes.
trip       From an op's bytes being ready to its result being read, between two processes, with a model that computes nothing,
           beside a bare grpc.aio stream that takes the same bytes and answers as many as the result has. 256 decode rows; every
           op goes one way and then the other. Planning and completing are not part of it.
bubble     Steps per second with a device whose step takes 2, 5 and 20 ms, as a part of what it could do if it never waited.
           overlap 0 plans a step when the one before is answered, 1 and 2 plan that many ahead. Planning, encoding, checking
           and the mirror are part of it.

Medians within one run on one machine: only ratios mean something elsewhere. uvloop is used on all sides where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import grpc
import numpy as np
from _measure import add_options, aim, finish, machine, print_aims, print_table
from _wire_peers import MAX_PAGES_PER_ROW, MAX_ROWS, METHOD, NUM_PAGES, PAGE_SIZE, VOCAB_SIZE, run_loop

from scheduler_service.agreement import ExpectedShape
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.errors import RuntimeLinkError
from scheduler_service.runtime_client import LinkLimits, RuntimeLink, encode, open_link
from scheduler_service.up import socket_base
from scheduler_service.wire import StepRefusal

PEERS = Path(__file__).resolve().parent / "_wire_peers.py"
PARTS = ("policies", "trip", "bubble")
POLICIES = (RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS)
STEP_MS = (2.0, 5.0, 20.0)
LIMIT_S = 60.0
LIMITS = (PAGE_SIZE, NUM_PAGES, MAX_ROWS, MAX_PAGES_PER_ROW, VOCAB_SIZE)


# --- bytes of each policy ---------------------------------------------------------------------------------------------


def policy_trace(policy: RefreshPolicy, num_steps: int) -> dict[str, Any]:
    """One policy on the trace: bytes of each step, refreshed rows, and microseconds of encoding and of applying."""
    from pagemirror.v1 import runtime_pb2
    from runtime_service.ops import ForwardOp as ReadOp
    from runtime_service.req_to_page import ReqToPage
    from runtime_service.session import SessionState
    from runtime_service.wire import op_from_proto

    num_rows, num_pages = 64, 2048
    config = SchedulerConfig(PAGE_SIZE, num_pages, num_rows, 128, VOCAB_SIZE, refresh_policy=policy, overlap_depth=0)
    scheduler = Scheduler(config)
    session, mirror = (
        SessionState(num_rows, 128, num_pages, PAGE_SIZE, VOCAB_SIZE),
        ReqToPage(num_rows, 128, num_pages, PAGE_SIZE),
    )
    session.open(1, 1, 0)
    rng = np.random.default_rng(7)  # noqa: TID251  (seeded data, not the product)
    shared = [rng.integers(0, VOCAB_SIZE, 256) for _ in range(8)]
    sizes, encode_us, apply_us = [], [], []
    num_submitted = num_refreshed = num_named = num_ended = num_retractions = 0
    while len(sizes) < num_steps:
        while scheduler.num_waiting < 8:
            prompt = np.concatenate((shared[rng.integers(8)], rng.integers(0, VOCAB_SIZE, rng.integers(16, 384))))
            scheduler.submit(str(num_submitted), prompt.astype(np.int32), max_tokens=int(rng.integers(32, 256)))
            num_submitted += 1
        if len(sizes) % 20 == 19 and scheduler.num_running:
            victims = [request for request, _ in scheduler.rows().values() if request.state.holds_row]
            scheduler.retract(victims[int(rng.integers(len(victims)))].request_id)
        op = scheduler.plan()
        if op is None:
            continue
        begin = perf_counter()
        sent = encode(op)
        encoded = perf_counter()
        received: ReadOp = op_from_proto(runtime_pb2.ExecuteRequest.FromString(sent).op)
        session.check(received)
        session.commit(received)
        mirror.apply(received, request_ids=session.request_ids)
        applied = perf_counter()
        sizes.append(len(sent))
        encode_us.append((encoded - begin) * 1e6)
        apply_us.append((applied - encoded) * 1e6)
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
        "encode_us": round(median(encode_us), 1),
        "apply_us": round(median(apply_us), 1),
    }


# --- two processes ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def peer(folder: Path, what: str, number: float) -> AsyncIterator[str]:
    """A process of `_wire_peers.py`; gives its address."""
    socket = folder / f"{what}-{number:g}.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEERS), what, str(socket), f"{number:g}", env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    )
    try:
        yield f"unix:{socket}"
    finally:
        process.terminate()
        await process.wait()


async def connect(target: str, overlap_depth: int, wake: asyncio.Event, session_no: int) -> RuntimeLink:
    """A session with the runtime, once it is ready."""
    deadline = perf_counter() + LIMIT_S
    while True:
        try:
            link, _ = await open_link(
                target,
                scheduler_epoch=os.getpid(),
                session_no=session_no,
                overlap_depth=overlap_depth,
                expected=ExpectedShape(),
                limits=LinkLimits(),
                wake=wake.set,
            )
        except RuntimeLinkError:
            if perf_counter() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return link


def decoding_scheduler(num_rows: int, overlap_depth: int, session_no: int, prompt_len: int = 64) -> Scheduler:
    """A core with that many requests, none of which ends while anybody measures."""
    config = SchedulerConfig(*LIMITS, token_budget=num_rows * prompt_len, overlap_depth=overlap_depth, prefix_cache=False)
    scheduler = Scheduler(config, session_no=session_no)
    prompt = np.arange(prompt_len, dtype=np.int32)
    for number in range(num_rows):
        scheduler.submit(str(number), prompt, max_tokens=4096)
    return scheduler


async def next_outcome(link: RuntimeLink, wake: asyncio.Event) -> StepResult:
    """The answer to the oldest op; the link's own watch ends the wait for one that does not come."""
    while not link.answers:
        if link.broken is not None:
            raise link.broken
        wake.clear()
        await wake.wait()
    outcome = link.answers.popleft().outcome
    if isinstance(outcome, StepRefusal):
        raise SystemExit(f"the runtime refused a step: {outcome}")
    return outcome


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
    warm = min(20, num_steps // 2)
    ours, bare = median(trips["runtime"][warm:]), median(trips["echo"][warm:])
    return {
        "rows": num_rows,
        "op_bytes": median(num_bytes),
        "result_bytes": result_bytes,
        "runtime_us": round(ours, 1),
        "echo_us": round(bare, 1),
        "ratio": round(ours / bare, 3),
    }


async def measure_bubble(folder: Path, step_ms: float, seconds: float, rounds: int, num_rows: int) -> list[dict[str, Any]]:
    """Steps per second at each overlap depth, as a part of what the device could do."""
    found: dict[int, list[float]] = {0: [], 1: [], 2: []}
    wake = asyncio.Event()
    session_no = 0
    async with peer(folder, "runtime", step_ms) as runtime:
        for _ in range(rounds):
            for depth, rates in found.items():
                session_no += 1
                link = await connect(runtime, depth, wake, session_no)
                scheduler = decoding_scheduler(num_rows, depth, session_no)
                num_answered, num_warm = 0, 5
                num_steps = num_warm + max(5, round(seconds * 1000 / step_ms))
                begin = 0.0
                while num_answered < num_steps:
                    while scheduler.num_in_flight <= depth and (op := scheduler.plan()) is not None:
                        link.send(op)
                    scheduler.complete(await next_outcome(link, wake))
                    scheduler.take_outputs()
                    num_answered += 1
                    if num_answered == num_warm:
                        begin = perf_counter()
                rates.append((num_steps - num_warm) / (perf_counter() - begin))
                await link.close()
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


# --- the report -------------------------------------------------------------------------------------------------------


async def two_processes(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """What needs a second process."""
    num_rows = 32 if options.quick else MAX_ROWS
    with tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()) as name:
        folder = Path(name)
        if "trip" in options.parts:
            report["trip"] = await measure_trip(folder, 30 if options.quick else 1000, num_rows)
        if "bubble" in options.parts:
            report["bubble"] = []
            for step_ms in STEP_MS[:1] if options.quick else STEP_MS:
                seconds, rounds = (0.05, 1) if options.quick else (1.5, 3)
                report["bubble"] += await measure_bubble(folder, step_ms, seconds, rounds, num_rows)


def print_report(report: dict[str, Any]) -> None:
    """The figures for a reader."""
    if policies := report.get("policies"):
        least = policies["transition"]["bytes_mean"]
        names = ("bytes_mean", "bytes_median", "refreshed_rows_per_step", "encode_us", "apply_us")
        rows = [[name, *(row[key] for key in names), row["bytes_mean"] / least] for name, row in policies.items()]
        title = (
            f"refresh policies, {policies['transition']['rows_per_step']} rows a step (decode, checks and mirror in apply_us)"
        )
        print_table(title, ("policy", *names, "x transition"), rows)
    if trip := report.get("trip"):
        row = [
            f"{trip['rows']} rows",
            trip["op_bytes"],
            trip["result_bytes"],
            trip["runtime_us"],
            trip["echo_us"],
            trip["ratio"],
        ]
        print_table("round trip, no-op model", ("", "op bytes", "result bytes", "runtime µs", "bare echo µs", "ratio"), [row])
    if bubble := report.get("bubble"):
        rows = [[f"{row['step_ms']:g} ms, overlap {row['overlap']}", *list(row.values())[2:]] for row in bubble]
        print_table("bubble", ("step", "steps/s", "of the ideal", "bubble µs"), rows)
    print_aims(report["aims"])


def draw(report: dict[str, Any], figure: Any) -> None:
    """Bytes of the policies, and the part of the ideal at each overlap."""
    left, right = figure.subplots(1, 2)
    if policies := report.get("policies"):
        left.bar(list(policies), [row["bytes_mean"] for row in policies.values()])
        left.set_ylabel("bytes of a step, mean")
        left.set_title("refresh policies")
    for depth in (0, 1, 2):
        rows = [row for row in report.get("bubble", []) if row["overlap"] == depth]
        right.plot([row["step_ms"] for row in rows], [100 * row["of_ideal"] for row in rows], "o-", label=f"overlap {depth}")
    right.set_xlabel("step of the device, ms")
    right.set_ylabel("% of the ideal steps/s")
    right.set_title("bubble")
    right.legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these  [default: all]")
    options = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "wire", "quick": options.quick, "machine": machine()}
    if "policies" in options.parts:
        num_steps = 60 if options.quick else 1500
        report["policies"] = {policy.value: policy_trace(policy, num_steps) for policy in POLICIES}
    if {"trip", "bubble"} & set(options.parts):
        run_loop(two_processes(options, report))
    report["aims"] = []
    if trip := report.get("trip"):
        report["aims"].append(aim("round trip / bare echo", trip["ratio"], 1.4, at_most=True))
    for row in report.get("bubble", []):
        if (row["step_ms"], row["overlap"]) == (5.0, 1):
            report["aims"].append(aim("5 ms step, overlap 1: part of the ideal steps/s", row["of_ideal"], 0.97, at_most=False))
    print_report(report)
    finish(report, options, "wire", lambda figure: draw(report, figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
