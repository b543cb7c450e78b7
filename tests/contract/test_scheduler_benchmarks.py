"""benchmarks/bench_scheduler.py and bench_scaling.py: they explain themselves, and what they print can be read and checked.

No time is asserted: how fast anything is, is for the benchmarks to say.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(project_root: Path, child_env: dict[str, str], tmp_path: Path) -> Run:
    """Run a benchmark; plots, if there were any, would go to a folder of the test."""

    def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(project_root / "benchmarks" / script), *options]
        return subprocess.run(command, env=child_env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.mark.parametrize("script", ["bench_scheduler.py", "bench_scaling.py"])
def test_help_says_what_is_measured(script: str, run: Run) -> None:
    """--help names the lines and options, and says what counts."""
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    for word in ("--json", "--quick", "--rounds", "context", "plan, encode", "in turn"):
        assert word in done.stdout


@pytest.mark.parametrize("script", ["bench_scheduler.py", "bench_scaling.py"])
def test_senseless_options_are_refused(script: str, run: Run) -> None:
    """No rounds is no measurement."""
    done = run(script, "--rounds", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search("--rounds .*takes? numbers from 1", done.stderr)


def test_quick_run_of_ours_alone(run: Run, tmp_path: Path) -> None:
    """The table has a line for each workload, and the report has medians whose stages fit them."""
    done = run("bench_scheduler.py", "--quick", "--rounds", "1", "--parties", "ours", "--json", "report/out.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["line", "ours"]
    report = json.loads((tmp_path / "report" / "out.json").read_text())
    assert (report["benchmark"], report["quick"], report["missing"], report["aims"]) == ("scheduler", True, {}, [])
    assert list(report["lines"]) == ["64 x 1k", "256 x 1k", "admit cold 1k", "admit cold 1k, evict", "admit cached 1k"]
    for text, (name, line) in zip(lines[2:], report["lines"].items(), strict=False):
        row = line["parties"]["ours"]
        assert text.startswith(name)
        assert float(text.split()[-1].replace(",", "")) == pytest.approx(row["us"], abs=0.1)
        stages = ["submit", "plan"] if name.startswith("admit") else ["plan", "encode", "decode", "complete"]
        assert list(row["stages_us"]) == stages
        assert list(row["not_counted_us"]) == (["encode", "leave"] if name.startswith("admit") else [])
        assert 0 < row["fastest_us"] <= row["us"]
        assert all(0 < value < row["us"] * 10 for value in row["stages_us"].values())
        assert row["num_samples"] == 10
        assert row["runs_us"] == [row["us"]]


def test_peer_that_cannot_be_installed_is_said_so(run: Run, tmp_path: Path) -> None:
    """Without a place for the peers' environments the run goes on with ours, and names each peer that is missing."""
    (tmp_path / "file").write_text("not a folder")
    options = ("--quick", "--rounds", "1", "--lines", "64 x 1k", "--peers", "file", "--json", "out.json")
    done = run("bench_scheduler.py", *options)
    assert done.returncode == 0, done.stderr
    missing = json.loads((tmp_path / "out.json").read_text())["missing"]
    assert set(missing) == {"tokenspeed_0.1.0", "tokenspeed_0.1.42", "tokenspeed_0.1.42_coarse"}
    assert "tokenspeed_0.1.0 did not run: tokenspeed-scheduler 0.1.0 cannot be installed" in done.stdout
    assert "64 x 1k" in done.stdout


def test_quick_run_of_scaling(run: Run, tmp_path: Path) -> None:
    """Each point of a line has a median and its ratio to the smallest; memory is the sum of what was found."""
    done = run("bench_scaling.py", "--quick", "--rounds", "1", "--lines", "queue", "lives", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["missing"] == {}
    for name, sizes in (("queue", [0, 100]), ("lives", [100, 1000])):
        points = report["lines"][name]["points"]
        assert [point["size"] for point in points] == sizes
        for point in points:
            assert math.isclose(point["growth"], point["us"] / points[0]["us"], rel_tol=0.01)
            assert f"{point['us']:,.1f}" in done.stdout
    assert [aim["line"] for aim in report["aims"]] == ["queue"]
    memory = report["memory"]
    assert memory["rss_bytes"] > memory["parts_bytes"]["imports"] > 0
