"""`pagemirror up`: a scheduler and a local runtime as two processes over a unix socket, started and ended together; with
`--workers` a front end as well, which then has the public port.

A runtime that dies is started again: the scheduler keeps its clients waiting, connects to the successor and goes on from the
tokens it knows. Not started again is one that refuses its configuration, one that could not start in the first place, and
one that died again and again without having served. The scheduler is not started again: its clients' streams end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_service.channels import reserve
from scheduler_service.errors import StartError

_MAX_SOCKET_PATH = 100  # bytes; the kernel's own limit is 107
_RUNTIME_END_S = 15.0
_KILL_AFTER_S = 5.0

_BAD_CONFIGURATION = 2  # exit status
_MAX_DEATHS = 5
_DEATHS_WITHIN_S = 60.0
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 4.0
_READY = re.compile(rb"^pagemirror runtime ready on .*\bnum_pages (\d+)\b.*\n", re.MULTILINE)
_READY_SCHEDULER = re.compile(r"pagemirror ready on \S+ (\(model .*\))$")
_READY_FRONT = re.compile(r"pagemirror frontend ready on (\S+) ")
_MAX_LINE = 4096


@dataclass(slots=True)
class UpOptions:
    """Arguments for the two processes, beyond the address of the socket between them."""

    listen: str
    runtime_args: list[str] = field(default_factory=list)
    scheduler_args: list[str] = field(default_factory=list)
    device: str | None = None
    workers: int = 0
    """Processes of a front end; 0: the scheduler itself has the public port."""
    frontend_args: list[str] = field(default_factory=list)


class RestartPolicy:
    """Whether, and after which pause, a runtime that ended is started again. Pure: times are given, in seconds."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._has_served = False

    def note_ready(self) -> None:
        """A runtime serves: what was before is forgiven."""
        self._has_served = True
        self._deaths.clear()

    def next_pause(self, status: int, now: float) -> float | None:
        """Seconds to wait before the next start after an end with `status`; None: there is to be none."""
        if status == _BAD_CONFIGURATION or (status > 0 and not self._has_served):
            return None
        self._deaths.append(now)
        while now - self._deaths[0] > _DEATHS_WITHIN_S:
            self._deaths.popleft()
        count = len(self._deaths)
        if count >= _MAX_DEATHS:
            return None
        # The first death since it served may be an accident: no pause, clients wait.
        return 0.0 if count == 1 else float(min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (count - 2)))


