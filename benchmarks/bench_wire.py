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
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import COLOURS, PACKAGES, add_options, aim, finish, print_aims, print_table
from _report import Report, machine, progress
from _wire_bubble import DEPTHS, measure_bubble
from _wire_peers import MAX_ROWS, run_loop
from _wire_policies import POLICIES, policy_trace
from _wire_trip import measure_trip

from scheduler_service.up import socket_base

PARTS = ("policies", "trip", "bubble")
STEP_MS = (2.0, 5.0, 20.0)
NUM_POLICY_STEPS, QUICK_POLICY_STEPS = 1500, 60
NUM_TRIPS, QUICK_TRIPS = 2000, 30
BUBBLE_S, BUBBLE_ROUNDS = 1.5, 3


async def two_processes(options: argparse.Namespace, report: Report) -> None:
    """What needs a second process."""
    num_rows = 32 if options.quick else MAX_ROWS
    with tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()) as name:
        folder = Path(name)
        if "trip" in options.parts:
            progress("trip: between two processes, and a bare echo beside it")
            report["trip"] = await measure_trip(folder, QUICK_TRIPS if options.quick else NUM_TRIPS, num_rows)
        if "bubble" in options.parts:
            report["bubble"] = []
            for step_ms in STEP_MS[:1] if options.quick else STEP_MS:
                progress(f"bubble: steps of {step_ms:g} ms, overlap {', '.join(map(str, DEPTHS))}")
                seconds, rounds = (0.05, 1) if options.quick else (BUBBLE_S, BUBBLE_ROUNDS)
                report["bubble"] += await measure_bubble(folder, step_ms, seconds, rounds, num_rows)


def run(options: argparse.Namespace) -> Report:
    """Everything, as one JSON object."""
    report: Report = {"benchmark": "wire", "quick": options.quick, "machine": machine(*PACKAGES)}
    if "policies" in options.parts:
        report["policies"] = {}
        for policy in POLICIES:
            progress(f"policies: {policy.value}")
            report["policies"][policy.value] = policy_trace(policy, QUICK_POLICY_STEPS if options.quick else NUM_POLICY_STEPS)
    if {"trip", "bubble"} & set(options.parts):
        run_loop(two_processes(options, report))
    report["aims"] = aims(report)
    return report


def aims(report: Report) -> list[Report]:
    """What is aimed at, of the parts that were measured."""
    found = []
    if trip := report.get("trip"):
        found.append(aim("round trip of a step, no-op model / bare echo", trip["ratio"], 1.4, at_most=True))
    return found + [
        aim("5 ms model step, overlap 1: steps/s / ideal", row["of_ideal"], 0.97, at_most=False)
        for row in report.get("bubble", [])
        if (row["step_ms"], row["overlap"]) == (5.0, 1)
    ]


def print_report(report: Report) -> None:
    """The tables for a reader."""
    if policies := report.get("policies"):
        least = policies["transition"]["bytes_mean"]
        names = ("bytes_mean", "bytes_median", "refreshed_rows_per_step", "plan_us", "encode_us", "apply_us")
        rows = [[name, *(row[key] for key in names), row["bytes_mean"] / least] for name, row in policies.items()]
        title = (
            f"refresh policies, {policies['transition']['rows_per_step']} rows a step (decode, checks and mirror in apply_us)"
        )
        print_table(title, ("policy", *names, "x transition"), rows)
    if trip := report.get("trip"):
        names = ("op_bytes", "result_bytes", "runtime_us", "runtime_p90_us", "echo_us", "echo_p90_us", "ratio")
        print_table("round trip, no-op model", ("", *names), [[f"{trip['rows']} rows", *(trip[name] for name in names)]])
    if bubble := report.get("bubble"):
        rows = [[f"{row['step_ms']:g} ms, overlap {row['overlap']}", *list(row.values())[2:]] for row in bubble]
        print_table("bubble", ("step", "steps/s", "of the ideal", "bubble µs"), rows)
    print_aims(report["aims"])


def draw(report: Report, axes: list[Any]) -> None:
    """Bytes of the policies, the round trip, and the part of the ideal at each overlap."""
    left, middle, right = axes
    left.set_title("bytes of a step, mean")
    if policies := report.get("policies"):
        left.bar(list(policies), [row["bytes_mean"] for row in policies.values()], color=COLOURS[0], width=0.6)
    middle.set_title("round trip of a step, µs, median")
    if trip := report.get("trip"):
        bars = middle.bar(["pagemirror", "bare echo"], [trip["runtime_us"], trip["echo_us"]], color=COLOURS[:2], width=0.6)
        middle.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    for depth in DEPTHS:
        rows = [row for row in report.get("bubble", []) if row["overlap"] == depth]
        places = [str(row["step_ms"]).removesuffix(".0") for row in rows]
        right.plot(places, [100 * row["of_ideal"] for row in rows], "o-", label=f"overlap {depth}", color=COLOURS[depth])
    right.set_ylim(0, 105)
    right.set_xlabel("step of the device, ms")
    right.set_title("steps/s, % of the device's own")
    right.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these  [default: all]")
    options = parser.parse_args()
    report = run(options)
    print_report(report)
    finish(report, options, 3, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
