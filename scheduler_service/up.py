"""`pagemirror up`: a scheduler and a local runtime as two processes over a unix socket, started and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_service.errors import StartError

_MAX_SOCKET_PATH = 100  # bytes; the kernel's own limit is 107
_RUNTIME_END_S = 15.0
_KILL_AFTER_S = 5.0


@dataclass(slots=True)
class UpOptions:
    """Arguments for the two processes, beyond the address of the socket between them."""

    listen: str
    runtime_args: list[str] = field(default_factory=list)
    scheduler_args: list[str] = field(default_factory=list)
    device: str | None = None


class Pair:
    """The two processes and how they end."""

    def __init__(self, options: UpOptions, folder: Path) -> None:
        self._options = options
        self._socket = f"unix:{folder / 'runtime.sock'}"
        self._signals = 0
        self._stopping = asyncio.Event()
        self._scheduler: asyncio.subprocess.Process | None = None
        self._runtime: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Start both, wait for a signal or for one of them to end, end both; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            # Both at once: the scheduler waits for the runtime, and refuses a port in use at once.
            parent = ("--exit-with-parent", str(os.getpid()))
            addresses = ("--runtime", self._socket, "--listen", self._options.listen)
            self._runtime = await _spawn(
                ["runtime_service", "--listen", self._socket, *self._options.runtime_args, *parent],
                environment=self._runtime_environment(),
                stdout=sys.stderr.fileno(),
            )
            self._scheduler = await _spawn(
                ["scheduler_service.cli", "scheduler", *addresses, *self._options.scheduler_args, *parent]
            )
            return await self._supervise(self._scheduler, self._runtime)
        finally:
            for process in (self._scheduler, self._runtime):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _supervise(self, scheduler: asyncio.subprocess.Process, runtime: asyncio.subprocess.Process) -> int:
        scheduler_end = asyncio.create_task(scheduler.wait())
        runtime_end = asyncio.create_task(runtime.wait())
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({scheduler_end, runtime_end, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._stopping.is_set():
            # The signal went to the scheduler, which drains; the runtime is needed until it is done.
            await asyncio.wait({scheduler_end, runtime_end}, return_when=asyncio.FIRST_COMPLETED)
            if not scheduler_end.done():
                _say("the runtime ended while the scheduler was draining", runtime.returncode)
                _terminate(scheduler)
                _terminate(scheduler)  # nothing is left to drain with
            status = await _wait_or_kill(scheduler, _KILL_AFTER_S)
            await _end(runtime)
            return 0 if status in {0, -signal.SIGTERM} else 1
        if scheduler_end.done():
            _say("the scheduler ended", scheduler.returncode)
            await _end(runtime)
            return scheduler.returncode if scheduler.returncode == 2 else 1
        _say("the runtime ended", runtime.returncode)
        _terminate(scheduler)
        _terminate(scheduler)
        await _wait_or_kill(scheduler, _KILL_AFTER_S)
        return runtime.returncode if runtime.returncode == 2 else 1

    def _on_signal(self) -> None:
        self._signals += 1
        self._stopping.set()
        if self._scheduler is not None:
            _terminate(self._scheduler)
        if self._signals > 2:
            for process in (self._scheduler, self._runtime):
                if process is not None and process.returncode is None:
                    process.kill()

    def _runtime_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._options.device != "cuda":
            # Torch's idle threads would otherwise spin and take the cores from the scheduler beside it.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        return environment


def run_up(options: UpOptions) -> int:
    """Run both processes until a signal; the exit status.

    Raises:
        StartError: no place for the socket.
    """
    with tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()) as folder:
        return asyncio.run(_run_pair(options, Path(folder)))


async def _run_pair(options: UpOptions, folder: Path) -> int:
    return await Pair(options, folder).run()


def socket_base() -> str:
    """A directory whose name leaves room for the socket's: TMPDIR, or /tmp where that is too deep."""
    longest = len("/pagemirror-12345678/runtime.sock")
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  (only a fresh private folder is made in it)
        if len(os.fsencode(base)) + longest <= _MAX_SOCKET_PATH and os.access(base, os.W_OK):
            return base
    raise StartError(f"no directory for the socket: {tempfile.gettempdir()} is too long a name, and /tmp is not writable")


async def _spawn(
    module_and_args: Sequence[str], environment: dict[str, str] | None = None, stdout: int | None = None
) -> asyncio.subprocess.Process:
    # A session of its own: Ctrl-C reaches this process alone, which ends both in order. -P: the current folder is no place
    # to import from.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        *module_and_args,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )


def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()


async def _end(process: asyncio.subprocess.Process) -> int:
    _terminate(process)
    return await _wait_or_kill(process, _RUNTIME_END_S)


async def _wait_or_kill(process: asyncio.subprocess.Process, limit_s: float) -> int:
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


def _say(what: str, status: int | None) -> None:
    how = f"by signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
    sys.stderr.write(f"pagemirror up: {what} {how}\n")
    sys.stderr.flush()
