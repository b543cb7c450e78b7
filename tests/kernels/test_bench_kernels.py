"""The kernel benchmark says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_benchmark_refuses_without_a_gpu(options: list[str], project_root: Path, child_env: dict[str, str]) -> None:
    """Where torch has no CUDA device the benchmark ends with a sentence and a status, and prints no figures."""
    done = subprocess.run(
        [sys.executable, str(project_root / "benchmarks/bench_kernels.py"), *options],
        env=child_env | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr
