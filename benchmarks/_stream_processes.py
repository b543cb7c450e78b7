"""Processes of `bench_streaming.py`: how they are started, what they say, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
_LIMIT_BYTES = 1 << 24
_STARTUP_S = 60.0
_LAST_LINES = 8


class Child:
    """A process that says on stdout where it serves."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._name, self._process, self._errors = name, process, errors
        self.address = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU time so far, in seconds, of this process alone."""
        return cpu_s(self.pid)

    def children_cpu_s(self) -> float:
        """CPU time so far, in seconds, of the processes that it started."""
        return sum(map(cpu_s, _children(self.pid)))

    async def ask(self, **request: Any) -> dict[str, Any]:
        """One request of one line, and its answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise self.failure("ended while it was measured")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def read_address(self) -> None:
        """Wait for the line that says where it serves."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_STARTUP_S):
            line = (await self._process.stdout.readline()).decode()
        if (match := re.search(r"ready on (\S+)", line)) is None:
            raise self.failure("did not start")
        self.address = match[1]

    def failure(self, what: str) -> SystemExit:
        """With what it said last."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return SystemExit("\n".join((f"{self._name} {what}", *lines[-_LAST_LINES:])))


@contextlib.asynccontextmanager
async def child(*command: str, announces: bool = True) -> AsyncIterator[Child]:
    """Start a script of this folder, or what `-m` names, wait for the line that says where it serves; end it on leaving."""
    pipe = asyncio.subprocess.PIPE
    name = " ".join(command[:3])
    if command[0] != "-m":
        command = (str(FOLDER / command[0]), *command[1:])
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", *command), stdin=pipe, stdout=pipe, stderr=errors, limit=_LIMIT_BYTES,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        started = Child(name, process, errors)
        if announces:
            await started.read_address()
        yield started
    finally:
        assert process.stdin is not None
        process.stdin.close()  # which some wait for
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        errors.close()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, in seconds: of all its threads, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # how Linux names the clock of another process, see clock_getcpuclockid(3)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
