"""The benchmarks of wire, mirror and streams explain themselves, and a quick run of each gives its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = {
    "bench_mirror": {"cases", "op", "aims"},
    "bench_streaming": {"stream", "served", "aims"},
    "bench_wire": {"policies", "trip", "aims"},
}
QUICK = {"bench_mirror": [], "bench_streaming": [], "bench_wire": ["--parts", "policies", "trip"]}
WORDS = {
    "bench_mirror": ["per_row", "memcpy", "--quick"],
    "bench_streaming": ["front end", "p99", "--streams"],
    "bench_wire": ["policies", "overlap", "--parts"],
}


def run(project_root: Path, child_env: dict[str, str], name: str, *options: str) -> str:
    """Its output on stdout, once it has ended well."""
    command = [sys.executable, str(project_root / "benchmarks" / f"{name}.py"), *options]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_benchmark_explains_itself_and_runs(name: str, project_root: Path, child_env: dict[str, str], tmp_path: Path) -> None:
    """Its help says what is measured, and a quick run prints a table and writes the same figures as JSON."""
    text = run(project_root, child_env, name, "--help")
    assert all(word in text for word in WORDS[name])
    output = run(project_root, child_env, name, "--quick", "--no-plot", "--json", str(tmp_path / "out.json"), *QUICK[name])
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["quick"] is True
    assert FIGURES[name] <= report.keys()
    if name == "bench_wire":
        policies = report["policies"]
        assert policies["diff"]["bytes_mean"] <= policies["transition"]["bytes_mean"] < policies["always"]["bytes_mean"]
        assert f"{policies['always']['bytes_mean']:,}".replace(",", "") in output.replace(",", "")
        assert report["trip"]["ratio"] > 0
    elif name == "bench_streaming":
        (served,) = report["served"]
        assert list(served["kinds"]) == ["none", "Generate", "front end", "Session"]
        assert all(0 < kind["step_p50_us"] <= kind["step_p99_us"] for kind in served["kinds"].values())
        assert {kind["steps"] for kind in served["kinds"].values()} == {18}  # of 20 tokens: the first is no decode step's
        assert served["kinds"]["front end"]["workers_us_per_token"] > 0
        assert "front end" in output
    else:
        assert {"mirror", "five_copies", "index_put", "per_row", "memcpy"} == report["cases"][0]["us"].keys()
