"""The port that a gateway is served on: one of its services, and health, in plaintext."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from pagemirror.addresses import is_local
from pagemirror.unreadable import UnreadableMessages
from scheduler_service.call_gate import MAX_CHECKS, MAX_OTHER_CALLS, CallGate
from scheduler_service.channels import bind, server_options
from scheduler_service.errors import StartError
from scheduler_service.gateway.engine import GatewayEngine
from scheduler_service.gateway.tokenizer_files import TokenizerFiles
from scheduler_service.metrics import CallMetrics
from scheduler_service.public_server import HealthBoard
from scheduler_service.public_settings import PublicSettings
from scheduler_service.tracing_setup import call_tracing

if TYPE_CHECKING:
    from pagemirror.tracing import Traces

log = structlog.get_logger("pagemirror.gateway")

_SPARE_CALLS = 64  # refused ones, while they are told so


class GatewayServer:
    """A server that listens and does not serve yet. Must be made inside a running event loop.

    Raises:
        StartError: the address cannot be had, or the packages of the extra `gateway` are not installed.
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
        assert settings.gateway_listen is not None
        self.api = settings.api
        try:
            if settings.api == "vllm":
                from scheduler_service.gateway.vllm import VllmServicer as Servicer
            else:
                from scheduler_service.gateway.tokenspeed import TokenSpeedServicer as Servicer  # type: ignore[assignment]
        except ImportError as error:
            raise StartError(
                f"--gateway-listen needs packages that are not here: pip install 'pagemirror[gateway]' ({error})"
            ) from error
        self._kind = Servicer
        self._serves_events = settings.page_events is not False
        self._files = TokenizerFiles(settings.gateway_tokenizer)
        self.service_name = Servicer.service_name
        board.add(self.service_name)
        # Calls that are no requests (aborts above all) are counted apart, so that requests cannot shut them out.
        gate = CallGate(
            f"{self.service_name}/Generate",
            metrics,
            max_calls=settings.max_streams,
            max_others=settings.max_streams + MAX_OTHER_CALLS,
            write_timeout_s=settings.write_timeout,
        )
        self.server = grpc.aio.server(
            interceptors=[gate, UnreadableMessages(), *call_tracing(traces)],
            options=server_options(
                keepalive_s=settings.keepalive,
                max_message_bytes=settings.max_message_mib * 2**20,
                max_streams=2 * settings.max_streams,
                max_connections=settings.max_connections,
                share_port=share_port,
            ),
            maximum_concurrent_rpcs=2 * settings.max_streams + MAX_CHECKS + MAX_OTHER_CALLS + _SPARE_CALLS,
        )
        self.address = bind(self.server, settings.gateway_listen, None)
        if not is_local(settings.gateway_listen):
            log.warning("plaintext_to_other_machines", address=self.address, reason="--insecure")
            log.warning("anybody_may_call", address=self.address, reason="a gateway shows neither token nor certificate")
        health_pb2_grpc.add_HealthServicer_to_server(board.servicer, self.server)

    def add(self, engine: GatewayEngine) -> None:
        """Serve this engine; before `start`."""
        self._kind(engine, self._files, serves_events=self._serves_events).register(self.server)
