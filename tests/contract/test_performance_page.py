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
    """The page was generated from the report beside it, and not edited since."""
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
