"""`pagemirror up --http` and smg itself as processes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0
READY = re.compile(r"pagemirror ready on (?:(\S+) and )?(\S+) \(model (\S+?)(?:; \w+ on (\S+))?\)$")


@dataclass
class Up:
    """A running `pagemirror up`: base address of HTTP, address of gRPC, address of the gateway port, log."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    gateway: str
    errors: Path

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def children(self) -> dict[str, int]:
        """Process ids by what they are: runtime, scheduler, frontend, worker, gateway."""
        return {_kind(pid): pid for pid in _descendants(self.process.pid)}


@contextlib.contextmanager
def running_up(env: dict[str, str], errors: Path, *options: str) -> Iterator[Up]:
    """Start `pagemirror up` on any free ports and wait for its readiness line; ends it."""
    command = ["pagemirror", "up", "--port", "0", "--heartbeat-timeout", "30", *options]
    with errors.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    try:
        line = _first_line(process)
        match = READY.match(line)
        assert match, f"{line!r} is no readiness line; stderr: {errors.read_text()}"
        yield Up(process, match[1] or "", match[2], match[4] or "", errors)
    finally:
        _end(process)


@contextlib.contextmanager
def running_smg(env: dict[str, str], errors: Path, http: str, *options: str) -> Iterator[str]:
    """Start `smg launch`, wait until it has a worker that is well; yields the base address of HTTP."""
    host, port = http.split(":")
    command = ["smg", "launch", "--host", host, "--port", port, "--shutdown-grace-period-secs", "1", *options]
    with errors.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: status_of(f"http://{http}/readiness") == 200)
        yield f"http://{http}/v1"
    finally:
        _end(process)


def status_of(url: str) -> int:
    """Status of a GET; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return 0


def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Ask again and again until it is so."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come to be so"
        select.select([], [], [], 0.01)


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line, end = b"", time.monotonic() + LIMIT_S
    while not line.endswith(b"\n") and time.monotonic() < end:
        if select.select([process.stdout], [], [], 1.0)[0]:
            data = os.read(process.stdout.fileno(), 4096)
            if not data:
                break
            line += data
    return line.decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _kind(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    if words[0].startswith("smg") or "scheduler_service.smg_main" in words:
        return "gateway"
    if "scheduler_service.frontend_worker" in words:
        return "worker"
    return next((name for name in ("runtime_service", "scheduler", "frontend") if name in words), "?").removesuffix("_service")


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid for child in children for pid in (int(child), *_descendants(int(child)))]
