"""Microseconds that a scheduler takes for one step, beside the C++ schedulers of TokenSpeed.

    python benchmarks/bench_scheduler.py [--json FILE] [--quick] [--rounds N]

No model and no other process takes part: this is the time that one step costs the scheduler's process alone. Lines:

    64 x 1k, 256 x 1k, 256 x 8k, 1024 x 1k   so many rows with so much context decode, one token a row a step, page 16
    admit cold 1k                            one prompt of 1,024 tokens that nobody has sent before, nothing else running
    admit cold 1k, evict                     the same, with a pool that is full of cached pages, of which some must be evicted
    admit cached 1k                          one prompt that was here before, so that all but its last page is cached

Parties, and what counts of a decode step / of an admission:

    ours                       pagemirror: plan, encode the op into the bytes of its message, decode the bytes of the result,
                               complete, take the tokens out / submit a numpy prompt, plan, which gives its columns
    tokenspeed_0.1.0           next_execution_plan, read the columns out, advance with a token for each row / make a request
    tokenspeed_0.1.42          of a numpy prompt and submit it, next_execution_plan, read the columns out
    tokenspeed_0.1.42_coarse   0.1.42 with prefixes shared by 64 tokens instead of a page of 16: it finds less, and is faster

The peers have no wire, so they encode nothing: what they hand over stays lists and arrays in their process. Reading those out
counts, because no runtime can do without; turning lists into arrays does not count, although it needs that, too. Nor does it
count that stop tokens and length limits are their caller's business, while pagemirror's `complete` looks at both. The peers
have the fastest settings found, see `_party_tokenspeed.py`. Of an admission, pagemirror's encoding (`encode`) and what follows
when a request ends (`leave`) are measured and reported, but not counted.

Rows differ in length by up to a page, so that each step has rows that need a page. Each party runs in a process of its own,
all set up at once and measured in turn, some milliseconds each, in an order that turns. That is done several times with new
processes, because what is bound by memory varies severalfold with the machine's other load; a party's figure is the best of
its runs' medians, all of which are in the JSON. Only ratios mean much elsewhere. Ratios are a peer's time divided by ours:
above 1 pagemirror is faster.

The peers come from PyPI into environments of their own below --peers, which are kept. A peer that cannot be installed is said
so and left out.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _peers import PeerMissingError, environment_with
from _report import PLOTS, Report, machine, plot, print_table, progress, write_json
from _scheduler_lines import LINES, PAGE_SIZE, PROMPT_TOKENS, QUICK_LINES, Line, line_named
from _workers import Worker, WorkerError

HERE = Path(__file__).resolve().parent
OURS = "ours"
PEERS = {
    # party: version, prefix granularity
    "tokenspeed_0.1.0": ("0.1.0", PAGE_SIZE),
    "tokenspeed_0.1.42": ("0.1.42", PAGE_SIZE),
    "tokenspeed_0.1.42_coarse": ("0.1.42", 64),
}
PARTIES = (OURS, *PEERS)
STEPS, QUICK_STEPS = 24, 10  # of each round
# line, party, at least: the peer's time divided by ours
AIMS = (
    ("256 x 1k", "tokenspeed_0.1.0", 5.0),
    ("256 x 1k", "tokenspeed_0.1.42", 15.0),
    ("256 x 8k", "tokenspeed_0.1.42", 100.0),
    ("admit cold 1k", "tokenspeed_0.1.0", 0.5),
    ("admit cold 1k", "tokenspeed_0.1.42", 4.0),
    ("admit cached 1k", "tokenspeed_0.1.42", 2.0),
)

NOT_COUNTED = ("encode", "leave")  # of an admission
PROFILED = {"count": 40, "batches": 9}  # steps or admissions

Samples = dict[str, dict[str, list[int]]]  # party → stage → nanoseconds


def commands(parties: list[str], folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How each party's process is started, and why others have none."""
    found, missing = {}, {}
    for party in parties:
        if party == OURS:
            found[party] = [sys.executable, str(HERE / "_party_ours.py")]
            continue
        number, granularity = PEERS[party]
        try:
            python = environment_with(folder / f"tokenspeed-{number}", f"tokenspeed-scheduler=={number}", "numpy")
        except PeerMissingError as error:
            missing[party] = f"tokenspeed-scheduler {number} cannot be installed: {error}"
            progress(f"{party} is left out: {missing[party]}")
        else:
            found[party] = [str(python), str(HERE / "_party_tokenspeed.py"), str(granularity)]
    return found, missing


