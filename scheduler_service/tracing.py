"""Spans of a scheduler and of front ends: one a call, by OpenTelemetry's instrumentation of gRPC, and one a request.

A request's span lasts from submit to its end and has events for what happens to it. Its trace context goes to the runtime with
the first op of a lease, so that the span of the step that computed the first token is its child.

Only imported where tracing is on.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from opentelemetry.instrumentation.grpc import filters
from opentelemetry.instrumentation.grpc._aio_server import (
    OpenTelemetryAioServerInterceptor,
    _OpenTelemetryAioServicerContext,
)
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from typing_extensions import override

from pagemirror.tracing import Traces, context_of, traceparent_of
from scheduler_service.core.intake import Outputs
from scheduler_service.core.ops import Cause, ForwardOp
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.trace_context import TRACEPARENT

_EVENTS = {Cause.FIRST_CHUNK: "scheduled", Cause.RESUME: "resumed"}


class CallTracing(OpenTelemetryAioServerInterceptor):
    """OpenTelemetry's interceptor, for handlers that write to their context, too; calls of the given methods alone."""

    def __init__(self, traces: Traces, *methods: str) -> None:
        """`methods`: names, without their service."""
        super().__init__(traces.tracer, filter_=filters.any_of(*(filters.method_name(name) for name in methods)))

    @override
    def _intercept_aio_server_stream(self, behavior: Any, handler_call_details: Any) -> Any:
        @contextlib.contextmanager
        def traced(context: Any) -> Iterator[Any]:
            with self._set_remote_context(context), self._start_span(handler_call_details, context) as span:
                TRACEPARENT.set(traceparent_of(set_span_in_context(span)))
                yield _OpenTelemetryAioServicerContext(context, span)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            with traced(context) as own:
                async for response in behavior(request, own):
                    yield response

        async def serve(request: Any, context: Any) -> None:
            with traced(context) as own:
                await behavior(request, own)

        return generate if inspect.isasyncgenfunction(behavior) else serve


class RequestTraces:
    """The spans of live requests, by id."""

    def __init__(self, traces: Traces) -> None:
        self._tracer = traces.tracer
        self._live: dict[str, Span] = {}
        self._without_token: set[str] = set()

    def begin(self, request_id: str, prompt_len: int, parent: str) -> tuple[Span, str]:
        """A span for a request that is about to be submitted, and its `traceparent`; its parent is one, or nothing."""
        attributes: dict[str, str | int] = {"pagemirror.request_id": request_id, "pagemirror.prompt_tokens": prompt_len}
        span = self._tracer.start_span("request", context_of(parent), attributes=attributes)
        return span, traceparent_of(set_span_in_context(span))

    def refuse(self, span: Span, reason: str) -> None:
        """The request was not accepted."""
        span.set_status(Status(StatusCode.ERROR, reason))
        span.end()

    def follow(self, request_id: str, span: Span) -> None:
        """The request was accepted."""
        if span.is_recording():
            self._live[request_id] = span
            self._without_token.add(request_id)

    def sent(self, op: ForwardOp) -> None:
        """An op is on its way."""
        if not self._live:
            return
        for position, cause in enumerate(op.extend_causes):
            if cause in _EVENTS and (span := self._live.get(op.requests[position].request_id)) is not None:
                attributes = {"pagemirror.step": op.step, "pagemirror.session_no": op.session_no}
                if cause is Cause.FIRST_CHUNK:
                    attributes["pagemirror.cached_tokens"] = op.requests[position].cached_tokens
                span.add_event(_EVENTS[cause], attributes)

    def delivered(self, outputs: Outputs) -> None:
        """Tokens and ends were handed on."""
        if self._without_token and outputs.tokens:
            for request_id in {request.request_id for request in outputs.requests} & self._without_token:
                self._without_token.discard(request_id)
                self._live[request_id].add_event("first_token")
        for request in outputs.finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._without_token.discard(request.request_id)
        span = self._live.pop(request.request_id, None)
        if span is None:
            return
        reason = request.finish_reason or FinishReason.FAILED
        span.set_attribute("pagemirror.finish_reason", reason.value)
        span.set_attribute("pagemirror.generated_tokens", request.num_output)
        span.set_attribute("pagemirror.cached_tokens", request.cached_tokens)
        span.set_attribute("pagemirror.retractions", request.num_retractions)
        if reason is FinishReason.FAILED:
            span.set_status(Status(StatusCode.ERROR, request.finish_detail))
        span.end()
