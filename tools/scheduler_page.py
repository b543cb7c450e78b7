"""docs/performance/scheduler.md, and the section of docs/performance.md that leads to it, from the reports of
benchmarks/bench_scheduler.py and benchmarks/bench_scaling.py.
"""

from __future__ import annotations

from page_parts import Aim, Report, aims_table, heading, machine_line, notes, number, prose, table

OURS = "ours"
PARTIES = {
    OURS: "pagemirror",
    "tokenspeed_0.1.0": "TokenSpeed 0.1.0 (C++)",
    "tokenspeed_0.1.42": "TokenSpeed 0.1.42 (C++)",
    "tokenspeed_0.1.42_coarse": "TokenSpeed 0.1.42, prefixes by 64 tokens",
}
# line, what, stages (none: all), at most so many µs
LIMITS = (
    ("256 x 1k", "whole step", (), 100),
    ("256 x 1k", "encode + decode", ("encode", "decode"), 10),
)
VARIED = {
    "context": "tokens of context in each row",
    "pool": "pages in the pool",
    "queue": "waiting requests",
    "tree": "nodes in the prefix cache",
    "lives": "nodes; one request comes, evicts, publishes and ends",
}


def present(report: Report) -> list[str]:
    """The parties that have figures, in their order."""
    return [party for party in PARTIES if any(party in line["parties"] for line in report["lines"].values())]


def _title(line: str) -> str:
    """`256 x 1k` and `admit cold 1k, evict` as a reader would say it."""
    if line.startswith("admit "):
        what, _, how = line.removeprefix("admit ").partition(", ")
        return f"admit one {what} prompt" + (f", {how}" if how else "")
    return line.replace(" x ", " × ")


def main_table(report: Report) -> list[str]:
    """Medians, and ratios in brackets."""
    parties = present(report)
    rows = []
    for name, line in report["lines"].items():
        cells = []
        for party in parties:
            row, ratio = line["parties"].get(party), line.get(f"ratio_vs_{party}")
            value = "–" if row is None else f"{row['us']:,.0f}"
            cells.append(value if ratio is None else f"{value} ({ratio:.2f}×)")
        rows.append([_title(name), *cells])
    return table(("rows × context", *(PARTIES[party] for party in parties)), rows)


def aims(scheduler: Report, scaling: Report) -> list[Aim]:
    """What was aimed at."""
    found = []
    for aim in scheduler["aims"]:
        what = f"{_title(aim['line'])}: time of {PARTIES[aim['party']]} / pagemirror's"
        key = f"scheduler: {aim['line']} / {aim['party']}"
        found.append(Aim(key, what, f"≥ {aim['aim']:g}", f"{aim['value']:.2f}", aim["reached"]))
    for line, what, stages, limit in LIMITS:
        row = scheduler["lines"].get(line, {}).get("parties", {}).get(OURS)
        if row is not None:
            value = sum(row["stages_us"][stage] for stage in stages) if stages else row["us"]
            key = f"scheduler: {line} / {what}"
            found.append(Aim(key, f"{_title(line)}: {what}", f"≤ {limit} µs", number(value), value <= limit))
    for aim in scaling["aims"]:
        what = f"{VARIED[aim['line']]}, {_ends(scaling, aim['line'])}: cost of the largest / the smallest"
        found.append(Aim(f"scaling: {aim['line']}", what, f"< {aim['aim']:g}", f"{aim['value']:.2f}", aim["reached"]))
    return found


def _ends(scaling: Report, line: str) -> str:
    points = scaling["lines"][line]["points"]
    return f"{points[0]['size']:,} → {points[-1]['size']:,}"


def stages(report: Report) -> list[str]:
    """Where each party's time goes."""
    rows = []
    for name, line in report["lines"].items():
        for party, row in line["parties"].items():
            parts = [f"{stage} {value:,.1f}" for stage, value in row["stages_us"].items()]
            parts += [f"*{stage} {value:,.1f}*" for stage, value in row["not_counted_us"].items()]
            rows.append((_title(name), PARTIES[party], ", ".join(parts)))
    return table(("", "", "stages, median µs; in italics what is not counted"), rows, left=3)


def profiles(report: Report) -> list[str]:
    """Why aims were missed."""
    if not report["profiles"]:
        return []
    lines = [
        "## Profiles of what missed its aim",
        "",
        *prose(
            """Functions of pagemirror by their own time, numpy's included in who calls it. A profiler makes small functions
            look larger than they are."""
        ),
    ]
    for name, functions in report["profiles"].items():
        lines += [f"{_title(name)}:", "", "| function | share | calls in each |", "|---|---:|---:|"]
        lines += [f"| `{function}` | {share:.1%} | {calls:,.1f} |" for function, share, calls in functions]
        lines.append("")
    return lines


