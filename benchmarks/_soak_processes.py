"""The client processes of the soak test, from the side of whoever starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from _soak_ledger import Ledger
from _soak_proxy import Line

LAST_CALL_S = 180.0
"""What the calls that run at the end may take: more than a client waits for one."""
_SERVER = Path(__file__).resolve().parent / "_soak_clients.py"


class ClientProcesses:
    """The clients, each with a line of its own to the scheduler."""

    def __init__(self, count: int, seed: int, scheduler: str, ledger: Ledger) -> None:
        self.lines = [Line(scheduler) for _ in range(count)]
        self.cuts: list[tuple[int, float, float]] = []
        self.num_done = 0
        self._seed, self._ledger = seed, ledger
        self._ports: list[int] = []
        self._lives = [0] * count
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, log: Path, gate: asyncio.Event) -> None:
        """Start them all. Whoever connects waits at `gate`."""
        for line in self.lines:
            line.gate = gate
            self._ports.append(await line.listen_on_port())
        with log.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(_SERVER),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self._reader = asyncio.create_task(self._read())
        for number in range(len(self.lines)):
            self._start(number)

    def restart(self, number: int) -> None:
        """SIGKILL one, and start another in its place."""
        self._tell(kill=number)
        self._start(number)

    async def finish(self) -> list[str]:
        """Have each end after its present request; findings."""
        assert self._process is not None
        assert self._reader is not None
        self._tell(finish=True)
        try:
            async with asyncio.timeout(LAST_CALL_S):
                await self._reader
                await self._process.wait()
        except TimeoutError:
            return [f"{len(self.lines) - self.num_done} clients did not end within {LAST_CALL_S:g} s"]
        return [] if self.num_done == len(self.lines) else [f"only {self.num_done} of {len(self.lines)} clients ended in order"]

    async def close(self) -> None:
        """Kill whatever is left."""
        for line in self.lines:
            line.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def memory_mib(self) -> float:
        """Of all client processes together, shared pages counted once."""
        assert self._process is not None
        total = 0
        for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return round(total / 1024, 1)

    def _start(self, number: int) -> None:
        self._lives[number] += 1
        self._tell(start=number, life=self._lives[number], port=self._ports[number], seed=self._seed)

    def _tell(self, **command: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            record = json.loads(line)
            if "killed" in record:
                self._ledger.note_killed(record["killed"])
            elif "done" in record:
                self.num_done += record["status"] == 0
            else:
                self._ledger.take(record)
