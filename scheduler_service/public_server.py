"""The public server: GenerationService, health and, if wanted, reflection behind the gate, with the limits of the settings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagemirror.addresses import is_local
from pagemirror.unreadable import UnreadableMessages
from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.call_gate import MAX_CHECKS, MAX_OTHER_CALLS, CallGate
from scheduler_service.channels import bind, server_options
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.generation_servicer import GenerationServicer
from scheduler_service.metrics import CallMetrics
from scheduler_service.public_settings import PublicSettings
from scheduler_service.tokens import TokenFile
from scheduler_service.tracing_setup import call_tracing

if TYPE_CHECKING:
    from pagemirror.tracing import Traces

log = structlog.get_logger("pagemirror.app")

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

_SPARE_CALLS = 64  # refused ones, while they are told so


class HealthBoard:
    """The health service: SERVING while nothing speaks against it, under the empty name and under those of the services."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ["", SERVICE_NAME]
        self._against: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str) -> None:
        """One more service; before the first `show` or `note`."""
        self._names.append(name)

    def show(self, serving: bool) -> None:
        """Whether a runtime, or a scheduler that has one, serves us."""
        self.note("disconnected", not serving)

    def note(self, reason: str, holds: bool) -> None:
        """`reason` speaks against serving, or does not any more; the answer changes from the next turn of the event loop on."""
        (self._against.add if holds else self._against.discard)(reason)
        states = health_pb2.HealthCheckResponse
        status = states.NOT_SERVING if self._against else states.SERVING
        for name in self._names:
            task = asyncio.ensure_future(self.servicer.set(name, status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """NOT_SERVING from now on, whatever else is noted."""
        await self.servicer.enter_graceful_shutdown()


class PublicServer:
    """A server that listens and does not serve yet. Must be made inside a running event loop.

    Raises:
        StartError: the address cannot be had, or a file of the settings cannot be used.
    """

    def __init__(
        self,
        settings: PublicSettings,
        metrics: CallMetrics,
        board: HealthBoard,
        *,
        share_port: bool = False,
        traces: Traces | None = None,
    ) -> None:
        tokens = None if settings.token_file is None else TokenFile(settings.token_file)
        self.gate = CallGate(
            SERVICE_NAME,
            metrics,
            tokens=tokens,
            max_calls=settings.max_streams,
            write_timeout_s=settings.write_timeout,
        )
        self.server = grpc.aio.server(
            interceptors=[self.gate, UnreadableMessages(), *call_tracing(traces)],
            options=server_options(
                keepalive_s=settings.keepalive,
                max_message_bytes=settings.max_message_mib * 2**20,
                max_streams=settings.max_streams,
                max_connections=settings.max_connections,
                share_port=share_port,
            ),
            maximum_concurrent_rpcs=settings.max_streams + MAX_CHECKS + MAX_OTHER_CALLS + _SPARE_CALLS,
        )
        self.address = bind(self.server, settings.listen, settings.tls)
        if not is_local(settings.listen):
            _warn(settings, self.address)
        health_pb2_grpc.add_HealthServicer_to_server(board.servicer, self.server)
        if settings.reflection:
            reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)

    def add(self, engine: EngineLoop) -> None:
        """Serve this engine; before `start`."""
        self.add_servicer(GenerationServicer(engine))

    def add_servicer(self, servicer: generation_pb2_grpc.GenerationServiceServicer) -> None:
        """Serve by this; before `start`."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self.server)


def _warn(settings: PublicSettings, address: str) -> None:
    """What the operator of a port that other machines can reach should know of it."""
    if settings.tls is None:
        log.warning("plaintext_to_other_machines", address=address, reason="--insecure")
    if settings.tls_ca is None and settings.token_file is None:
        log.warning("anybody_may_call", address=address, reason="neither --token-file nor --tls-ca")
