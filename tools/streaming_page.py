"""docs/performance/streaming.md, and the section of docs/performance.md that leads to it, from the report of
benchmarks/bench_streaming.py.
"""

from __future__ import annotations

from page_parts import Aim, Report, aims_table, heading, machine_line, notes, number, plain_aims, prose, table

KINDS = {"none": "nobody reads", "Generate": "`Generate`", "front end": "front end", "Session": "`Session`"}


def aims(report: Report) -> list[Aim]:
    """What was aimed at."""
    return plain_aims("streaming", report)


def alone(report: Report) -> list[str]:
    """The streams without an engine."""
    rows = []
    for streams, kinds in report["stream"].items():
        base = kinds["Generate"]
        rows += [
            [
                f"{int(streams):,} streams, {KINDS[kind]}",
                f"{case['tokens_per_s']:,.0f}",
                f"{case['tokens_per_s'] / base['tokens_per_s']:.1f}",
                number(case["us_per_token"]),
                f"{case['us_per_token'] / base['us_per_token']:.3f}",
            ]
            for kind, case in kinds.items()
        ]
    return table(("", "tokens/s", "× `Generate`", "server's CPU µs per token", "× `Generate`"), rows)


def served(case: Report) -> list[str]:
    """One number of streams and one length of a step."""
    base = case["kinds"]["none"]
    rows = [
        [
            KINDS[kind],
            f"{found['tokens_per_s']:,.0f}",
            number(found["us_per_token"]),
            number(found["workers_us_per_token"]) if kind == "front end" else "–",
            f"{found['step_p50_us'] / 1000:,.2f}",
            f"{found['step_p99_us'] / 1000:,.2f} ({found['step_p99_us'] / base['step_p99_us']:.2f}×)",
        ]
        for kind, found in case["kinds"].items()
    ]
    head = (_title(case), "tokens/s", "scheduler's CPU µs per token", "workers'", "step, median ms", "p99 ms")
    return table(head, rows)


def _title(case: Report) -> str:
    return f"{case['streams']:,} streams, {case['step_ms']:g} ms a step"


def render(report: Report) -> str:
    """The whole page."""
    found = aims(report)
    lines = [
        *heading("Performance of the public streams", "streaming"),
        *prose(
            """What it costs to hand tokens to clients, by each of the ways of [streams](../serving-streams.md).
            `benchmarks/bench_streaming.py` measured this; `make bench` repeats it. The rest is on
            [the page about performance](../performance.md)."""
        ),
        "![CPU time per token, and p99 of a step](streaming.svg)",
        "",
        *aims_table(found),
        *notes(found),
        "## The streams alone",
        "",
        *prose(
            """A server with no engine behind it writes tokens as fast as they are taken: a message a token of each `Generate`,
            a message a step of a `Session`."""
        ),
        *alone(report),
        "## Behind a scheduler",
        "",
        *prose(
            """The product's scheduler and runtime as two processes, with a model whose step takes no time, or as long as the
            table says whatever the host does meanwhile (`overlap_depth` 1). All requests are there before the first step, and
            every step has a token for each. *Nobody reads*: the requests were submitted inside the scheduler's process, and no
            stream takes their output; this is the same work but for the streams."""
        ),
        *(line for case in report["served"] for line in served(case)),
        *prose(
            """tokens/s: what the clients received, from the first step to the last message. Scheduler's CPU: the whole
            process, planning and the link to the runtime included, in the steps in which all rows decoded; workers': all of
            the front end's. The time of a step is measured in the scheduler's process, from a result to the next one; in
            brackets: p99 divided by that of the first line."""
        ),
        "## How it was measured",
        "",
        *prose(
            f"""tokens/s and CPU times are medians over the rounds (here {report["rounds"]}), in which the ways take turns after
            a short one that does not count; median and p99 of a step are of all the rounds' steps together. Scheduler,
            runtime, {report["workers"]} workers of the front end and the clients, which are one process of low priority, share
            the machine's cores; elsewhere the clients would not be on it at all. Where the cores do not suffice for a message
            per token, clients of `Generate` get several tokens in one, and no step waits for them. {machine_line(report)}"""
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def section(report: Report) -> list[str]:
    """What docs/performance.md says of it."""
    return [
        "## The public streams",
        "",
        *prose(
            """Tokens per second and CPU time of a server with no engine behind it, and beside it what clients do to a
            scheduler: its CPU time per token, and the time that 99 of 100 steps keep below."""
        ),
        *alone(report),
        "![CPU time per token, and p99 of a step](performance/streaming.svg)",
        "",
        *prose(
            """[Performance of the public streams](performance/streaming.md) has the figures by number of streams and length of
            a step."""
        ),
    ]
