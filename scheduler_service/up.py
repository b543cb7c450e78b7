"""`pagemirror up`: a scheduler and a local runtime as two processes over a unix socket, started and ended together; with
`--workers` a front end as well, which then has the public port; with `--http` the gateway smg, which speaks OpenAI's HTTP.

A runtime that dies is started again: the scheduler keeps its clients waiting, connects to the successor and goes on from the
tokens it knows. Not started again is one that refuses its configuration, one that could not start in the first place, and
one that died again and again without having served. The gateway likewise; its clients' connections end with it. The
scheduler is not started again: its clients' streams end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from scheduler_service.channels import reserve
from scheduler_service.children import (
    BAD_CONFIGURATION,
    RestartPolicy,
    cancel,
    end,
    exit_with_parent,
    kill,
    say,
    say_again,
    spawn,
    terminate,
    wait_or_kill,
)
from scheduler_service.errors import StartError
from scheduler_service.gateway_process import GatewayProcess
from scheduler_service.http_settings import HttpSettings

_MAX_SOCKET_PATH = 100  # bytes; the kernel's own limit is 107
_RUNTIME_END_S = 15.0
_KILL_AFTER_S = 5.0

_READY = re.compile(rb"^pagemirror runtime ready on .*\bnum_pages (\d+)\b.*\n", re.MULTILINE)
_READY_SCHEDULER = re.compile(r"pagemirror ready on (\S+) \((model .*?)(; \w+ on (\S+))?\)$")
_READY_FRONT = re.compile(r"pagemirror frontend ready on (\S+) \(workers \d+()(; \w+ on (\S+))?\)$")
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
    http: HttpSettings | None = None
    """Of the gateway; None: there is none."""


class Pair:
    """The processes, and how they end."""

    def __init__(self, options: UpOptions, folder: Path, gateway: GatewayProcess | None = None) -> None:
        self._options = options
        self._gateway = gateway
        self._socket = f"unix:{folder / 'runtime.sock'}"
        self._scheduler_socket = f"unix:{folder / 'public.sock'}"
        self._signals = 0
        self._stopping = False
        self._scheduler: asyncio.subprocess.Process | None = None
        self._runtime: asyncio.subprocess.Process | None = None
        self._front: asyncio.subprocess.Process | None = None
        self._num_pages = ""  # that the first runtime had: the scheduler goes on with no other number

    async def run(self) -> int:
        """Start all, keep them until a signal or until one of them is gone for good, end all; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keeper: asyncio.Task[int] | None = None
        before: asyncio.Task[None] | None = None
        try:
            # Both at once: the scheduler waits for the runtime, and refuses a port in use at once.
            keeper = asyncio.create_task(self._keep_runtime())
            listen = self._scheduler_socket if self._options.workers else self._options.listen
            addresses = ("--runtime", self._socket, "--listen", listen)
            piped = self._options.workers or self._gateway is not None
            self._scheduler = await spawn(
                ["scheduler_service.cli", "scheduler", *addresses, *self._options.scheduler_args, *exit_with_parent()],
                environment=self._scheduler_environment(),
                stdout=asyncio.subprocess.PIPE if piped else None,
            )
            if self._stopping:
                terminate(self._scheduler)
            if piped:
                before = asyncio.create_task(self._serve_before(self._scheduler))
            return await self._supervise(self._scheduler, keeper)
        finally:
            await cancel(keeper, before)
            for process in self._processes():
                kill(process)
                await process.wait()
            if self._gateway is not None:
                await self._gateway.end()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _supervise(self, scheduler: asyncio.subprocess.Process, keeper: asyncio.Task[int]) -> int:
        scheduler_end = asyncio.create_task(scheduler.wait())
        # Also after a signal, which went to the scheduler: it drains, and the runtime is needed until it is done.
        await asyncio.wait({scheduler_end, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if scheduler_end.done():
            await cancel(keeper)
            if not self._stopping:
                say("the scheduler ended", scheduler.returncode)
            # Side by side: what the clients of the one are still told has nothing to do with the other.
            await asyncio.gather(*([self._gateway.end()] if self._gateway else []), end(self._runtime, _RUNTIME_END_S))
            if self._stopping:
                return 0 if scheduler.returncode in {0, -signal.SIGTERM} else 1
            return scheduler.returncode if scheduler.returncode == BAD_CONFIGURATION else 1
        status = keeper.result()
        terminate(scheduler)
        terminate(scheduler)  # nothing is left to drain with
        await wait_or_kill(scheduler, _KILL_AFTER_S)
        return status if status == BAD_CONFIGURATION else 1

    async def _serve_before(self, scheduler: asyncio.subprocess.Process) -> None:
        """When the scheduler serves, start what stands before it and say when all do; where one of it ends, have the scheduler
        end.
        """
        found = await _read_line(scheduler, _READY_SCHEDULER)
        if found is None or self._stopping:
            return  # the scheduler has ended, or is about to
        model = found[2]
        async with asyncio.TaskGroup() as tasks:
            if self._options.workers:
                front = self._front = await self._start_front()
                tasks.create_task(self._follow_front(front, scheduler))
                if (found := await _read_line(front, _READY_FRONT)) is None:
                    return
            address = found[1]
            if self._gateway is not None:
                tasks.create_task(self._keep_gateway(self._gateway, found[4], PurePath(model.removeprefix("model ")).name))
                await self._gateway.serves.wait()
                address = f"{self._gateway.settings.url} and {address}"
            sys.stdout.write(f"pagemirror ready on {address} ({model}{found[3] or ''})\n")
            sys.stdout.flush()

    async def _start_front(self) -> asyncio.subprocess.Process:
        number = str(self._options.workers)
        addresses = ("--scheduler", self._scheduler_socket, "--listen", self._options.listen, "--workers", number)
        command = ["scheduler_service.cli", "frontend", *addresses, *self._options.frontend_args, *exit_with_parent()]
        return await spawn(command, stdout=asyncio.subprocess.PIPE)

    async def _follow_front(self, front: asyncio.subprocess.Process, scheduler: asyncio.subprocess.Process) -> None:
        status = await front.wait()
        if not self._stopping:
            say("the front end ended", status)
            terminate(scheduler)  # twice: there is nobody to drain for
        terminate(scheduler)

    async def _keep_gateway(self, gateway: GatewayProcess, worker: str, model: str) -> None:
        await gateway.keep(worker, model)
        if not self._stopping:
            self._end_all()  # it was asked for; those who do without it may finish

    async def _keep_runtime(self) -> int:
        """Start the runtime, and again when it has ended; the last one's status when it is not to be started again."""
        policy = RestartPolicy()
        while True:
            runtime = self._runtime = await spawn(
                [
                    "runtime_service",
                    "--listen",
                    self._socket,
                    *self._options.runtime_args,
                    *self._same_pool(),
                    *exit_with_parent(),
                ],
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
            say_again("the runtime ended", status, pause)
            if pause is None:
                return status
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
        self._end_all()
        if self._signals > 2:
            for process in self._processes():
                kill(process)
            if self._gateway is not None:
                self._gateway.kill()

    def _end_all(self) -> None:
        """Have the first of the line drain, and the gateway with it; the scheduler is needed until a front end is done."""
        if self._gateway is not None:
            self._gateway.drain()
        if self._front is not None and self._front.returncode is None:
            terminate(self._front)
        else:
            terminate(self._scheduler)

    def _processes(self) -> list[asyncio.subprocess.Process]:
        return [process for process in (self._front, self._scheduler, self._runtime) if process is not None]

    def _scheduler_environment(self) -> dict[str, str]:
        # Behind a front end it has a socket in a folder of our own: certificates and tokens are for the public port.
        of_port = ("PAGEMIRROR_TLS_", "PAGEMIRROR_TOKEN_FILE", "PAGEMIRROR_GATEWAY_") if self._options.workers else ()
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
    with contextlib.ExitStack() as stack:
        gateway = None
        if options.http is not None:
            gateway = GatewayProcess(options.http)
            stack.callback(gateway.release)
        if options.workers:
            with reserve(options.listen):
                pass  # a port in use is told now: the front end is started when the scheduler serves
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemirror-", dir=socket_base()))
        return asyncio.run(Pair(options, Path(folder), gateway).run())


def socket_base() -> str:
    """A directory whose name leaves room for the socket's: TMPDIR, or /tmp where that is too deep."""
    longest = len("/pagemirror-12345678/runtime.sock")
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  (only a fresh private folder is made in it)
        if len(os.fsencode(base)) + longest <= _MAX_SOCKET_PATH and os.access(base, os.W_OK):
            return base
    raise StartError(f"no directory for the socket: {tempfile.gettempdir()} is too long a name, and /tmp is not writable")


async def _read_line(process: asyncio.subprocess.Process, ready: re.Pattern[str]) -> re.Match[str] | None:
    """The line with which it says that it serves; None: it has ended, or something else is the matter with it."""
    assert process.stdout is not None
    return ready.match((await process.stdout.readline()).decode())
