"""The scheduler process: server, engine, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.channels import SERVER_OPTIONS, bind
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.errors import DrainingError
from scheduler_service.generation_servicer import GenerationServicer
from scheduler_service.metrics import Metrics
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger("pagemirror.app")

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

_STOP_GRACE_S = 1.0  # for streams to carry away the status they were just ended with


class HealthBoard:
    """The health service: SERVING while a runtime serves us, under the empty name and under that of GenerationService."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()

    def show(self, serving: bool) -> None:
        """Change the answer, from the next turn of the event loop on."""
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if serving else states.NOT_SERVING
        for name in ("", SERVICE_NAME):
            task = asyncio.ensure_future(self.servicer.set(name, status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class StopSignals:
    """What SIGTERM and SIGINT ask for: the first to drain, a second to end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def ask(self) -> None:
        """One more signal."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to both signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def follow_parent(self, parent: int) -> None:
        """Treat the end of process `parent`, however it ends, as a demand to end at once."""
        with contextlib.suppress(ProcessLookupError):
            # A pidfd becomes readable when its process ends, and never means another process that gets the same number.
            descriptor = os.pidfd_open(parent)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        log.warning("parent_gone", parent=parent)
        self.drain.set()
        self.now.set()


async def serve(settings: SchedulerSettings, announce: Callable[[str], None], exit_with_parent: int | None = None) -> int:
    """Serve until a signal, or until the engine fails; the exit status. `announce` is given the readiness line.

    Raises:
        StartError, RuntimeMismatchError, ConfigError: the process could not start.
    """
    stop = StopSignals()
    board = HealthBoard()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    # Bound before anything slow: a port in use is told at once, and early clients wait in the backlog.
    address = bind(server, settings.listen)
    metrics = Metrics()
    if settings.metrics_port is not None:
        host = _host_of(settings.listen)
        log.info("serving_metrics", host=host, port=metrics.serve(host, settings.metrics_port))
    engine = EngineLoop(settings, metrics, board.show)
    health_pb2_grpc.add_HealthServicer_to_server(board.servicer, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(engine), server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    parent = asyncio.create_task(stop.follow_parent(exit_with_parent)) if exit_with_parent else None
    try:
        with stop.installed():
            if not await _first(engine.start(), stop.drain.wait()):
                return 0
            await server.start()
            announce(f"pagemirror ready on {address} (model {engine.facts.model})")
            log.info("serving", address=address, runtime=settings.runtime, model=engine.facts.model)
            failed = await _first(engine.failed.wait(), stop.drain.wait())
            if not failed:
                log.info("draining", grace_s=settings.grace)
                await board.servicer.enter_graceful_shutdown()
                await _first(engine.drain(settings.grace), stop.now.wait())
            # Streams are ended by us: a server that stops waits for them, and for ever where one is not read.
            engine.end_all(DrainingError())
            await server.stop(_STOP_GRACE_S)
            return 1 if failed else 0
    finally:
        if parent is not None:
            parent.cancel()
        await server.stop(None)
        await engine.stop()
        metrics.close()


async def _first(wanted: Coroutine[Any, Any, Any], otherwise: Coroutine[Any, Any, Any]) -> bool:
    """Run both; whether `wanted` ended first. The other is cancelled, an exception of the first is raised."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(otherwise)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _host_of(address: str) -> str:
    return "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")
