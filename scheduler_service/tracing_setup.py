"""Whether calls and requests are traced; the packages for it are an extra, and are not imported unless they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from scheduler_service.errors import StartError
from scheduler_service.tally import Tally

if TYPE_CHECKING:
    from pagemirror.tracing import Traces


def open_traces(endpoint: str | None, service: str) -> Traces | None:
    """Send traces to a collector; None: there is no tracing. Raises StartError where packages are missing."""
    if endpoint is None:
        return None
    try:
        from pagemirror.tracing import Traces
        from scheduler_service.tracing import RequestTraces  # noqa: F401  (its packages are needed, too)
    except ImportError as error:
        missing = f"--otlp-endpoint needs packages that are not here: pip install 'pagemirror[tracing]' ({error})"
        raise StartError(missing) from error
    return Traces(endpoint, service)


def call_tracing(traces: Traces | None) -> list[grpc.aio.ServerInterceptor]:
    """To be the last of a server's interceptors."""
    if traces is None:
        return []
    from scheduler_service.tracing import CallTracing

    return [CallTracing(traces, "Generate")]


def trace_requests(tally: Tally, traces: Traces | None) -> None:
    """Have the requests of an engine traced that counts with this tally."""
    if traces is not None:
        from scheduler_service.tracing import RequestTraces

        tally.traces = RequestTraces(traces)


async def close_traces(traces: Traces | None) -> None:
    """Send what waits to be sent; that may take seconds where nobody listens."""
    if traces is not None:
        await asyncio.to_thread(traces.close)
