"""`pagemirror simulate`: run scenario files and say what happened, as tables or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from scheduler_service.console import make_console
from scheduler_service.core.config import RefreshPolicy
from scheduler_service.in_process_runtime import RuntimeMissingError
from scheduler_service.scenario import Scenario, ScenarioError, load_scenario
from scheduler_service.simulation import Simulation
from scheduler_service.simulation_report import StepLine, Summary, as_json

EXIT_OK, EXIT_VIOLATED, EXIT_BAD_FILE = 0, 1, 2


def main(files: Sequence[str | Path], refresh_policy: str | None = None, json_output: bool = False) -> int:
    """Run each file; returns the exit status: 0 no invariant violated, 1 some was, 2 a file that cannot be run.

    All files are read before the first one runs, so a bad one costs no half-printed output. `files` are named in messages and
    output as they are given here: a Path has lost a leading `./`, a str has not.
    """
    scenarios: list[Scenario] = []
    bad = False
    for file in files:
        try:
            scenarios.append(load_scenario(file))
        except ScenarioError as error:
            print(f"error: {error}", file=sys.stderr)
            bad = True
    if refresh_policy is not None:
        try:
            policy = RefreshPolicy(refresh_policy)
        except ValueError:
            known = ", ".join(RefreshPolicy)
            print(f"error: --refresh-policy is {refresh_policy!r}, but must be one of {known}", file=sys.stderr)
            return EXIT_BAD_FILE
        scenarios = [scenario.with_policy(policy) for scenario in scenarios]
    if bad:
        return EXIT_BAD_FILE
    try:
        violated = [_run_json(scenario) if json_output else _run_tables(scenario) for scenario in scenarios]
    except (RuntimeMissingError, ScenarioError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_FILE
    return EXIT_VIOLATED if any(violated) else EXIT_OK


def _start(scenario: Scenario) -> Simulation:
    """Raises ScenarioError: this machine has not the memory for rows and pages of that size."""
    try:
        return Simulation(scenario)
    except (MemoryError, RuntimeError) as error:  # the second is torch's word for it
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        sizes = scenario.config
        problem = (
            f"no memory for {sizes.num_pages} pages of {sizes.page_size} tokens and {sizes.max_rows} rows of "
            f"{sizes.max_pages_per_row} pages: {str(error).splitlines()[0] if str(error) else 'MemoryError'}"
        )
        raise ScenarioError(scenario.path, None, "num_pages, page_size, max_rows, max_pages_per_row", problem) from error


def _run_json(scenario: Scenario) -> bool:
    simulation = _start(scenario)
    while (line := simulation.step()) is not None:
        print(json.dumps(as_json(line, scenario.path)))
    print(json.dumps({"file": scenario.path, "summary": asdict(simulation.summary)}), flush=True)
    return bool(simulation.summary.violations)


def _run_tables(scenario: Scenario) -> bool:
    simulation = _start(scenario)
    console = make_console()
    config = scenario.config
    console.print(
        f"[bold]{escape(scenario.path)}[/]  page_size {config.page_size}, {config.num_pages} pages, {config.max_rows} rows, "
        f"refresh_policy {config.refresh_policy}, overlap_depth {config.overlap_depth}"
    )
    table = Table("step", "request", "cause", "begin", "size", "full", "scheduler row", "mirror row", "sampled", "ended")
    while (line := simulation.step()) is not None:
        _add_step(table, line)
    console.print(table)
    console.print(_summary_table(simulation.summary))
    for violation in simulation.summary.violations:
        console.print(f"[bold red]violation[/] {escape(violation)}")
    summary = simulation.summary
    verdict = "[bold red]violated[/]" if summary.violations else "[bold green]ok[/]"
    console.print(f"{verdict}: {summary.steps} steps, {summary.pages_sent} page ids sent")
    return bool(summary.violations)


def _add_step(table: Table, line: StepLine) -> None:
    planned = {op.request: op for op in line.ops}
    names = list(dict.fromkeys((*planned, *line.rows, *line.sampled, *line.ended)))
    for index, name in enumerate(names or [""]):
        op = planned.get(name)
        row = op.occupied_pages if op is not None else line.rows.get(name)
        mirror = line.applied.get(name, line.mirror.get(name))
        style = "red" if row != mirror else ""
        table.add_row(
            str(line.step) if index == 0 else "",
            escape(name) if name else "(nothing planned)",
            op.cause.value if op else "",
            str(op.begin) if op else "",
            str(op.size) if op else "",
            ("yes" if op.full_refresh else "no") if op else "",
            escape(str(row)) if row is not None else "",
            escape(str(mirror)) if mirror is not None else "",
            str(line.sampled.get(name, "")),
            line.ended.get(name, ""),
            style=style,
            end_section=index == len(names) - 1,
        )


def _summary_table(summary: Summary) -> Table:
    table = Table("request", "output", "finish", "cached tokens", "retractions")
    for name, output in summary.outputs.items():
        table.add_row(
            escape(name),
            " ".join(map(str, output)),
            summary.finish.get(name, "not finished"),
            str(summary.cached_tokens[name]),
            str(summary.retractions[name]),
        )
    return table