class Pair:
    """The two processes, and how they end."""

    def __init__(self, options: UpOptions, folder: Path) -> None:
        self._options = options
        self._socket = f"unix:{folder / 'runtime.sock'}"
        self._scheduler_socket = f"unix:{folder / 'public.sock'}"
        self._signals = 0
        self._stopping = False
        self._scheduler: asyncio.subprocess.Process | None = None
        self._runtime: asyncio.subprocess.Process | None = None
        self._front: asyncio.subprocess.Process | None = None
        self._num_pages = ""  # that the first runtime had: the scheduler goes on with no other number

    async def run(self) -> int:
        """Start both, keep them until a signal or until one of them is gone for good, end both; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keeper: asyncio.Task[int] | None = None
        front: asyncio.Task[None] | None = None
        try:
            # Both at once: the scheduler waits for the runtime, and refuses a port in use at once.
            keeper = asyncio.create_task(self._keep_runtime())
            listen = self._scheduler_socket if self._options.workers else self._options.listen
            addresses = ("--runtime", self._socket, "--listen", listen)
            self._scheduler = await _spawn(
                ["scheduler_service.cli", "scheduler", *addresses, *self._options.scheduler_args, *_parent()],
                environment=self._scheduler_environment(),
                stdout=asyncio.subprocess.PIPE if self._options.workers else None,
            )
            if self._stopping:
                _terminate(self._scheduler)
            if self._options.workers:
                front = asyncio.create_task(self._serve_front(self._scheduler))
            return await self._supervise(self._scheduler, keeper)
        finally:
            for task in (keeper, front):
                if task is not None:
                    await _cancel(task)
            for process in (self._front, self._scheduler, self._runtime):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _supervise(self, scheduler: asyncio.subprocess.Process, keeper: asyncio.Task[int]) -> int:
        scheduler_end = asyncio.create_task(scheduler.wait())
        # Also after a signal, which went to the scheduler: it drains, and the runtime is needed until it is done.
        await asyncio.wait({scheduler_end, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if scheduler_end.done():
            await _cancel(keeper)
            if not self._stopping:
                _say("the scheduler ended", scheduler.returncode)
            if self._runtime is not None:
                await _end(self._runtime)
            if self._stopping:
                return 0 if scheduler.returncode in {0, -signal.SIGTERM} else 1
            return scheduler.returncode if scheduler.returncode == _BAD_CONFIGURATION else 1
        status = keeper.result()
        _terminate(scheduler)
        _terminate(scheduler)  # nothing is left to drain with
        await _wait_or_kill(scheduler, _KILL_AFTER_S)
        return status if status == _BAD_CONFIGURATION else 1

    async def _serve_front(self, scheduler: asyncio.subprocess.Process) -> None:
        """Start the front end when the scheduler serves; where it ends, have the scheduler end."""
        assert scheduler.stdout is not None
        model = _READY_SCHEDULER.match((await scheduler.stdout.readline()).decode())
        if model is None or self._stopping:
            return  # the scheduler has ended, or is about to
        number = str(self._options.workers)
        addresses = ("--scheduler", self._scheduler_socket, "--listen", self._options.listen, "--workers", number)
        front = self._front = await _spawn(
            ["scheduler_service.cli", "frontend", *addresses, *self._options.frontend_args],
            stdout=asyncio.subprocess.PIPE,
        )
        assert front.stdout is not None
        if address := _READY_FRONT.match((await front.stdout.readline()).decode()):
            sys.stdout.write(f"pagemirror ready on {address[1]} {model[1]}\n")
            sys.stdout.flush()
        status = await front.wait()
        if not self._stopping:
            _say("the front end ended", status)
            _terminate(scheduler)  # twice: there is nobody to drain for
        _terminate(scheduler)

    async def _keep_runtime(self) -> int:
        """Start the runtime, and again when it has ended; the last one's status when it is not to be started again."""
        policy = RestartPolicy()
        while True:
            runtime = self._runtime = await _spawn(
                ["runtime_service", "--listen", self._socket, *self._options.runtime_args, *self._same_pool(), *_parent()],
                environment=self._runtime_environment(),
                stdout=asyncio.subprocess.PIPE,
            )
            # To the end of its output, which may be later than its own where a child of it has the pipe.
            reader = asyncio.create_task(self._read_runtime(runtime, policy))
            status = await runtime.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await reader
            pause = policy.next_pause(status, asyncio.get_running_loop().time())
            if pause is None:
                _say("the runtime ended", status)
                return status
            _say("the runtime ended", status, f"; it is started again{f' in {pause:g} s' if pause else ''}")
            await asyncio.sleep(pause)

    async def _read_runtime(self, runtime: asyncio.subprocess.Process, policy: RestartPolicy) -> None:
        """Pass its output on to stderr (stdout is for our own readiness line), and look for the line that says it serves."""
        assert runtime.stdout is not None
        last = b""
        while data := await runtime.stdout.read(_MAX_LINE):
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
            last = (last + data)[-_MAX_LINE:]
            if match := _READY.search(last):
                self._num_pages = self._num_pages or match[1].decode()
                policy.note_ready()
                last = b""

    def _same_pool(self) -> Sequence[str]:
        # How many pages fit may depend on the free memory of the moment.
        return ("--num-pages", self._num_pages) if self._num_pages else ()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stopping = True
        if self._front is not None and self._front.returncode is None:
            _terminate(self._front)  # it drains, and the scheduler is needed until it is done
        elif self._scheduler is not None:
            _terminate(self._scheduler)
        if self._signals > 2:
            for process in (self._front, self._scheduler, self._runtime):
                if process is not None and process.returncode is None:
                    process.kill()

    def _scheduler_environment(self) -> dict[str, str]:
        # Behind a front end it has a socket in a folder of our own: certificates and tokens are for the public port.
        of_port = ("PAGEMIRROR_TLS_", "PAGEMIRROR_TOKEN_FILE") if self._options.workers else ()
        return {name: value for name, value in os.environ.items() if not name.startswith(of_port)}

    def _runtime_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._options.device != "cuda":
            # Torch's idle threads would otherwise spin and take the cores from the scheduler beside it.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        return environment


def run_up(options: UpOptions) -> int:
    """Run both processes until a signal; the exit status.

    Raises:
        StartError: no place for the socket, or the front end's port cannot be had.
    """
    # The two meet at a socket in a folder of their own: certificates for their link are for other machines.
    for name in [name for name in os.environ if name.startswith("PAGEMIRROR_RUNTIME_TLS_")]:
        del os.environ[name]
    if options.workers:
        with reserve(options.listen):
            pass  # a port in use is told now: the front end is started when the scheduler serves
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


async def _cancel(task: asyncio.Task[int] | asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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


def _parent() -> Sequence[str]:
    return ("--exit-with-parent", str(os.getpid()))


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


def _say(what: str, status: int | None, then: str = "") -> None:
    how = f"by signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
    sys.stderr.write(f"pagemirror up: {what} {how}{then}\n")
    sys.stderr.flush()
