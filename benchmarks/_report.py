"""What the benchmarks share around their figures: the machine, progress, tables, JSON and plots."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Report = dict[str, Any]

PLOTS = Path(__file__).resolve().parent.parent / "docs" / "performance"


def progress(text: str) -> None:
    """Say something on stderr; stdout is the report's."""
    print(text, file=sys.stderr, flush=True)


def machine(*packages: str) -> dict[str, Any]:
    """What the figures were measured on, with the installed versions of these distributions."""
    names = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": versions,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as what is in them, the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def write_json(file: Path | None, report: Report) -> None:
    """The report as a file, if one is wanted; folders are made."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        progress(f"wrote {file}")


@contextmanager
def plot(file: Path, columns: int = 1, *, width: float = 8.0, height: float = 4.0) -> Iterator[list[Any] | None]:
    """Axes of a figure that is written to `file` as SVG on leaving; None, and a word on stderr, where matplotlib is missing.

    The same figures give the same bytes: no date, no random ids, text as text.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        progress(f"no plot: matplotlib is not installed here, which {file.name} needs (the project's extra `bench` has it)")
        yield None
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": file.name, "font.family": "sans-serif", "font.size": 9}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
        for axis in axes[0]:
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
            axis.grid(axis="y", color="0.9")
        yield list(axes[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)
    # matplotlib ends some lines of paths with a space.
    lines = [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    progress(f"wrote {file.name}")
