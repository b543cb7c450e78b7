"""Traces by OpenTelemetry, sent by OTLP over gRPC: what both services share of it. Only imported where tracing is on."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_EXPORT_TIMEOUT_S = 5.0
_DELAY_MS = 500.0  # until a span is sent
_HEADER = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


class Traces:
    """A tracer, and the thread that sends its spans. A collector that is away costs the spans, nothing else."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint`: `http://HOST:PORT`, or `https://…` for TLS."""
        # Nothing global: what is traced is what is given this tracer.
        self.provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint, insecure=not endpoint.startswith("https:"), timeout=_EXPORT_TIMEOUT_S, channel_options=_NO_PROXY
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
        self.tracer: Tracer = self.provider.get_tracer("pagemirror")

    def close(self) -> None:
        """Send what waits to be sent, and stop; takes a few seconds where nobody listens."""
        self.provider.shutdown()


# A proxy from the environment must never see traffic between processes of one machine or cluster.
_NO_PROXY = (("grpc.enable_http_proxy", 0),)


def context_of(traceparent: str) -> Context:
    """The trace context that a W3C `traceparent` names; an empty one where it is empty or no such thing."""
    return _PROPAGATOR.extract({_HEADER: traceparent}, context=Context())


def traceparent_of(context: Context) -> str:
    """The W3C `traceparent` of the span in a context; empty where there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return carrier.get(_HEADER, "")


__all__ = ["Span", "Traces", "context_of", "traceparent_of"]
