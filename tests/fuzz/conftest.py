"""The processes under attack, and how much of it there is.

    PAGEMIRROR_FUZZ_OPS=100000 .venv/bin/python -m pytest tests/fuzz     mutated messages for each of the two services
    PAGEMIRROR_FUZZ_SEED=7                                               another sequence of them

A failure prints the seed and the messages that led to it as literals, to be written into a test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
# The modules beside this file; no test folder is a package.
sys.path.insert(0, str(FOLDER))

NUM_OPS = int(os.environ.get("PAGEMIRROR_FUZZ_OPS", "4000"))
SEED = int(os.environ.get("PAGEMIRROR_FUZZ_SEED", "20261129"))
TIME_LIMIT_S = 300 + NUM_OPS // 20

RUNTIMES = {
    "pages of 4": ("--page-size", "4", "--num-pages", "64", "--max-rows", "8", "--max-pages-per-row", "8"),
    "pages of 1": ("--page-size", "1", "--num-pages", "64", "--max-rows", "8", "--max-pages-per-row", "16"),
    "sampling": (
        *("--model", "tiny", "--device", "cpu"),
        *("--page-size", "16", "--num-pages", "40", "--max-rows", "8", "--max-pages-per-row", "8"),
    ),
}
GRPC_LINE = re.compile(r"[A-Z]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\]")
BACKEND = ("--page-size", "4", "--num-pages", "48", "--max-rows", "6", "--max-pages-per-row", "16")


@dataclass
class Served:
    """A process, where it serves, and the file that takes what it writes to stderr."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    def assert_unharmed(self) -> None:
        """It runs and has logged no error; lines of gRPC's own about a broken connection are none."""
        lines = [line for line in self.log.read_text().splitlines() if not GRPC_LINE.match(line)]
        assert self.process.poll() is None, f"the process ended with {self.process.returncode}: {lines[-100:]}"
        assert lines[-100:] == []

    def usage(self) -> dict[str, int]:
        """What the process holds at this moment."""
        folder = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return {
            "fds": len(list((folder / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "mib": int(status["VmRSS"].split()[0]) // 1024,
        }


class Spawner:
    """Starts services as a user would; `ready` waits until they all serve."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._env = env | {"PAGEMIRROR_RUNTIME_LOG_LEVEL": "error"}
        self._folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
        """Start one process of this interpreter."""
        log = self._folder / f"stderr-{len(self.started)}"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments], env=self._env, cwd=self._folder, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.started.append(process)
        return process, log

    def runtime(self, *options: str) -> tuple[subprocess.Popen[str], Path]:
        """Start one runtime on a free port."""
        return self.start("-m", "runtime_service", "--listen", "127.0.0.1:0", "--grace-s", "0.2", *options)

    @staticmethod
    def ready(process: subprocess.Popen[str], log: Path) -> Served:
        """Wait for the readiness line."""
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " ready on " in line, log.read_text()
        return Served(process, line.split(" ready on ")[1].split()[0], log)

    def kill(self) -> None:
        """End them all."""
        for process in reversed(self.started):
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def spawner(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawner]:
    """Ends at the end what it started."""
    spawner = Spawner(child_env, tmp_path_factory.mktemp("fuzz"))
    yield spawner
    spawner.kill()


@pytest.fixture(scope="session")
def services(spawner: Spawner) -> tuple[dict[str, Served], Served]:
    """Runtimes of several shapes, by name; and a scheduler with a runtime of its own behind it."""
    runtimes = {name: spawner.runtime(*options) for name, options in RUNTIMES.items()}
    backend = spawner.ready(*spawner.runtime(*BACKEND))
    scheduler = spawner.start(
        *("-m", "scheduler_service.cli", "scheduler", "--runtime", backend.address, "--listen", "127.0.0.1:0"),
        *("--check", "--chunk-size", "8", "--token-budget", "32", "--heartbeat-timeout", "60", "--log-level", "error"),
    )
    return {name: spawner.ready(*started) for name, started in runtimes.items()}, spawner.ready(*scheduler)


@pytest.fixture(scope="session")
def runtimes(services: tuple[dict[str, Served], Served]) -> dict[str, Served]:
    """Runtimes that nobody uses, by name."""
    return services[0]


@pytest.fixture(scope="session")
def scheduler(services: tuple[dict[str, Served], Served]) -> Served:
    """A scheduler in front of a runtime that runs the fingerprint model."""
    return services[1]


@pytest.fixture(scope="session")
def num_ops() -> int:
    """Mutated messages for each service."""
    return NUM_OPS


@pytest.fixture(scope="session")
def seed() -> int:
    """Of everything that is drawn."""
    return SEED


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[Counter[str]], None]:
    """Shows, after a run whose length was asked for, what came how often."""

    def show(counts: Counter[str]) -> None:
        plugins = pytestconfig.pluginmanager
        terminal, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
        if "PAGEMIRROR_FUZZ_OPS" in os.environ and terminal is not None and capture is not None:
            with capture.global_and_fixture_disabled():
                terminal.write_line("")
                for what, number in counts.most_common():
                    terminal.write_line(f"{number:9,} {what}")

    return show


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for all processes to start, and more messages take longer."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(TIME_LIMIT_S))
