"""How the cost of a scheduler's step grows with what does not concern it: context, pool, queue, tree. And its memory.

    python benchmarks/bench_scaling.py [--json FILE] [--quick] [--rounds N]

Each line varies one thing and holds the others; its points are schedulers of that size, each in a process of its own, all set
up at once and measured in turn, so that their ratios hold on a machine whose speed changes:

    context   1k to 32k tokens in each of the rows that decode
    pool      10,000 to 1,000,000 pages
    queue     0 to 10,000 requests that wait behind rows that are all taken
    tree      100 to 100,000 nodes in the prefix cache, while the rows decode
    lives     the same trees, in a pool that they fill: one request of 17 tokens comes, for which a page is evicted, and ends,
              which publishes a page; from its submit to its end

A step is plan, encode, decode and complete, as in bench_scheduler.py, of 256 rows; rows differ in length by up to a page, so
that each step has rows that need one. `growth` is a point's median divided by that of the line's smallest point.

Memory is what one process has in RAM with a pool of 1,000,000 pages and 1,024 rows of up to 4,096 pages, with a tree of 100,000
nodes of a page, and with 10,000 requests waiting whose prompts have 1,024 tokens; what each adds comes from a process with that
alone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from _report import PLOTS, Report, machine, plot, print_table, progress, write_json
from _workers import Worker, WorkerError

HERE = Path(__file__).resolve().parent
ROWS = 256
STEPS, QUICK_STEPS = 24, 8  # of each round
QUICK_POINTS = 2
"""Of each line, with `--quick`."""
AIM = 1.25
"""Most that context, pool and queue may make of the smallest point's cost."""
# line: its points, what a worker is asked, and with which field of that the point varies
LINES: dict[str, tuple[tuple[int, ...], str, str, dict[str, int]]] = {
    "context": ((1024, 2048, 4096, 8192, 16_384, 32_768), "decode", "context", {"rows": ROWS}),
    "pool": ((10_000, 100_000, 1_000_000), "decode", "pages", {"rows": ROWS, "context": 256}),
    "queue": ((0, 100, 1000, 10_000), "decode", "waiting", {"rows": ROWS, "context": 256}),
    "tree": ((100, 1000, 10_000, 100_000), "decode", "nodes", {"rows": ROWS, "context": 256}),
    "lives": ((100, 1000, 10_000, 100_000), "lives", "nodes", {}),
}
AIMED = ("context", "pool", "queue")
MEMORY = {"pages": 1_000_000, "nodes": 100_000, "waiting": 10_000, "prompt_tokens": 1024}
QUICK_MEMORY = {"pages": 100_000, "nodes": 1000, "waiting": 100, "prompt_tokens": 1024}


def worker(name: str) -> Worker:
    """A process for one point."""
    return Worker(name, [sys.executable, str(HERE / "_party_scaling.py")])


def measure(name: str, rounds: int, steps: int, *, quick: bool) -> Report:
    """One line."""
    points, setting, varied, fixed = LINES[name]
    points = points[:QUICK_POINTS] if quick else points
    totals: dict[int, list[float]] = {point: [] for point in points}
    stages: dict[int, dict[str, list[int]]] = {point: {} for point in points}
    asked, extra = ("steps", {"steps": rounds * steps}) if setting == "decode" else ("come_and_go", {})
    progress(f"{name}: setting up {', '.join(f'{point:,}' for point in points)}")
    with ExitStack() as stack:
        workers = {point: stack.enter_context(worker(f"{name} {point}")) for point in points}
        for point in points:
            workers[point].ask(setting, **fixed, **extra, **{varied: point})
        for number in range(rounds):
            shift = number % len(points)
            for point in points[shift:] + points[:shift]:
                answer = workers[point].ask(asked, count=steps)
                totals[point] += [sum(times) / 1e3 for times in zip(*answer.values(), strict=True)]
                for stage, times in answer.items():
                    stages[point].setdefault(stage, []).extend(times)
    smallest = median(totals[points[0]])
    return {
        "rows": fixed.get("rows", 1),
        "points": [
            {
                "size": point,
                "us": round(median(totals[point]), 2),
                "growth": round(median(totals[point]) / smallest, 3),
                "stages_us": {stage: round(median(times) / 1e3, 2) for stage, times in stages[point].items()},
            }
            for point in points
        ],
    }


def memory(sizes: dict[str, int]) -> Report:
    """Bytes in RAM of one process with all of it, and what each part adds to one with the pool alone."""
    nothing = dict.fromkeys(("pages", "nodes", "waiting"), 0) | {"prompt_tokens": sizes["prompt_tokens"]}
    pool = {"pages": sizes["pages"]}
    held = {}
    progress("memory: one process for each part")
    for part, what in (
        ("pool", pool),
        ("tree", pool | {"nodes": sizes["nodes"]}),
        ("queue", pool | {"waiting": sizes["waiting"]}),
        ("all", sizes),
    ):
        with worker("memory") as one:
            held[part] = one.ask("memory", **(nothing | what))
    imports, with_pool = held["pool"]["before"], held["pool"]["after"]
    parts = {"imports": imports, "pool": with_pool - imports}
    parts |= {part: held[part]["after"] - with_pool for part in ("tree", "queue")}
    return {**sizes, "rss_bytes": held["all"]["after"], "parts_bytes": parts}


