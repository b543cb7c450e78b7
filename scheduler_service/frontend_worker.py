"""One process of `pagemirror frontend`: a public server, a session with the scheduler, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

import structlog

from scheduler_service import event_loop
from scheduler_service.app import StopSignals, first
from scheduler_service.core.errors import InternalError, PagemirrorError
from scheduler_service.frontend_link import SchedulerLink
from scheduler_service.frontend_metrics import FrontendMetrics
from scheduler_service.frontend_servicer import FrontendServicer
from scheduler_service.frontend_settings import FrontendSettings
from scheduler_service.logs import configure_logs
from scheduler_service.public_server import HealthBoard, PublicServer
from scheduler_service.tracing_setup import close_traces, open_traces

log = structlog.get_logger("pagemirror.frontend")

_STOP_GRACE_S = 1.0  # for streams to carry away the status they were just ended with


async def serve(settings: FrontendSettings, announce: Callable[[str], None], parent: int | None = None) -> None:
    """Serve until a signal, or until process `parent` has ended. `announce` is given the address, and that of the gateway port
    after a space where there is one.

    Raises:
        StartError: the address cannot be had, or a file of the settings cannot be used.
    """
    stop = StopSignals()
    board = HealthBoard()
    security = settings.security()
    await security.channel(settings.scheduler).close()  # what is wrong with its files is told now
    metrics, shared = FrontendMetrics(settings.worker), settings.workers > 1
    metrics.watch_tasks(asyncio.get_running_loop())
    traces = open_traces(settings.otlp_endpoint, "pagemirror-frontend")
    front = PublicServer(settings, metrics, board, share_port=shared, traces=traces)

    def show(connected: bool) -> None:
        board.show(connected)
        metrics.set_connected(connected)

    link = SchedulerLink(
        settings.scheduler,
        security,
        max_unread=settings.max_unread_tokens,
        on_connected=show,
        on_model=metrics.set_model,
    )
    board.show(False)
    servicer = FrontendServicer(link, serves_page_events=settings.serves_page_events)
    metrics.servicer = servicer
    front.add_servicer(servicer)
    servers, addresses = [front.server], [front.address]
    engine = None
    if settings.gateway_listen is not None:
        from scheduler_service.gateway.linked_engine import LinkedEngine
        from scheduler_service.gateway.server import GatewayServer

        gateway = GatewayServer(settings, metrics, board, share_port=shared, traces=traces)
        engine = LinkedEngine(link)
        gateway.add(engine)
        servers.append(gateway.server)
        addresses.append(gateway.address)
    if settings.metrics_port is not None:
        host = settings.metrics_address
        log.info("serving_metrics", host=host, port=metrics.serve(host, settings.metrics_port))
    tasks = [asyncio.create_task(link.run(), name="link")]
    if parent is not None:
        tasks.append(asyncio.create_task(stop.follow_parent(parent)))
    try:
        with stop.installed():
            for server in servers:
                await server.start()
            await first(link.tried.wait(), stop.drain.wait())
            announce(" ".join(addresses))
            log.info("serving", address=front.address, scheduler=settings.scheduler)
            if await first(asyncio.shield(tasks[0]), stop.drain.wait()):  # raises what ended it
                raise InternalError("the link to the scheduler ended")
            log.info("draining", grace_s=settings.grace, live=servicer.num_live + (engine.num_live if engine else 0))
            await board.drain()
            servicer.draining = True
            waits = [servicer.idle.wait()]
            if engine is not None:
                engine.draining = True
                waits.append(engine.idle.wait())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.grace):
                    await first(asyncio.gather(*waits), stop.now.wait())  # a second signal: at once
            await asyncio.gather(*(server.stop(_STOP_GRACE_S) for server in servers))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(None) for server in servers))
        metrics.close()
        await close_traces(traces)


def main() -> None:
    """The program. It is given settings as JSON on stdin, and the id of the process to end with as argument; it writes its
    address to stdout once it serves. Exits with status 1 where it cannot.
    """
    settings = FrontendSettings.model_validate_json(sys.stdin.read())
    configure_logs(settings.log_level, as_json=settings.log_json)
    try:
        event_loop.run(serve(settings, _announce, int(sys.argv[1])))
    except PagemirrorError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def _announce(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
