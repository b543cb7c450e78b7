"""docs/performance.md and the pages below it: their figures are those of the benchmarks' reports, and fit them either way."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Reports = dict[str, Any]


@pytest.fixture(scope="module")
def writer(project_root: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(project_root / "tools")
        import write_performance

    return write_performance


@pytest.fixture
def kept(writer: ModuleType) -> Reports:
    """The reports that the pages were made from, to be changed at will."""
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in writer.REPORTS.items()}


def test_page_is_what_its_report_gives(project_root: Path) -> None:
    """The pages were generated from the reports beside them, and not edited since."""
    command = [sys.executable, project_root / "tools" / "write_performance.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_page_is_of_a_quick_run(kept: Reports) -> None:
    """What is kept was measured in earnest."""
    assert [name for name, report in kept.items() if report["quick"]] == []


def test_figures_come_from_the_report(writer: ModuleType, kept: Reports) -> None:
    """Every party's median stands in the page, and a changed one changes it."""
    render, report = writer.generate_page.render, kept["generate"]
    page = render(report)
    assert set(report["cases"]) >= {"equal-64", "mixed-64"}
    for name, case in report["cases"].items():
        assert set(case["parties"]) >= {"generate", "execute", "static"}
        for party, row in case["parties"].items():
            assert f"{row['tokens_per_second']:,.0f}" in page, (name, party)
            assert row["tokens_per_second"] > 0
    changed = copy.deepcopy(report)
    changed["cases"]["equal-64"]["parties"]["generate"]["tokens_per_second"] = 7_654_321.0
    assert "7,654,321" in render(changed)
    assert changed != report
    missed = copy.deepcopy(report)
    missed["aims"] = [{"case": "equal-64", "ratio": "generate/static", "aim": 0.85, "value": 0.5, "reached": False}]
    assert "| 0.50 | **no** |" in render(missed)


def test_scheduler_figures_come_from_their_reports(writer: ModuleType, kept: Reports) -> None:
    """Medians, ratios and aims of both reports stand in the scheduler's page and in the section that leads to it."""
    scheduler, scaling = kept["scheduler"], kept["scaling"]
    page = writer.scheduler_page.render(scheduler, scaling)
    section = "\n".join(writer.scheduler_page.section(scheduler))
    assert set(scheduler["lines"]) == {
        "64 x 1k",
        "256 x 1k",
        "256 x 8k",
        "1024 x 1k",
        "admit cold 1k",
        "admit cold 1k, evict",
        "admit cached 1k",
    }
    for line in scheduler["lines"].values():
        assert set(line["parties"]) >= {"ours", "tokenspeed_0.1.0", "tokenspeed_0.1.42"}
        for party, row in line["parties"].items():
            assert row["us"] == min(row["runs_us"])
            ratio = "" if party == "ours" else f" ({line[f'ratio_vs_{party}']:.2f}×)"
            assert f"| {row['us']:,.0f}{ratio} |" in page
            assert f"| {row['us']:,.0f}{ratio} |" in section
    for line in scaling["lines"].values():
        for point in line["points"]:
            assert f"{point['size']:,}: {point['us']:,.0f} ({point['growth']:.2f})" in page
    assert f"**{scaling['memory']['rss_bytes'] / 2**20:,.0f} MiB**" in page
    assert len(scheduler["aims"]) == 6
    assert len(scaling["aims"]) == 3
    aims = writer.scheduler_page.aims(scheduler, scaling)
    assert len(aims) == 6 + 2 + 3
    assert page.count("| **no** |") == sum(not aim.reached for aim in aims)
    assert set(scheduler["profiles"]) == {aim["line"] for aim in scheduler["aims"] if not aim["reached"]}


def test_figures_of_wire_streams_and_mirror_come_from_their_reports(writer: ModuleType, kept: Reports) -> None:
    """Ratios, rates and times of the three reports stand in their pages."""
    wire, mirror, streaming = (getattr(writer, f"{name}_page").render(kept[name]) for name in ("wire", "mirror", "streaming"))
    assert f"**{kept['wire']['trip']['ratio']:.2f}**" in wire
    for policy, row in kept["wire"]["policies"].items():
        assert f"| `{policy}` | {row['bytes_mean']:,} |" in wire
    for row in kept["wire"]["bubble"]:
        assert f"{row['of_ideal']:.1%} ({max(0, row['bubble_us']):,} µs)" in wire
    for case in kept["mirror"]["cases"]:
        us = case["us"]
        assert f"({us['per_row'] / us['mirror']:.2f}×)" in mirror
    assert {(case["streams"], case["step_ms"]) for case in kept["streaming"]["served"]} >= {
        (streams, step_ms) for streams in (256, 1024) for step_ms in (0, 5, 20)
    }
    for case in kept["streaming"]["served"]:
        none = case["kinds"]["none"]["step_p99_us"]
        for found in case["kinds"].values():
            assert f"| {found['tokens_per_s']:,.0f} |" in streaming
            assert f"{found['step_p99_us'] / 1000:,.2f} ({found['step_p99_us'] / none:.2f}×)" in streaming


def test_every_aim_is_on_the_main_page(writer: ModuleType, kept: Reports) -> None:
    """One table has all aims, each with what was measured, and says how many were reached."""
    page = writer.performance_page.render(kept)
    aims = [aim for _, aim in writer.performance_page.aims(kept)]
    assert "have not run on a GPU" in page
    assert len({aim.key for aim in aims}) == len(aims) == 11 + 2 + 5 + 3 + 4
    assert f"{sum(aim.reached for aim in aims)} of {len(aims)}." in page
    for aim in aims:
        assert f"| {aim.what} | {aim.limit} | {aim.value} | {'yes' if aim.reached else '**no**'} |" in page


def test_note_is_shown_while_its_aim_is_missed(writer: ModuleType, kept: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why an aim was missed stands on both pages as long as it is, and no longer."""
    notes = writer.performance_page.notes.__globals__["NOTES"]
    monkeypatch.setitem(notes, "wire: round trip of a step, no-op model / bare echo", "Because of the weather.")
    for reached in (True, False):
        for item in kept["wire"]["aims"]:
            item["reached"] = reached
        pages = writer.wire_page.render(kept["wire"]), writer.performance_page.render(kept)
        assert ["Because of the weather." in page for page in pages] == [not reached] * 2


def test_notes_are_of_aims_that_there_are(writer: ModuleType, kept: Reports) -> None:
    """No note waits for an aim by a name that nothing has."""
    keys = {aim.key for _, aim in writer.performance_page.aims(kept)}
    assert writer.performance_page.notes.__globals__["NOTES"].keys() <= keys


def test_what_did_not_run_is_said_so(writer: ModuleType, kept: Reports) -> None:
    """A peer that was missing is named on the main page, with the reason."""
    kept["scheduler"]["missing"] = {"tokenspeed_0.1.0": "no such wheel"}
    page = writer.performance_page.render(kept)
    assert "- tokenspeed_0.1.0: no such wheel" in page


def test_benchmark_draws_the_same_requests_everywhere(project_root: Path) -> None:
    """Prompts come from a seed: each party's process draws the same ones, within the stated lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(project_root / "benchmarks")
        import _workload as workload
    equal, mixed = workload.Case.parse("equal-64"), workload.Case.parse("mixed-64")
    assert {(len(job.prompt), job.num_new) for job in equal.jobs()} == {(128, 64)}
    jobs = mixed.jobs()
    assert jobs == workload.Case("mixed", 64).jobs() != workload.Case("mixed", 16).jobs()
    assert len(jobs) == 64
    assert {32 <= len(job.prompt) <= 128 and 8 <= job.num_new <= 64 for job in jobs} == {True}
    assert len({len(job.prompt) for job in jobs}) > 16
    assert all(0 <= token < workload.VOCAB_SIZE for job in jobs for token in job.prompt)