def measure(line: Line, starts: dict[str, list[str]], rounds: int, steps: int, failed: dict[str, str]) -> Samples:
    """Samples of one run of a line, in new processes. Parties that fail are taken out of `starts` and noted in `failed`."""
    samples: Samples = {}
    with ExitStack() as stack:
        workers = {party: stack.enter_context(Worker(party, command)) for party, command in starts.items()}

        def ask(party: str, do: str, **fields: Any) -> None:
            try:
                answer = workers[party].ask(do, **fields)
            except WorkerError as error:
                failed[party] = f"{line.name}: {error}"
                progress(f"{party} failed: {failed[party]}")
                del workers[party], starts[party]
                samples.pop(party, None)
                return
            for stage, times in answer.items():
                samples.setdefault(party, {}).setdefault(stage, []).extend(times)

        for party in list(workers):
            if line.rows:
                ask(party, "rows", rows=line.rows, context=line.context, steps=rounds * steps)
            else:
                ask(party, "idle", prompts=line.pool_prompts)
        for number in range(rounds):
            turn = list(workers)
            shift = number % len(turn) if turn else 0
            for party in turn[shift:] + turn[:shift]:
                if line.rows:
                    ask(party, "steps", count=steps)
                else:
                    ask(party, "admit", cached=line.cached, count=steps)
    return samples


def profile(line: Line) -> list[Any]:
    """Where ours spends a line, in a process of its own: functions, their share of the time, calls in each step."""
    with Worker(OURS, [sys.executable, str(HERE / "_party_ours.py")]) as worker:
        if line.rows:
            worker.ask("rows", rows=line.rows, context=line.context, steps=PROFILED["count"] * PROFILED["batches"])
            answer = worker.ask("profile", **PROFILED)
        else:
            worker.ask("idle", prompts=line.pool_prompts)
            answer = worker.ask("profile", **PROFILED, cached=line.cached)
    functions: list[Any] = answer["functions"]
    return functions


def summarize(line: Line, runs: list[Samples]) -> Report:
    """Of each party the run with the best median: medians of its stages and of their sum, in µs; and ratios."""
    parties: Report = {}
    for samples in runs:
        for party, stages in samples.items():
            others = {} if line.rows else {stage: stages.pop(stage) for stage in NOT_COUNTED if stage in stages}
            totals = [sum(times) / 1e3 for times in zip(*stages.values(), strict=True)]
            row = {
                "us": round(median(totals), 2),
                "fastest_us": round(min(totals), 2),
                "num_samples": len(totals),
                "stages_us": {stage: round(median(times) / 1e3, 2) for stage, times in stages.items()},
                "not_counted_us": {stage: round(median(times) / 1e3, 2) for stage, times in others.items()},
            }
            best = parties.setdefault(party, row)
            medians = [*best.get("runs_us", []), row["us"]]
            parties[party] = (row if row["us"] < best["us"] else best) | {"runs_us": medians}
    found: Report = {"parties": parties}
    if OURS in parties:
        for party in PEERS:
            if party in parties:
                found[f"ratio_vs_{party}"] = round(parties[party]["us"] / parties[OURS]["us"], 2)
    return found


def aims(lines: Report) -> list[Report]:
    """The ratios that are aimed at, and whether they were reached; those of parties that did not run are left out."""
    found = []
    for line, party, aim in AIMS:
        value = lines.get(line, {}).get(f"ratio_vs_{party}")
        if value is not None:
            found.append({"line": line, "party": party, "aim": aim, "value": value, "reached": value >= aim})
    return found


def run(options: argparse.Namespace) -> Report:
    """Everything, as one JSON object."""
    steps = QUICK_STEPS if options.quick else STEPS
    lines: Report = {}
    report: Report = {
        "benchmark": "scheduler",
        "quick": options.quick,
        "runs": options.runs,
        "rounds": options.rounds,
        "steps_per_round": steps,
        "page_size": PAGE_SIZE,
        "prompt_tokens": PROMPT_TOKENS,
        "machine": machine("pagemirror", "numpy", "protobuf"),
        "lines": lines,
    }
    starts, report["missing"] = commands(options.parties, options.peers)
    for name in options.lines:
        line = line_named(name)
        runs = [measure(line, starts, options.rounds, steps, report["missing"]) for _ in range(options.runs)]
        lines[name] = summarize(line, runs)
        said = ", ".join(f"{party} {row['us']:,.1f}" for party, row in lines[name]["parties"].items())
        progress(f"{name}: {said} µs")
    report["aims"] = aims(lines)
    missed = dict.fromkeys(aim["line"] for aim in report["aims"] if not aim["reached"])
    report["profiles"] = {name: profile(line_named(name)) for name in missed}
    return report


