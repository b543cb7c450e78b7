"""The scheduler process: server, engine, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import structlog

from pagemirror.addresses import is_local
from scheduler_service.children import parent_gone
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.errors import DrainingError, StartError
from scheduler_service.gateway.local_engine import LocalEngine
from scheduler_service.gateway.server import GatewayServer
from scheduler_service.metrics import Metrics
from scheduler_service.public_server import HealthBoard, PublicServer
from scheduler_service.settings import SchedulerSettings
from scheduler_service.tracing_setup import close_traces, open_traces, trace_requests
from scheduler_service.vllm_metrics import VllmCollector
from scheduler_service.watchdog import Watchdog

if TYPE_CHECKING:
    from scheduler_service.zmq_events import ZmqPublisher

log = structlog.get_logger("pagemirror.app")

_STOP_GRACE_S = 1.0  # for streams to carry away the status they were just ended with


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
        await parent_gone(parent)
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
    metrics = Metrics()
    if settings.vllm_metrics:
        metrics.registry.register(VllmCollector(metrics))
    metrics.watch_tasks(asyncio.get_running_loop())
    traces = open_traces(settings.otlp_endpoint, "pagemirror-scheduler")
    trace_requests(metrics.tally, traces)
    _check_way_to_runtimes(settings)
    # Before anything slow: a port in use is told at once, health says how far we are, and calls of early clients wait.
    front = PublicServer(settings, metrics, board, traces=traces)
    server, address = front.server, front.address
    gateway = None if settings.gateway_listen is None else GatewayServer(settings, metrics, board, traces=traces)
    front.gate.opened.clear()
    board.show(False)
    board.note("cold", True)
    if settings.metrics_port is not None:
        host = settings.metrics_address
        log.info("serving_metrics", host=host, port=metrics.serve(host, settings.metrics_port))
    engine = EngineLoop(settings, metrics, board.show)
    front.add(engine)
    if gateway is not None:
        gateway.add(LocalEngine(engine))
    servers = [server] if gateway is None else [server, gateway.server]
    publisher = _publisher(settings)
    tasks = [asyncio.create_task(stop.follow_parent(exit_with_parent))] if exit_with_parent else []
    try:
        with stop.installed():
            await server.start()
            if not await first(engine.start(), stop.drain.wait()):
                return 0
            watchdog = Watchdog(engine.awaited, settings.stuck_timeout, partial(_note_stuck, engine, board))
            tasks.append(asyncio.create_task(watchdog.run(), name="watchdog"))
            if not await first(engine.warm_up(), stop.drain.wait()):
                return 0
            board.note("cold", False)
            front.gate.opened.set()
            if gateway is not None:
                await gateway.server.start()
            if publisher is not None:
                publisher.start(engine.page_events, _topic(settings.kv_events_id or address, engine.facts.model))
            also = "" if gateway is None else f"; {gateway.api} on {gateway.address}"
            announce(f"pagemirror ready on {address} (model {engine.facts.model}{also})")
            log.info("serving", address=address, runtime=settings.runtime, model=engine.facts.model)
            failed = await first(engine.failed.wait(), stop.drain.wait())
            if not failed:
                log.info("draining", grace_s=settings.grace)
                await board.drain()
                await first(engine.drain(settings.grace), stop.now.wait())
            # Streams are ended by us: a server that stops waits for them, and for ever where one is not read.
            engine.end_all(DrainingError())
            await engine.stop()
            await asyncio.gather(*(each.stop(_STOP_GRACE_S) for each in servers))
            return 1 if failed else 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(each.stop(None) for each in servers))
        await engine.stop()
        if publisher is not None:
            await publisher.close()
        metrics.close()
        await close_traces(traces)


def _check_way_to_runtimes(settings: SchedulerSettings) -> None:
    """Raises StartError for certificates that cannot be used: told now, not at a connection that is tried again and again."""
    if settings.runtime_tls is not None:
        settings.runtime_tls.credentials()
    elif far := [target for target in settings.runtimes if not is_local(target)]:
        log.warning("plaintext_to_runtime", runtimes=far, reason="no --runtime-tls-ca")


def _topic(publisher: str, model: str) -> str:
    return f"kv@{publisher}@{PurePath(model).name or model}"


def _note_stuck(engine: EngineLoop, board: HealthBoard, stuck: bool) -> None:
    engine.stuck = stuck
    board.note("stuck", stuck)


def _publisher(settings: SchedulerSettings) -> ZmqPublisher | None:
    """Of page events over ZeroMQ, where it is asked for. Raises StartError."""
    if settings.kv_events_endpoint is None:
        return None
    try:
        from scheduler_service.zmq_events import ZmqPublisher
    except ImportError as error:
        raise StartError(
            f"--kv-events-endpoint needs packages that are not here: pip install 'pagemirror[events]' ({error})"
        ) from error
    return ZmqPublisher(settings.kv_events_endpoint, settings.kv_events_replay_endpoint)


async def first(wanted: Awaitable[Any], otherwise: Awaitable[Any]) -> bool:
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
