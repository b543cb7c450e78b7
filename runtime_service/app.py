"""The runtime process: listen, load the model, serve, and go away cleanly.

The address is taken first and the model is loaded after it, in the execution thread: a port in use is known in milliseconds,
the health service can say NOT_SERVING meanwhile, and everything that touches the device is done by one thread.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagemirror.unreadable import UnreadableMessages
from runtime_service.embedding import open_runner
from runtime_service.errors import RuntimeServiceError, SettingError
from runtime_service.execution import ExecutionThread
from runtime_service.executors import create_executor
from runtime_service.executors.base import Capacity, ModelExecutor
from runtime_service.listen import bind, claim_unix_path
from runtime_service.metrics import RuntimeMetrics
from runtime_service.parent import watch_process
from runtime_service.servicer import SERVICE_NAME, RuntimeServicer
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner
from runtime_service.wire import MAX_MESSAGE_BYTES, RuntimeFacts

if TYPE_CHECKING:
    from pagemirror.tracing import Traces

log = structlog.get_logger(__name__)

THREAD_JOIN_S = 1.0
STUCK_TICKS = 4
MAX_CONCURRENT_RPCS = 64
MAX_CONNECTIONS = 64
MAX_METADATA_BYTES = 16 * 1024

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # What is beyond waits at the peer, or is closed.
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_RPCS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # Of a peer that connects and says nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two runtimes must not share a port, each getting some of the connections.
    ("grpc.so_reuseport", 0),
    # Pings of a peer while nothing is said; our own are the settings'.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
)

Create = Callable[[RuntimeSettings], tuple[ModelExecutor, Capacity]]


def load(settings: RuntimeSettings, create: Create = create_executor) -> tuple[StepRunner, RuntimeFacts]:
    """Load the model, warm it up and put mirror and session beside it; runs in the execution thread."""
    if settings.demonstrate_tail_only:
        log.warning("checks_off", reason="--demonstrate-tail-only: mirror rows will go stale")
    runner = open_runner(settings, create)
    model, limits = runner.executor.info, runner.session.limits
    facts = RuntimeFacts(
        model=model,
        runtime_epoch=secrets.randbits(64) | 1,  # never 0
        page_size=settings.page_size,
        num_pages=limits.num_pages,
        max_rows=limits.max_rows,
        max_pages_per_row=limits.max_pages_per_row,
        max_context=min((limit for limit in (settings.max_context, model.max_context) if limit), default=0),
        heartbeat_interval_s=settings.heartbeat_interval_s,
        rank=settings.rank,
        world_size=settings.world_size,
    )
    return runner, facts


def readiness_line(address: str, facts: RuntimeFacts) -> str:
    """What is printed on stdout when the runtime serves; one line, for people and for whoever started it."""
    model = facts.model
    return (
        f"pagemirror runtime ready on {address} (model {model.name}, device {model.device}, dtype {model.dtype}, "
        f"page_size {facts.page_size}, num_pages {facts.num_pages}, max_rows {facts.max_rows})"
    )


async def serve(
    settings: RuntimeSettings,
    thread: ExecutionThread,
    *,
    stop: asyncio.Event | None = None,
    create: Create = create_executor,
    announce: Callable[[str], None] | None = None,
    is_last: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT, the end of `settings.exit_with_parent` or `stop`; everything has ended when it returns.

    `announce` gets the readiness line, by default stdout does. `is_last`: the process ends with it, so that a second signal
    must not turn its orderly end into another. Raises AddressInUseError, SettingsError, and whatever loading the model raises.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Notice a peer whose host is gone. No ping for keepalive is sent while another one is out that measures the bandwidth, and
    # gRPC itself gives that one a minute.
    keepalive_ms = round(settings.keepalive_s * 1000)
    pings = (
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 2),
        ("grpc.http2.ping_timeout_ms", keepalive_ms * 3 // 2),
    )
    server = aio.server(
        interceptors=[UnreadableMessages()],
        options=(*SERVER_OPTIONS, *pings),
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )
    metrics = None if settings.metrics_port is None else RuntimeMetrics()
    servicer = RuntimeServicer(thread)
    if metrics is not None:
        servicer.notes.append(lambda step, answer: metrics.note(answer))
    traces = _open_traces(settings.otlp_endpoint, servicer)
    servicer.register(server)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    if settings.reflection:
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    stopping = asyncio.ensure_future(stop.wait())
    parent = asyncio.ensure_future(watch_process(settings.exit_with_parent)) if settings.exit_with_parent else None
    ending = {stopping} if parent is None else {stopping, parent}
    watching: asyncio.Task[None] | None = None
    try:
        claim_unix_path(settings.listen)
        address = bind(server, settings.listen, settings.tls)
        await _set_health(checker, serving=False)
        if metrics is not None and settings.metrics_port is not None:
            port = metrics.serve(settings.metrics_host, settings.metrics_port)
            log.info("serving metrics", host=settings.metrics_host, port=port)
        await server.start()
        log.info("listening, loading the model", address=address, model=settings.model)
        loading = thread.call(partial(load, settings, create))
        await asyncio.wait({loading, *ending}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            runner, facts = loading.result()
            servicer.set_ready(runner, facts)
            if metrics is not None:
                metrics.set_ready(facts.model.name)
            await _set_health(checker, serving=True)
            watching = asyncio.create_task(_watch_thread(thread, settings.stuck_timeout_s, checker))
            (announce or _print)(readiness_line(address, facts))
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        log.info("shutting down", cause="the parent process is gone" if parent is not None and parent.done() else "asked to")
    finally:
        if watching is not None:
            watching.cancel()
        await checker.enter_graceful_shutdown()
        # The stream is ended by us: it would otherwise hold the server for the whole grace. The scheduler keeps its requests.
        servicer.shut_down()
        await server.stop(settings.grace_s)
        if metrics is not None:
            metrics.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        thread.stop()
        for task in ending:
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            if is_last:
                signal.signal(number, signal.SIG_IGN)


def _open_traces(endpoint: str | None, servicer: RuntimeServicer) -> Traces | None:
    """Trace the steps of first tokens, if an endpoint is given. Raises SettingError where the packages for it are missing."""
    if endpoint is None:
        return None
    try:
        from pagemirror.tracing import Traces
        from runtime_service.first_token_spans import FirstTokenSpans
    except ImportError as error:
        limit = f"needs packages that are not here: pip install 'pagemirror[tracing]' ({error})"
        raise SettingError("--otlp-endpoint", endpoint, limit) from error
    traces = Traces(endpoint, "pagemirror-runtime")
    servicer.notes.append(FirstTokenSpans(traces).note)
    return traces


async def _watch_thread(thread: ExecutionThread, limit_s: float, checker: health.aio.HealthServicer) -> None:
    """Say NOT_SERVING while a job is awaited and none has ended for the limit; looks are counted, as the clock may have stood
    still with us.
    """
    before: int | None = None
    ticks, serving = 0, True
    while True:
        await asyncio.sleep(limit_s / STUCK_TICKS)
        now = thread.num_done if thread.num_given > thread.num_done else None
        ticks = ticks + 1 if now is not None and now == before else 0
        before = now
        if (ticks < STUCK_TICKS) is not serving:
            serving = not serving
            if not serving:
                log.warning("stuck", limit_s=limit_s)
            await _set_health(checker, serving=serving)


async def _set_health(checker: health.aio.HealthServicer, *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", SERVICE_NAME):
        await checker.set(service, status)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def configure_logging(settings: RuntimeSettings) -> None:
    """Log lines go to stderr; stdout carries the readiness line and nothing else."""
    processors: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    if settings.log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain: with rich installed a traceback would show local variables, people's prompts among them, and take seconds.
        plain = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Like asyncio.run, on uvloop where it is installed (extra `fast`)."""
    fast = importlib.util.find_spec("uvloop") is not None
    with asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop if fast else None) as runner:
        runner.run(main)


def run(settings: RuntimeSettings) -> int:
    """The whole life of a runtime process; returns its exit status: 0 when asked to end, 1 when it could not serve."""
    configure_logging(settings)
    thread = ExecutionThread()
    try:
        _run_loop(serve(settings, thread, is_last=True))
        status = 0
    except RuntimeServiceError as error:
        sys.stderr.write(f"error: {error}\n")
        status = 1
    except Exception:
        log.exception("the runtime cannot serve")
        status = 1
    if not thread.join(THREAD_JOIN_S):
        # A step that does not end: the interpreter's own exit could wait for it, or crash under it.
        log.warning("leaving a step behind that does not end")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
