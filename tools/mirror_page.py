"""docs/performance/mirror.md, and the section of docs/performance.md that leads to it, from the report of
benchmarks/bench_mirror.py.
"""

from __future__ import annotations

from page_parts import Aim, Report, aims_table, heading, machine_line, notes, number, plain_aims, prose, table

PARTIES = {
    "mirror": "pagemirror",
    "five_copies": "five copies, one kernel",
    "index_put": "`index_put_`",
    "per_row": "assignment per row",
    "memcpy": "memcpy",
}
MAIN = ("decode", 256, 1), ("refresh", 256, 16), ("refresh", 256, 128)


def aims(report: Report) -> list[Aim]:
    """What was aimed at."""
    return plain_aims("mirror", report)


def cases_table(cases: list[Report]) -> list[str]:
    """µs of every party, and the ratio to the mirror's in brackets."""
    rows = []
    for case in cases:
        us = case["us"]
        cells = [number(us["mirror"])]
        cells += [f"{number(us[party])} ({us[party] / us['mirror']:.2f}×)" for party in PARTIES if party != "mirror"]
        what = (
            case["kind"]
            if case["kind"] == "decode"
            else f"{case['kind']}, {case['pages']} page{'s' * (case['pages'] > 1)} a row"
        )
        rows.append((what, str(case["rows"]), *cells))
    return table(("µs", "rows", *PARTIES.values()), rows)


def render(report: Report) -> str:
    """The whole page."""
    found, op = aims(report), report["op"]
    lines = [
        *heading("Performance of the mirror", "mirror"),
        *prose(
            """What it costs to bring the runtime's table of page rows up to date, on a CPU. `benchmarks/bench_mirror.py`
            measured this; `make bench` repeats it. The rest is on [the page about performance](../performance.md)."""
        ),
        "![Time of a refresh by pages, and of a decode step by rows](mirror.svg)",
        "",
        *aims_table(found),
        *notes(found),
        "## Writing a step's pages",
        "",
        *prose(
            """*decode*: each 16th row gets one page, as in a step in which every row decodes a token. *refresh*: all rows are
            rewritten. µs, median; in brackets the ratio to pagemirror's: above 1 pagemirror is faster."""
        ),
        *cases_table(report["cases"]),
        *prose(
            """pagemirror checks the op against what it holds, packs it into one staging buffer and writes it in one launch, on
            a CPU by the kernel's numpy twin. *Five copies, one kernel* is how engines do it: five arrays (rows, begins,
            lengths, offsets, pages) each made a tensor and copied, then one kernel that works out where each page goes.
            `index_put_` gets indices that were made before and are not part of its time, and checks nothing. *Assignment per
            row* is `mirror[row, begin:end] = pages`. *memcpy* copies the same bytes from one buffer to another: what cannot be
            beaten."""
        ),
        "## A whole op",
        "",
        *prose("256 decode rows, from the bytes of the message to the mirror; µs, medians over the steps:"),
        *table(tuple(op), [[number(value) for value in op.values()]], left=0),
        "## How it was measured",
        "",
        *prose(
            f"""One process with one thread; each party runs ten times in a row, and the parties take turns. Without a GPU
            there are no launches to save, so this is the price of the host's part. {machine_line(report)}"""
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def section(report: Report) -> list[str]:
    """What docs/performance.md says of it."""
    by_size = {(case["kind"], case["rows"], case["pages"]): case for case in report["cases"]}
    return [
        "## The mirror of the page rows",
        "",
        *prose(
            """µs to bring the runtime's table up to date on a CPU, beside other ways of writing the same pages; in brackets
            the other's time divided by pagemirror's."""
        ),
        *cases_table([by_size[key] for key in MAIN if key in by_size]),
        "![Time of a refresh by pages, and of a decode step by rows](performance/mirror.svg)",
        "",
        *prose(
            """[Performance of the mirror](performance/mirror.md) has all sizes, what each way does, and what the checks of an
            op cost."""
        ),
    ]