def run(options: argparse.Namespace) -> Report:
    """Everything, as one JSON object."""
    steps = QUICK_STEPS if options.quick else STEPS
    lines: Report = {}
    report: Report = {
        "benchmark": "scaling",
        "quick": options.quick,
        "rounds": options.rounds,
        "steps_per_round": steps,
        "machine": machine("pagemirror", "numpy", "protobuf"),
        "lines": lines,
        "missing": {},
        "memory": None,
        "aims": [],
    }
    for name in options.lines:
        try:
            lines[name] = measure(name, options.rounds, steps, quick=options.quick)
        except WorkerError as error:
            report["missing"][name] = str(error)
            progress(f"{name} failed: {error}")
            continue
        said = ", ".join(f"{point['size']:,} {point['us']:,.1f} µs" for point in lines[name]["points"])
        progress(f"{name}: {said}")
        if name in AIMED:
            growth = lines[name]["points"][-1]["growth"]
            report["aims"].append({"line": name, "aim": AIM, "value": growth, "reached": growth < AIM})
    if not options.no_memory:
        try:
            report["memory"] = memory(QUICK_MEMORY if options.quick else MEMORY)
        except WorkerError as error:
            report["missing"]["memory"] = str(error)
            progress(f"memory failed: {error}")
    return report


def print_report(report: Report) -> None:
    """The tables for a reader."""
    rows = []
    for name, line in report["lines"].items():
        for point in line["points"]:
            stages = ", ".join(f"{stage} {value:,.1f}" for stage, value in point["stages_us"].items())
            rows.append([name, f"{point['size']:,}", f"{point['us']:,.1f}", f"{point['growth']:.2f}", stages])
    print_table(["line", "size", "µs", "growth", "stages in µs"], rows)
    for aim in report["aims"]:
        reached = "" if aim["reached"] else ", NOT REACHED"
        print(f"{aim['line']}: grows to {aim['value']:.2f} of the smallest, aimed at less than {aim['aim']}{reached}")
    if report["memory"]:
        held = report["memory"]
        parts = ", ".join(f"{part} {value / 2**20:,.0f}" for part, value in held["parts_bytes"].items())
        sizes = f"{held['pages']:,} pages, {held['nodes']:,} tree nodes, {held['waiting']:,} waiting requests of "
        print(f"memory with {sizes}{held['prompt_tokens']:,} tokens: {held['rss_bytes'] / 2**20:,.0f} MiB ({parts})")
    for name, why in report["missing"].items():
        print(f"{name} was not measured: {why}")


def short(size: int) -> str:
    """A number as a label of an axis: 32,768 tokens and 100,000 pages are 32k and 100k."""
    for unit, name in ((10**6, "M"), (1024 if size % 1024 == 0 else 1000, "k")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)


def draw(report: Report, folder: Path) -> None:
    """A curve a line: growth over size."""
    names = list(report["lines"])
    with plot(folder / "scaling.svg", max(1, len(names)), width=2.4 * max(1, len(names)), height=2.6) as axes:
        for axis, name in zip(axes or (), names, strict=bool(axes)):
            points = report["lines"][name]["points"]
            axis.plot([point["us"] for point in points], marker="o", color="#1b6ca8")
            axis.set_xticks(range(len(points)), [short(point["size"]) for point in points])
            axis.set_ylim(0, 1.5 * max(point["us"] for point in points))
            axis.set_title(name)
            axis.set_ylabel("µs, median" if name == names[0] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report to this file")
    parser.add_argument("--quick", action="store_true", help="two short rounds of each line's first points, and a small memory")
    parser.add_argument("--rounds", type=int, help=f"rounds of {STEPS} steps a point  [default: 8, with --quick 2]")
    parser.add_argument("--lines", nargs="+", choices=list(LINES), default=list(LINES), help="only these  [default: all]")
    parser.add_argument("--no-memory", action="store_true", help="leave out what the process has in RAM")
    parser.add_argument(
        "--plots", type=Path, default=PLOTS, metavar="FOLDER", help="where to draw  [default: docs/performance]"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; --quick draws nothing either")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 2 if options.quick else 8
    if options.rounds < 1:
        parser.error("--rounds takes numbers from 1")
    report = run(options)
    write_json(options.json, report)
    print_report(report)
    if not (options.quick or options.no_plot):
        draw(report, options.plots)
    return 0 if report["lines"] else 1


if __name__ == "__main__":
    sys.exit(main())
