"""What the benchmark scripts share: what the machine is, medians, tables, JSON files and plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

PLOT_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
PACKAGES = ("numpy", "torch", "grpcio", "uvloop", "protobuf")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "missing"
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": packages,
        "load_before": round(os.getloadavg()[0], 2),
    }


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
    """A table in plain text: the first column to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(header)]
    print(title)
    for row in [list(header), *cells]:
        first, rest = row[0].ljust(widths[0]), (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("    " + "  ".join([first, *rest]).rstrip())
    print()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all of these scripts have."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    parser.add_argument("--quick", action="store_true", help="a few rounds of a few cases: whether it works, not how fast")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing into docs/performance/")


def finish(report: dict[str, Any], options: argparse.Namespace, name: str, draw: Callable[[Any], None]) -> None:
    """Write the report where it was asked for, and draw it. `draw` gets a matplotlib figure."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.no_plot or options.quick:
        return
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw(figure)
    PLOT_FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT_FOLDER / f"{name}.svg")
    print(f"drew {PLOT_FOLDER / name}.svg", file=sys.stderr)


def aim(name: str, value: float, limit: float, *, at_most: bool) -> dict[str, Any]:
    """One ratio that is aimed at, and whether it was reached."""
    reached = value <= limit if at_most else value >= limit
    return {"aim": name, "value": round(value, 3), "limit": limit, "at_most": at_most, "reached": reached}


def print_aims(aims: Sequence[dict[str, Any]]) -> None:
    """A line for each."""
    for item in aims:
        relation = "at most" if item["at_most"] else "at least"
        print(f"{item['aim']}: {item['value']:g}, aimed at {relation} {item['limit']:g}{'' if item['reached'] else ', MISSED'}")
