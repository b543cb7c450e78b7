"""docs/performance/wire.md, and the section of docs/performance.md that leads to it, from the report of
benchmarks/bench_wire.py.
"""

from __future__ import annotations

from page_parts import Aim, Report, aims_table, heading, machine_line, notes, number, plain_aims, prose, table


def aims(report: Report) -> list[Aim]:
    """What was aimed at."""
    return plain_aims("wire", report)


def policies(report: Report) -> list[str]:
    """Bytes and µs of each refresh policy."""
    found = report["policies"]
    first = found["transition"]
    columns = ("refreshed_rows_per_step", "plan_us", "encode_us", "apply_us")
    rows = [
        [
            f"`{name}`",
            f"{row['bytes_mean']:,}",
            f"{row['bytes_mean'] / first['bytes_mean']:.2f}",
            f"{row['bytes_median']:,}",
            *(number(row[column]) for column in columns),
        ]
        for name, row in found.items()
    ]
    return [
        "## Bytes and time of a step, by refresh policy",
        "",
        *prose(
            f"""One trace for all: {first["rows_per_step"]:g} rows a step in a pool that is too small for them; requests that
            share prefixes arrive all the time, and every 20th step one is retracted by force. Over {first["steps"]:,} steps
            {first["requests_ended"]:,} requests ended, which had been retracted {first["retractions_of_these"]:,} times. Every
            op was encoded, decoded, checked and applied to a mirror (the last three are *apply*); all policies lead to the
            same mirror. *Refreshed*: rows a step of which the whole page row is sent."""
        ),
        *table(
            ("policy", "bytes, mean", "× transition", "bytes, median", "refreshed", "plan µs", "encode µs", "apply µs"), rows
        ),
    ]


def trip(report: Report) -> list[str]:
    """The round trip beside a bare echo."""
    found = report["trip"]
    rows = [
        (name, number(found[f"{party}_us"]), number(found[f"{party}_p90_us"]))
        for party, name in (("runtime", "pagemirror, model that computes nothing"), ("echo", "bare grpc.aio stream"))
    ]
    return [
        "## Round trip of a step",
        "",
        *prose(
            f"""Two processes, {found["rows"]} decode rows: an op of {found["op_bytes"]:,.0f} bytes goes, and a result of
            {found["result_bytes"]:,} bytes comes back. From the op's bytes being ready to its result being read, so without
            planning and completing; the runtime decodes, checks and applies the op to its mirror, builds the batch, calls a
            model that computes nothing, and encodes the result. The bare stream takes the same bytes and answers as many.
            {found["steps"]:,} ops, each sent both ways, one directly after the other. The ratio of the medians is
            **{found["ratio"]:.2f}**."""
        ),
        *table(("", "µs, median", "µs, p90"), rows),
    ]


def bubble(report: Report) -> list[str]:
    """How busy a device is kept."""
    steps = sorted({row["step_ms"] for row in report["bubble"]})
    rows = []
    for depth in sorted({row["overlap"] for row in report["bubble"]}):
        cells = [
            f"{row['of_ideal']:.1%} ({max(0, row['bubble_us']):,} µs)"
            for step_ms in steps
            for row in report["bubble"]
            if (row["step_ms"], row["overlap"]) == (step_ms, depth)
        ]
        rows.append((str(depth), *cells))
    return [
        "## Bubble",
        "",
        *prose(
            """Steps per second of a device whose step takes so long, whatever the host does meanwhile, as a part of what it
            could do if it never waited; in brackets how long it waits between two steps. Planning, encoding, the round trip,
            checking and the mirror all have to fit. Two processes, 256 decode rows."""
        ),
        *table(("`overlap_depth`", *(f"{step_ms:g} ms" for step_ms in steps)), rows),
    ]


def render(report: Report) -> str:
    """The whole page."""
    found = aims(report)
    lines = [
        *heading("Performance of the wire", "wire"),
        *prose(
            """What it costs that scheduler and runtime are two processes. `benchmarks/bench_wire.py` measured this; `make
            bench` repeats it. The rest is on [the page about performance](../performance.md)."""
        ),
        "![Bytes of the policies, round trip, part of the ideal](wire.svg)",
        "",
        *aims_table(found),
        *notes(found),
        *policies(report),
        *trip(report),
        *bubble(report),
        "## How it was measured",
        "",
        *prose(
            f"""Medians of one run. The two processes talk over a unix socket and use uvloop where it is installed, the bare
            stream likewise. {machine_line(report)}"""
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def section(report: Report) -> list[str]:
    """What docs/performance.md says of it."""
    found = report["trip"]
    return [
        "## Scheduler and runtime as two processes",
        "",
        *prose(
            f"""The round trip of a step of {found["rows"]} rows with a model that computes nothing takes
            {found["runtime_us"]:,.0f} µs, a bare echo of the same bytes {found["echo_us"]:,.0f} µs: {found["ratio"]:.2f} times
            as long. It is hidden behind the model's step by `overlap_depth`; the picture shows how much of its time a device
            that computes for 2, 5 or 20 ms is kept busy."""
        ),
        "![Bytes of the policies, round trip, part of the ideal](performance/wire.svg)",
        "",
        *prose(
            """[Performance of the wire](performance/wire.md) has the figures, and what each refresh policy costs in bytes and
            time."""
        ),
    ]