def print_report(report: Report) -> None:
    """The table for a reader."""
    parties = [party for party in PARTIES if any(party in line["parties"] for line in report["lines"].values())]
    peers = [party for party in parties if party != OURS]
    rows = []
    for name, line in report["lines"].items():
        times = [f"{line['parties'][party]['us']:,.1f}" if party in line["parties"] else "-" for party in parties]
        ratios = [f"{line[f'ratio_vs_{party}']:,.2f}" if f"ratio_vs_{party}" in line else "-" for party in peers]
        rows.append([name, *times, *ratios])
    print("best medians in µs; ratios: the peer's time divided by ours")
    print_table(["line", *(f"{party}" for party in parties), *(f"ratio_vs_{party}" for party in peers)], rows)
    print("\nstages of ours in µs")
    for name, line in report["lines"].items():
        if OURS in line["parties"]:
            row = line["parties"][OURS]
            stages = row["stages_us"] | {f"({stage}, not counted)": us for stage, us in row["not_counted_us"].items()}
            print(f"    {name:<20} " + ", ".join(f"{stage} {value:,.1f}" for stage, value in stages.items()))
    print("\ncounted: ours with encoding and decoding of the step's messages; the peers without a wire, reading out included")
    for aim in report["aims"]:
        reached = "" if aim["reached"] else ", NOT REACHED"
        print(f"{aim['line']}: {aim['value']:.2f} x of {aim['party']}, aimed at {aim['aim']:g}{reached}")
    for name, functions in report["profiles"].items():
        print(f"{name}, where ours spends it (a profiler's shares, which make small functions look larger):")
        for function, share, calls in functions:
            print(f"    {share:>6.1%}  {calls:>7.1f} calls  {function}")
    for party, why in report["missing"].items():
        print(f"{party} did not run: {why}")


def draw(report: Report, folder: Path) -> None:
    """Bars of every line, on a logarithmic axis."""
    with plot(folder / "scheduler.svg", width=9, height=4) as axes:
        if axes is None:
            return
        (axis,) = axes
        names = list(report["lines"])
        parties = [party for party in PARTIES if any(party in line["parties"] for line in report["lines"].values())]
        width = 0.8 / max(1, len(parties))
        colours = ["#1b6ca8", "#e07b39", "#8c564b", "#c9a58f"]
        for index, party in enumerate(parties):
            places = [number + (index - (len(parties) - 1) / 2) * width for number in range(len(names))]
            values = [report["lines"][name]["parties"].get(party, {}).get("us", float("nan")) for name in names]
            label = "pagemirror" if party == OURS else party.replace("_coarse", ", prefixes by 64").replace("_", " ")
            bars = axis.bar(places, values, width * 0.95, label=label, color=colours[PARTIES.index(party)])
            axis.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=6, padding=1)
        axis.set_yscale("log")
        axis.set_xticks(range(len(names)), names)
        axis.set_ylabel("µs, median (logarithmic)")
        axis.set_title("Scheduler: one decode step of rows x context, one admission")
        axis.legend(frameon=False, fontsize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report to this file")
    parser.add_argument("--quick", action="store_true", help="one run of two short rounds, without the largest lines")
    parser.add_argument("--runs", type=int, help="runs in new processes  [default: 4, with --quick 1]")
    parser.add_argument("--rounds", type=int, help=f"rounds of {STEPS} steps a party in each  [default: 6, with --quick 2]")
    parser.add_argument("--lines", nargs="+", choices=[line.name for line in LINES], metavar="LINE", help="only these lines")
    parser.add_argument("--parties", nargs="+", choices=PARTIES, default=list(PARTIES), help="only these  [default: all]")
    parser.add_argument(
        "--peers", type=Path, default=HERE.parent / "build" / "peers", metavar="FOLDER",
        help="where the peers' environments are kept  [default: build/peers of the project]",
    )  # fmt: skip
    parser.add_argument(
        "--plots", type=Path, default=PLOTS, metavar="FOLDER", help="where to draw  [default: docs/performance]"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; --quick draws nothing either")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 2 if options.quick else 6
    if options.runs is None:
        options.runs = 1 if options.quick else 4
    if min(options.rounds, options.runs) < 1:
        parser.error("--rounds and --runs take numbers from 1")
    options.lines = options.lines or list(QUICK_LINES if options.quick else [line.name for line in LINES])
    report = run(options)
    write_json(options.json, report)
    print_report(report)
    if not (options.quick or options.no_plot):
        draw(report, options.plots)
    return 0 if any(line["parties"] for line in report["lines"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
