"""What the benchmarks of wire, mirror and streams share beyond `_report.py`: medians in turn, tables, aims, options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _report import PLOTS, Report, plot, write_json
from _report import print_table as print_columns

PACKAGES = ("pagemirror", "numpy", "torch", "grpcio", "uvloop", "protobuf")
"""Whose versions matter to these benchmarks."""
COLOURS = ("#1b6ca8", "#e07b39", "#2a9d5c", "#8c564b", "#7f7f7f")
"""Ours first."""


def interleave(parties: dict[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, float]:
    """Median microseconds of one call of each party.

    Each round times `repeat` calls of one party after another, in an order that turns with the rounds, so that a machine that
    changes its speed changes it for all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in parties}
    names = list(parties)
    for function in parties.values():
        function()
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            function = parties[name]
            begin = perf_counter()
            for _ in range(repeat):
                function()
            samples[name].append((perf_counter() - begin) / repeat * 1e6)
    return {name: median(values) for name, values in samples.items()}


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A titled table; numbers with as many digits as say something."""
    print(title)
    print_columns(header, [[cell(value) for value in row] for row in rows])
    print()


def cell(value: object) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all of these scripts have."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report to this file")
    parser.add_argument("--quick", action="store_true", help="a few rounds of a few cases: whether it works, not how fast")
    parser.add_argument(
        "--plots", type=Path, default=PLOTS, metavar="FOLDER", help="where to draw  [default: docs/performance]"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; --quick draws nothing either")


def finish(report: Report, options: argparse.Namespace, columns: int, draw: Callable[[Report, list[Any]], None]) -> None:
    """Write the report where it was asked for, and draw it: `draw` gets the report and as many axes as `columns`."""
    write_json(options.json, report)
    if options.no_plot or options.quick:
        return
    file = options.plots / f"{report['benchmark']}.svg"
    with plot(file, columns, width=4.5 * columns, height=3.2) as axes:
        if axes is not None:
            draw(report, axes)


def aim(name: str, value: float, limit: float, *, at_most: bool) -> Report:
    """One figure that is aimed at, and whether it was reached."""
    reached = value <= limit if at_most else value >= limit
    return {"aim": name, "value": round(value, 3), "limit": limit, "at_most": at_most, "reached": reached}


def print_aims(aims: Sequence[Report]) -> None:
    """A line for each."""
    for item in aims:
        relation = "at most" if item["at_most"] else "at least"
        reached = "" if item["reached"] else ", NOT REACHED"
        print(f"{item['aim']}: {item['value']:,g}, aimed at {relation} {item['limit']:,g}{reached}")
