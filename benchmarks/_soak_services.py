"""The two services of the soak test as processes: started, started again when they were killed, and measured at rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from _soak_proxy import Line

START_LIMIT_S = 120.0
END_LIMIT_S = 45.0
REST_LIMIT_S = 45.0
_HOST = Path(__file__).resolve().parent / "_soak_host.py"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds at one moment."""

    files: int
    threads: int
    tasks: int
    rss_mib: float

    def at_least(self, other: Usage) -> Usage:
        """Of each number the larger one, of the memory our own."""
        return Usage(max(self.files, other.files), max(self.threads, other.threads), max(self.tasks, other.tasks), self.rss_mib)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much more than at first a process may hold at the end, and that is no leak.

    gRPC keeps some threads of its pool for a while, each with a descriptor or two; memory that was freed stays with the
    allocator, and caches that are filled for the first time stay filled.
    """

    files: int = 6
    threads: int = 24
    tasks: int = 0
    rss_mib: float = 64.0

    def exceeded(self, usage: Usage, baseline: Usage) -> list[str]:
        """One text for each number that is too large."""
        found = []
        for name in ("files", "threads", "tasks", "rss_mib"):
            now, first, more = getattr(usage, name), getattr(baseline, name), getattr(self, name)
            if now > first + more:
                found.append(f"{name} {now:g}, at first {first:g}, allowed {first + more:g}")
        return found


@dataclass
class Service:
    """One service. `run` keeps it alive until `end`; a death that nobody announced with `kill` is a finding."""

    name: str
    program: str
    """`scheduler` or `runtime`."""
    arguments: list[str]
    folder: Path
    line: Line
    warm_up: Callable[[], Awaitable[None]] | None = None
    """Uses the service once, before anybody else may and its baseline is taken."""
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    findings: list[str] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    """When nobody could be served: from the start, or a death, to the next readiness."""
    baseline: Usage | None = None
    num_lives: int = 0
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: bool = False
    _is_killed: bool = False
    _is_ending: bool = False

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    async def run(self) -> None:
        """Start it, and again after each death."""
        self.outages.append((time.monotonic(), float("inf")))
        while not self._is_ending:
            await self._spawn()
            assert self.process is not None
            starting = asyncio.create_task(self._become_ready())
            status = await self.process.wait()
            # Before it serves it has no handler for the signal that asks it to end.
            orderly = {0} if self.ready.is_set() else {0, -signal.SIGTERM}
            self.line.gate.clear()
            self.ready.clear()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if self._is_killed and status == -signal.SIGKILL:
                self._is_killed = False
            elif not self._is_ending or status not in orderly:
                self.findings.append(f"the {self.name} ended by itself with status {status}; see {self.log}")
                self.outages.append((time.monotonic(), float("inf")))
                await asyncio.sleep(1)

    async def _spawn(self) -> None:
        self.num_lives += 1
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(_HOST), str(self.folder / f"{self.name}.tasks"), self.program, *self.arguments,
                "--exit-with-parent", str(os.getpid()),
                env={**self.environment, "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def _become_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_LIMIT_S):
                if b" ready on " not in await self.process.stdout.readline():
                    return  # it ends, and that is told elsewhere
                if self.warm_up is not None:
                    await self.warm_up()
                usage = await self.at_rest(None, limit_s=3.0)
                # A later life may be measured while something else is down. The first one was not, and it is the same program.
                self.baseline = usage if self.baseline is None else usage.at_least(self.baseline)
        except TimeoutError:
            self.findings.append(f"the {self.name} was not ready within {START_LIMIT_S:g} s; see {self.log}")
            return
        self.outages[-1] = (self.outages[-1][0], time.monotonic())
        self.line.gate.set()
        self.ready.set()

    def kill(self, *, for_good: bool = False) -> bool:
        """SIGKILL; whether there was somebody to be killed. `for_good`: it is not started again."""
        if self.process is None or self.process.returncode is not None:
            return False
        self._is_killed, self.is_stopped = True, False
        self._is_ending = for_good
        self.outages.append((time.monotonic(), float("inf")))
        self.line.gate.clear()
        self.process.kill()
        return True

    async def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later if it is the same process still."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGSTOP)
        self.is_stopped = True
        try:
            await asyncio.sleep(seconds)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
            self.is_stopped = False

    def order(self, words: str) -> bool:
        """Tell the model something (`_soak_host.py`); whether there was somebody to be told."""
        if self.process is None or self.process.returncode is not None:
            return False
        (self.folder / f"{self.name}.order").write_text(words)
        self.process.send_signal(signal.SIGUSR2)
        return True

    async def end(self) -> None:
        """SIGTERM, which must end it with status 0."""
        self._is_ending = True
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(END_LIMIT_S):
                    await self.process.wait()
            except TimeoutError:
                self.findings.append(f"the {self.name} did not end within {END_LIMIT_S:g} s of SIGTERM")
                self.process.kill()

    # --- what it holds ------------------------------------------------------------------------------------------------------

    async def usage(self) -> Usage:
        """Numbers of this moment. Raises OSError when the process is gone."""
        assert self.process is not None
        own = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
        files = len(list((own / "fd").iterdir()))
        rss = int(status["VmRSS"].split()[0]) * 1024 / _MIB
        return Usage(files, int(status["Threads"]), await self._num_tasks(), round(rss, 1))

    async def _num_tasks(self) -> int:
        path = self.folder / f"{self.name}.tasks"
        path.unlink(missing_ok=True)
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(250):
            if path.exists():
                return int(path.read_text())
            await asyncio.sleep(0.02)
        raise OSError(f"the {self.name} does not answer SIGUSR1")

    async def at_rest(self, baseline: Usage | None, limit_s: float = REST_LIMIT_S) -> Usage:
        """Usage once it is within the baseline's allowance; without one, once it stays the same. Or when the limit is over."""
        last = await self.usage()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    if baseline is not None and not Allowance().exceeded(last, baseline):
                        return last
                    await asyncio.sleep(0.1)
                    usage = await self.usage()
                    if baseline is None and (usage.files, usage.threads, usage.tasks) == (last.files, last.threads, last.tasks):
                        return usage
                    last = usage
        return last

    def read_log(self, pattern: str) -> list[str]:
        """Lines of all its lives that begin with a match."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if re.match(pattern, line)]

    async def check_rest(self) -> Usage | None:
        """Usage at rest; a finding where it is more than the baseline and its allowance."""
        if self.baseline is None:
            self.findings.append(f"the {self.name} has no baseline")
            return None
        usage = await self.at_rest(self.baseline)
        self.findings += [f"{self.name} at rest: {text}" for text in Allowance().exceeded(usage, self.baseline)]
        return usage
