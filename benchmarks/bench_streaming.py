"""What the public streams cost: tokens a second, the server's CPU time a token, and what clients do to the time of a step.

    python benchmarks/bench_streaming.py [--json FILE] [--quick] [--streams 256 1024]

Ways that tokens go, each with 256 and with 1,024 requests at once:

    none        requests that are submitted inside the scheduler's process, so that nobody reads their output
    Generate    one call a request, served by the scheduler's process itself
    front end   one call a request, served by two worker processes, which reach the scheduler over one session each
    Session     all requests over one stream

Tables:

    stream   a server with no engine behind it, so that the stream is all there is
    served   the product's scheduler and runtime, the latter with a model whose step takes nothing ("0 ms", as fast as it goes)
             or 5 and 20 ms of a device, whatever the host does meanwhile. Planning begins when all requests are there.

tokens/s is what the clients received, from the first step to the last message. µs/token is CPU time of the server's process, in
"served" of the scheduler's in those steps in which all rows decoded, planning and the link to the runtime included; µs/token of
the workers is that of all workers of the front end. Step times are measured in the scheduler's process: from a result to the
next one, while all rows decode; their median and p99 are over all rounds, other figures are the median of the rounds.

Everything shares the machine's cores. The clients are one process of low priority, because elsewhere they would not be on the
scheduler's machine at all; where the cores do not suffice they get several tokens in one message. Kinds take turns, after a
first, short round that does not count. Only ratios within one run mean something elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from statistics import median
from typing import Any

from _measure import COLOURS, PACKAGES, add_options, aim, finish, print_aims, print_table
from _report import Report, machine, progress
from _stream_processes import child

from scheduler_service import event_loop
from scheduler_service.up import socket_base

NONE = "none"
KINDS = (NONE, "Generate", "front end", "Session")
WORKERS = 2
NUM_PAGES = 1 << 16
STEP_MS = (0.0, 5.0, 20.0)
TOKENS = {0.0: (160, 50), 5.0: (200, 50), 20.0: (120, 40)}
"""Of each of up to 256 streams, and of each of more."""
AIMED_STREAMS, AIMED_STEP_MS = 256, 20.0
ROUNDS = 3

Case = dict[str, float]


def num_tokens(num_streams: int, step_ms: float, *, quick: bool) -> int:
    """Of each stream: enough steps for a p99, in a few seconds."""
    if quick:
        return 20
    few, many = TOKENS[step_ms]
    return few if num_streams <= AIMED_STREAMS else many


def middle(rounds: list[Case]) -> Case:
    """The median of each figure."""
    return {key: round(median(case[key] for case in rounds), 3) for key in rounds[0]}


async def measure_stream(options: argparse.Namespace, num_streams: int) -> dict[str, Case]:
    """The streams alone."""
    tokens = 20 if options.quick else 51_200 // num_streams
    found: dict[str, list[Case]] = {}
    async with (
        child("_stream_pump.py", str(num_streams), str(tokens)) as server,
        child("_stream_clients.py", str(num_streams), server.address) as clients,
    ):
        for number in range(options.rounds + 1):
            for kind in ("Generate", "Session"):
                began, used = time.perf_counter(), server.cpu_s()
                way = kind if kind == "Generate" else f"raw {kind}"
                answer = await clients.ask(kind=way, name=f"{kind}{number}", tokens=tokens)
                count, seconds, used = answer["tokens"], answer["ended"] - began, server.cpu_s() - used
                if number:
                    case = {"tokens_per_s": count / seconds, "us_per_token": used / count * 1e6}
                    found.setdefault(kind, []).append(case)
    return {kind: middle(rounds) for kind, rounds in found.items()}


async def measure_served(options: argparse.Namespace, num_streams: int, step_ms: float) -> dict[str, Case]:
    """A scheduler, a runtime, and a front end."""
    found: dict[str, list[Case]] = {}
    steps: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()))
        runtime = ("runtime", f"{folder}/runtime", f"{step_ms:g}", str(num_streams), str(NUM_PAGES))
        await enter(child("_wire_peers.py", *runtime, announces=False))
        host = await enter(child("_stream_host.py", f"unix:{folder}/runtime"))
        served = ("--listen", "127.0.0.1:0", "--max-streams", "4096", "--log-level", "error")
        command = ("-m", "scheduler_service.cli", "frontend", "--scheduler", host.address, "--workers", str(WORKERS), *served)
        front = await enter(child(*command))
        clients = await enter(child("_stream_clients.py", str(num_streams), host.address, front.address))
        for number in range(options.rounds + 1):
            tokens = num_tokens(num_streams, step_ms, quick=options.quick or not number)
            for kind in KINDS:
                await host.ask(do="hold", count=num_streams)
                workers = front.children_cpu_s()
                if kind == NONE:
                    answer = await host.ask(do="silent", count=num_streams, tokens=tokens)
                else:
                    answer = await clients.ask(kind=kind, name=f"{kind}{number}", tokens=tokens)
                workers = front.children_cpu_s() - workers
                taken = await host.ask(do="take", rows=num_streams)
                if number:
                    found.setdefault(kind, []).append(summarize(answer, taken, workers, num_streams))
                    steps.setdefault(kind, []).extend(taken["step_us"])
    return {kind: middle(rounds) | percentiles(steps[kind]) for kind, rounds in found.items()}


def summarize(answer: dict[str, Any], taken: dict[str, Any], workers_s: float, num_streams: int) -> Case:
    """One round of one kind."""
    num_steps = len(taken["step_us"])
    if not num_steps:
        raise SystemExit(f"there was no step in which all {num_streams} rows decoded")
    return {
        "tokens_per_s": answer["tokens"] / (answer["ended"] - taken["began"]),
        "us_per_token": taken["cpu_us"] / num_steps / num_streams,
        "workers_us_per_token": workers_s / answer["tokens"] * 1e6,
    }


def percentiles(steps: list[float]) -> Case:
    """Of the steps of all rounds."""
    ordered = sorted(steps)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return {"step_p50_us": round(median(ordered), 1), "step_p99_us": round(p99, 1), "steps": len(ordered)}


async def bench(options: argparse.Namespace) -> Report:
    """Everything, as one JSON object."""
    report: Report = {
        "benchmark": "streaming",
        "quick": options.quick,
        "rounds": options.rounds,
        "workers": WORKERS,
        "machine": machine(*PACKAGES),
        "stream": {},
        "served": [],
    }
    for num_streams in options.streams:
        progress(f"{num_streams:,} streams, no engine")
        report["stream"][str(num_streams)] = await measure_stream(options, num_streams)
        for step_ms in STEP_MS[:1] if options.quick else STEP_MS:
            progress(f"{num_streams:,} streams, steps of {step_ms:g} ms")
            kinds = await measure_served(options, num_streams, step_ms)
            report["served"].append({"streams": num_streams, "step_ms": step_ms, "kinds": kinds})
    report["aims"] = aims(report)
    return report


def aims(report: Report) -> list[Report]:
    """What is aimed at, of what was measured."""
    found = []
    if alone := report["stream"].get(str(AIMED_STREAMS)):
        name = f"Session, {AIMED_STREAMS} streams, no engine behind it: tokens/s"
        found.append(aim(name, round(alone["Session"]["tokens_per_s"]), 300_000, at_most=False))
    for case in report["served"]:
        kinds = case["kinds"]
        if case["streams"] != AIMED_STREAMS:
            continue
        if case["step_ms"] == 0:
            name = f"{AIMED_STREAMS} streams behind a front end: CPU µs of the scheduler per token"
            found.append(aim(name, kinds["front end"]["us_per_token"], 3, at_most=True))
        if case["step_ms"] == AIMED_STEP_MS:
            for kind in ("front end", "Session", "Generate"):
                name = f"{AIMED_STREAMS} streams, {kind}, {AIMED_STEP_MS:g} ms a step: p99 of a step / without clients"
                found.append(aim(name, kinds[kind]["step_p99_us"] / kinds["none"]["step_p99_us"], 2, at_most=True))
    return found


def print_report(report: Report) -> None:
    """The tables for a reader; ratios are to Generate, those of p99 to a step without clients."""
    for streams, kinds in report["stream"].items():
        base = kinds["Generate"]
        rows = [
            [
                kind, round(case["tokens_per_s"]), case["tokens_per_s"] / base["tokens_per_s"], case["us_per_token"],
                case["us_per_token"] / base["us_per_token"],
            ]
            for kind, case in kinds.items()
        ]  # fmt: skip
        print_table(f"stream: {int(streams):,} streams", ("", "tokens/s", "x Generate", "µs/token", "x Generate"), rows)
    header = ("", "tokens/s", "µs/token", "x Generate", "workers' µs/token", "step p50 µs", "p99 µs", "p99 x none")
    for served in report["served"]:
        base, none = served["kinds"]["Generate"], served["kinds"]["none"]
        rows = [
            [
                kind, round(case["tokens_per_s"]), case["us_per_token"], case["us_per_token"] / base["us_per_token"],
                case["workers_us_per_token"] if kind == "front end" else "-", round(case["step_p50_us"]),
                round(case["step_p99_us"]), case["step_p99_us"] / none["step_p99_us"],
            ]
            for kind, case in served["kinds"].items()
        ]  # fmt: skip
        print_table(f"served: {served['streams']:,} streams, {served['step_ms']:g} ms a step", header, rows)
    print_aims(report["aims"])


def draw(report: Report, axes: list[Any]) -> None:
    """CPU per token, and p99 of a step, at the smallest number of streams."""
    cases = [case for case in report["served"] if case["streams"] == report["served"][0]["streams"]]
    for axis, key, scale in ((axes[0], "us_per_token", 1), (axes[1], "step_p99_us", 1000)):
        for index, kind in enumerate(KINDS):
            places = [number + (index - 1.5) * 0.2 for number in range(len(cases))]
            values = [case["kinds"][kind][key] / scale for case in cases]
            bars = axis.bar(places, values, 0.19, label=kind, color=COLOURS[index])
            axis.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=6, padding=1)
        axis.set_xticks(range(len(cases)), [f"{case['step_ms']:g} ms" for case in cases])
        axis.set_xlabel("step of the model")
    axes[0].set_title(f"{cases[0]['streams']} streams: CPU µs of the scheduler per token")
    axes[1].set_title("p99 of a step, ms")
    axes[0].legend(frameon=False, fontsize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", help="requests at once  [default: 256 1024, with --quick 16]")
    parser.add_argument("--rounds", type=int, help=f"rounds that count  [default: {ROUNDS}, with --quick 1]")
    options = parser.parse_args()
    options.streams = options.streams or ([16] if options.quick else [256, 1024])
    options.rounds = options.rounds if options.rounds is not None else 1 if options.quick else ROUNDS
    if min(options.rounds, *options.streams) < 1:
        parser.error("--rounds and --streams take numbers from 1")
    report = event_loop.run(bench(options))
    print_report(report)
    finish(report, options, 2, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
