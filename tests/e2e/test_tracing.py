"""Traces over three processes, as a collector gets them: OTLP over gRPC, from a runtime, a scheduler and a front end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from pagemirror.v1 import generation_pb2
from scheduler_service.client import Client
from scheduler_service.columns import int32_to_bytes

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
READY = re.compile(r"pagemirror ready on (\S+) \(model (\S+)\)")


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent: (service, span) in the order of arrival."""

    spans: list[tuple[str, Any]] = field(default_factory=list)

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self) -> dict[tuple[str, str], Any]:
        """Spans of the trace of the test, by service and name."""
        return {(service, span.name): span for service, span in self.spans if span.trace_id.hex() == TRACE}


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and its URL."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


def events(span: Any) -> list[str]:
    """Names of a span's events."""
    return [event.name for event in span.events]


def attributes(span: Any) -> dict[str, Any]:
    """Of a span, without the prefix of ours."""
    values = {entry.key.removeprefix("pagemirror."): entry.value for entry in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


async def test_a_trace_goes_from_the_caller_to_the_step_of_its_first_token(
    commands: Any, child_env: dict[str, str], short_tmp: Path
) -> None:
    """The caller's span is the parent of the front end's call, that of the request, that of the step in the runtime."""
    async with collecting() as (collector, url):
        command = commands.up("--model", "fingerprint", "--workers", "1", "--chunk-size", "4", "--otlp-endpoint", url)
        async with commands.serving(command, child_env, short_tmp / "log") as served, Client(served.target) as client:
            request = generation_pb2.GenerateRequest(prompt=int32_to_bytes(range(1, 11)), max_tokens=5, request_id="traced")
            metadata = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
            answers = [answer async for answer in client.stub.Generate(request, metadata=metadata)]
            assert answers[-1].finished.completion_tokens == 5
            await client.info()  # is not traced
            await commands.until(lambda: len(collector.of_trace()) >= 3)
    found = collector.of_trace()
    call = found["pagemirror-frontend", "/pagemirror.v1.GenerationService/Generate"]
    whole = found["pagemirror-scheduler", "request"]
    step = found["pagemirror-runtime", "first token step"]
    assert [span.parent_span_id.hex() for span in (call, whole, step)] == [CALLER, call.span_id.hex(), whole.span_id.hex()]
    assert events(whole) == ["scheduled", "first_token"]
    assert attributes(whole)["request_id"] == attributes(step)["request_id"] == "traced"
    assert (attributes(whole)["generated_tokens"], attributes(whole)["finish_reason"]) == (5, "length")
    assert attributes(step)["tokens"] == 2  # the last of three chunks
    assert call.start_time_unix_nano <= whole.start_time_unix_nano <= step.start_time_unix_nano
    assert step.end_time_unix_nano <= whole.end_time_unix_nano
    names = {span.name for _, span in collector.spans}
    assert names == {"/pagemirror.v1.GenerationService/Generate", "request", "first token step"}  # the warm-up's included
