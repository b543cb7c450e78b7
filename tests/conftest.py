"""What all tests share: the environment torch and Triton start in, the `gpu` marker, and the environment of child processes.

The variables must be set before the first import of torch or Triton, which read them once; pytest imports this file before
any test module. Nothing here imports either, so a test run of the scheduler alone needs no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Idle OpenMP threads otherwise spin, which on few cores starves the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _no_cuda_reason() -> str:
    """Why no CUDA device can be used; empty when one can. Looks at the machine, not through torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return "CUDA_VISIBLE_DEVICES hides every device"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed"
    if version.endswith("+cpu"):
        return f"torch {version} is built without CUDA"
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    # A container or WSL can have a device under another name; the driver's tool then knows.
    smi = shutil.which("nvidia-smi")
    if smi and subprocess.run([smi, "-L"], capture_output=True, check=False, timeout=30).stdout.startswith(b"GPU"):
        return ""
    return "no CUDA device"


# Their assertions say what differs, as those of tests do.
pytest.register_assert_rewrite("both_runtimes", "hand_runtime", "scheduler_driver")

NO_CUDA = _no_cuda_reason()

# Without a device Triton cannot compile for one, so kernels run in its interpreter. With a device they run as compiled.
if NO_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

# Time limits per example say more about the machine's other load than about the code; pytest-timeout bounds each test.
settings.register_profile("pagemirror", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pagemirror"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no device."""
    if NO_CUDA:
        skip = pytest.mark.skip(reason=NO_CUDA)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have measured and recorded as `measured`, also where they ran in another process."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """Environment for the processes that tests start, as a user would start them.

    TRITON_INTERPRET is left out: it is a switch of this test process, and a product process that inherits it would run (and a
    compile-ahead test would fail) in the interpreter. The running interpreter's folder comes first in PATH, so `pagemirror`
    is the one under test.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    return env


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The repository's top folder."""
    return Path(__file__).resolve().parent.parent
