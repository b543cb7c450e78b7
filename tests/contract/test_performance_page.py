"""docs/performance.md: its figures are those of the benchmark's report, and the benchmark gives what the page needs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def writer(project_root: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(project_root / "tools")
        import write_performance

    return write_performance


def test_page_is_what_its_report_gives(project_root: Path) -> None:
    """The pages were generated from the reports beside them, and not edited since."""
    command = [sys.executable, project_root / "tools" / "write_performance.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_figures_come_from_the_report(project_root: Path, writer: ModuleType) -> None:
    """Every party's median stands in the page, and a changed one changes it."""
    report = json.loads((project_root / "docs" / "performance.json").read_text())
    page = writer.render(report)
    assert "have not run on a GPU" in page
    assert set(report["cases"]) >= {"equal-64", "mixed-64"}
    for name, case in report["cases"].items():
        assert set(case["parties"]) >= {"generate", "execute", "static"}
        for party, row in case["parties"].items():
            assert f"{row['tokens_per_second']:,.0f}" in page, (name, party)
            assert row["tokens_per_second"] > 0
    changed = copy.deepcopy(report)
    changed["cases"]["equal-64"]["parties"]["generate"]["tokens_per_second"] = 7_654_321.0
    assert "7,654,321" in writer.render(changed)
    assert changed != report
    missed = copy.deepcopy(report)
    missed["aims"] = [{"case": "equal-64", "ratio": "generate/static", "aim": 0.85, "value": 0.5, "reached": False}]
    assert "| 0.50 | **no** |" in writer.render(missed)


def test_scheduler_figures_come_from_their_reports(project_root: Path, writer: ModuleType) -> None:
    """Medians, ratios and aims of both reports stand in the scheduler's page and in the section that leads to it."""
    folder = project_root / "docs" / "performance"
    scheduler, scaling = (json.loads((folder / f"{name}.json").read_text()) for name in ("scheduler", "scaling"))
    page = writer.scheduler_page.render(scheduler, scaling)
    section = "\n".join(writer.scheduler_page.section(scheduler))
    assert not scheduler["quick"]
    assert not scaling["quick"]
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
    assert page.count("| **no** |") == sum(not aim["reached"] for aim in scheduler["aims"] + scaling["aims"])
    assert set(scheduler["profiles"]) == {aim["line"] for aim in scheduler["aims"] if not aim["reached"]}


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