def method(report: Report) -> list[str]:
    """What was measured, and what it includes."""
    missing = [f"{PARTIES.get(party, party)} did not run: {why}." for party, why in report["missing"].items()]
    return [
        *prose(
            """One step of a scheduler, without a model and without other processes; page size 16, one token a row a step.
            A step of pagemirror is `plan`, encoding the op into the bytes of its message, decoding the bytes of the result,
            `complete`, and taking the tokens out with the requests they belong to. A step of a TokenSpeed scheduler is
            `next_execution_plan`, reading the plan's columns out, and `advance` with a token for each row. An admission goes
            from a numpy prompt of 1,024 tokens to the columns of the step that computes it, with nothing else running;
            *cached*: all but its last page is in the prefix cache; *evict*: the pool is full of cached pages."""
        ),
        *prose(
            """The peers have no wire, so they encode nothing: what they hand over stays in their process as lists and arrays.
            Reading those out counts, because no runtime can do without it; turning lists into arrays does not, and neither do
            the stop tokens and length limits that are their callers' business, while `complete` looks at both. They run with
            the fastest of the settings tried: event objects are kept, of a step only new pages are read (0.1.0), tables are
            taken as arrays (0.1.42). 0.1.42 also ran with prefixes shared by 64 tokens, which finds less of a prompt in the
            cache and is faster. Of an admission, the encoding of pagemirror's op and what follows when the request ends
            (*leave*) are shown and not counted."""
        ),
        *prose(
            f"""Rows differ in length by up to a page, so that in each step a sixteenth of them needs a page. Every party runs
            in a process and an environment of its own; all are set up at once and measured in turn,
            {report["steps_per_round"]} steps at a time, in {report["rounds"]} rounds whose order turns. That was done
            {report["runs"]} times with new processes, because what is bound by memory varies severalfold with a machine's
            other load; a party's figure is the best of its runs' medians. This machine changes its speed between minutes;
            only ratios mean much elsewhere."""
        ),
        *prose(machine_line(report)),
        *(prose(" ".join(missing)) if missing else []),
    ]


def growth(report: Report) -> list[str]:
    """How cost grows with sizes, and memory."""
    rows = []
    for name, line in report["lines"].items():
        points = [f"{point['size']:,}: {point['us']:,.0f} ({point['growth']:.2f})" for point in line["points"]]
        rows.append((f"{name}: {VARIED[name]}", ", ".join(points)))
    lines = [
        "## How a step's cost grows",
        "",
        *prose(
            """Each line varies one size; its points are schedulers in processes of their own, measured in turn as above. 256
            rows decode, but in the last line, where one request of 17 tokens comes and goes in a pool that the tree fills: a
            page is evicted for it, and one published by it. In brackets: the ratio to the first point."""
        ),
        "![Cost of a step over context, pool, queue and tree](scaling.svg)",
        "",
        *table(("varied", "µs"), rows, left=2),
    ]
    for what, why in report["missing"].items():
        lines += prose(f"{what} was not measured: {why}.")
    if held := report["memory"]:
        parts = {part: f"{value / 2**20:,.0f} MiB" for part, value in held["parts_bytes"].items()}
        lines += [
            "## Memory",
            "",
            *prose(
                f"""One scheduler with a pool of {held["pages"]:,} pages, {held["nodes"]:,} nodes of a page in the prefix
                cache and {held["waiting"]:,} waiting requests of {held["prompt_tokens"]:,} tokens has
                **{held["rss_bytes"] / 2**20:,.0f} MiB** in RAM: {parts["imports"]} for Python and its imports,
                {parts["pool"]} for the pool and 1,024 rows of up to 4,096 pages (of which the system counts what was
                touched), {parts["tree"]} for the tree, {parts["queue"]} for the queue. Each part was measured in a process
                of its own."""
            ),
        ]
    return lines


def render(scheduler: Report, scaling: Report) -> str:
    """The whole page."""
    found = aims(scheduler, scaling)
    lines = [
        *heading("Performance of the scheduler", "scheduler", "scaling"),
        *prose(
            """`benchmarks/bench_scheduler.py` and `benchmarks/bench_scaling.py` measured this; `make bench` repeats it. The
            rest is on [the page about performance](../performance.md)."""
        ),
        "## One step, beside the C++ schedulers of TokenSpeed",
        "",
        "Best median in µs; in brackets the peer's time divided by pagemirror's: above 1 pagemirror is faster.",
        "",
        *main_table(scheduler),
        "![One step of each scheduler](scheduler.svg)",
        "",
        *aims_table(found),
        *notes(found),
        "## How it was measured",
        "",
        *method(scheduler),
        "## Where the time goes",
        "",
        *stages(scheduler),
        *profiles(scheduler),
        *growth(scaling),
    ]
    return "\n".join(lines).rstrip() + "\n"


def section(scheduler: Report) -> list[str]:
    """What docs/performance.md says of it."""
    return [
        "## The scheduler alone",
        "",
        *prose(
            """µs that one step costs the scheduler, without a model, beside the C++ schedulers of TokenSpeed: planning,
            handing over, and taking the tokens in. In brackets: the peer's time divided by pagemirror's."""
        ),
        *main_table(scheduler),
        "![One step of each scheduler](performance/scheduler.svg)",
        "",
        "And by itself, over the length of the context, the sizes of pool, queue and prefix cache:",
        "",
        "![Cost of a step over context, pool, queue and tree](performance/scaling.svg)",
        "",
        *prose(
            """[Performance of the scheduler](performance/scheduler.md) says what is counted for whom, where the time goes,
            how a step's cost grows with context, pool, queue and prefix cache, and what memory it takes."""
        ),
    ]
