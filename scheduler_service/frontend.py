"""`pagemirror frontend`: several processes that serve one public port, so that the scheduler's own need not.

The port is bound once here, and kept from others for as long as this process lives; its workers share it. A worker that dies is
started again. Its requests end with its session, and its clients see their connections close.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

import structlog

from scheduler_service.channels import reserve
from scheduler_service.children import RestartPolicy, cancel, kill, parent_gone, terminate
from scheduler_service.frontend_settings import FrontendSettings

log = structlog.get_logger("pagemirror.frontend")

_KILL_AFTER_S = 10.0  # beyond the grace


class Frontend:
    """The workers, and how they end."""

    def __init__(self, settings: FrontendSettings, announce: Callable[[str], None], parent: int | None = None) -> None:
        self._settings = settings
        self._announce = announce
        self._parent = parent
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._serving: set[int] = set()
        self._announced = False
        self._places: dict[str, str] = {}  # where the first to serve does; whoever is started later has the same ports
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Start the workers and keep them until a signal, or until one cannot be kept; the exit status.

        Raises:
            StartError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        shared = self._settings.workers > 1
        with contextlib.ExitStack() as stack:
            places = {"listen": self._settings.listen, "gateway_listen": self._settings.gateway_listen}
            kept = {name: stack.enter_context(reserve(place, shared)) for name, place in places.items() if place is not None}
            settings = self._settings.model_copy(update=kept)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
            keepers = [asyncio.create_task(self._keep(n, settings)) for n in range(settings.workers)]
            follower = asyncio.create_task(self._follow_parent())
            try:
                await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
                if failed := not self._stopping.is_set():
                    self._on_signal()  # one that cannot be kept ends all
                await asyncio.wait(keepers, timeout=settings.grace + _KILL_AFTER_S)
                return int(failed)
            finally:
                await cancel(follower)
                for process in self._workers.values():
                    kill(process)
                await asyncio.gather(*keepers, return_exceptions=True)
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    async def _follow_parent(self) -> None:
        if self._parent is not None:
            await parent_gone(self._parent)
            self._on_signal()
            for process in self._workers.values():
                terminate(process)  # twice: at once

    async def _keep(self, n: int, settings: FrontendSettings) -> None:
        """Start one worker, and again when it has ended, until all are to end or it is not worth trying again."""
        policy = RestartPolicy()
        while not self._stopping.is_set():
            status = await self._run_worker(n, settings, policy)
            if self._stopping.is_set():
                return
            pause = policy.next_pause(status, asyncio.get_running_loop().time())
            then = "" if pause is None else f"; it is started again{f' in {pause:g} s' if pause else ''}"
            sys.stderr.write(f"pagemirror frontend: worker {n} ended with status {status}{then}\n")
            sys.stderr.flush()
            if pause is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _run_worker(self, n: int, settings: FrontendSettings, policy: RestartPolicy) -> int:
        """One life of a worker; its exit status, negative where a signal ended it."""
        # A session of its own: Ctrl-C reaches this process alone, which ends its workers in order.
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-P", "-m", "scheduler_service.frontend_worker", str(os.getpid()))
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._workers[n] = process
        if self._stopping.is_set():
            terminate(process)
        assert process.stdin is not None
        process.stdin.write(settings.of_worker(n).model_copy(update=self._places).model_dump_json().encode())
        process.stdin.close()
        reader = asyncio.create_task(self._read_address(n, process, policy))
        try:
            return await process.wait()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_address(self, n: int, process: asyncio.subprocess.Process, policy: RestartPolicy) -> None:
        """Wait for the line with which a worker says that it serves."""
        assert process.stdout is not None
        if addresses := (await process.stdout.readline()).decode().split():
            policy.note_ready()
            self._note_serving(n, *addresses)

    def _note_serving(self, n: int, address: str, gateway: str = "") -> None:
        self._serving.add(n)
        self._places = {"listen": address} | ({"gateway_listen": gateway} if gateway else {})
        if len(self._serving) == self._settings.workers and not self._announced:
            self._announced = True
            also = f"; {self._settings.api} on {gateway}" if gateway else ""
            self._announce(f"pagemirror frontend ready on {address} (workers {self._settings.workers}{also})")

    def _on_signal(self) -> None:
        self._stopping.set()
        for process in self._workers.values():
            terminate(process)


async def run_frontend(settings: FrontendSettings, announce: Callable[[str], None], parent: int | None = None) -> int:
    """Serve until a signal, or until process `parent` has ended; the exit status. Raises StartError."""
    return await Frontend(settings, announce, parent).run()
