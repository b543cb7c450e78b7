"""`RuntimeService`: who may hold the stream, and the two calls beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from grpc import aio
from typing_extensions import override

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from runtime_service import wire
from runtime_service.errors import Refusal
from runtime_service.execute_stream import EndStream, ExecuteStream, Note
from runtime_service.execution import ExecutionThread
from runtime_service.ops import StepResult
from runtime_service.pending_step import PendingStep
from runtime_service.session import MAX_OVERLAP_DEPTH
from runtime_service.step_runner import RowsSnapshot, StepRunner
from runtime_service.wire import RuntimeFacts

log = structlog.get_logger(__name__)

SERVICE_NAME = runtime_pb2.DESCRIPTOR.services_by_name["RuntimeService"].full_name
MAX_CONCURRENT_READS = 4
"""`ReadRows` calls that may run or wait at a time: each takes a turn between two ops."""
HELLO_TIMEOUT_S = 10.0
"""How long a stream may stay without its hello."""

T = TypeVar("T")


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    """Serves one scheduler at a time. Calls that arrive before `set_ready` wait for it."""

    def __init__(self, thread: ExecutionThread) -> None:
        self._thread = thread
        self.notes: list[Note] = []
        """Told of each step and its answer, see `ExecuteStream`; to be filled before the first session."""
        self._ready: asyncio.Future[tuple[StepRunner, RuntimeFacts]] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._stream: ExecuteStream | None = None
        self._num_reads = 0

    def register(self, server: aio.Server) -> None:
        """Add this service to a server."""
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self, server)

    def set_ready(self, runner: StepRunner, facts: RuntimeFacts) -> None:
        """The model is loaded and warm: start to answer."""
        self._ready.set_result((runner, facts))

    def shut_down(self) -> None:
        """End the stream with UNAVAILABLE, and every call that comes from now on."""
        self._closing.set()
        if self._stream is not None:
            self._stream.end(grpc.StatusCode.UNAVAILABLE, "the runtime is shutting down")

    # -- RPCs

    @override
    async def Execute(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[runtime_pb2.ExecuteRequest],
        context: aio.ServicerContext[runtime_pb2.ExecuteRequest, runtime_pb2.ExecuteResponse],
    ) -> None:
        """See runtime.proto."""
        try:
            hello = await self._unless_closing(self._read_hello(request_iterator))
            runner, facts = await self._unless_closing(asyncio.shield(self._ready))
            _compare_expectations(hello, facts)
            stream = self._take_over(hello, runner, facts)
            try:
                answer = wire.hello_to_proto(facts)
                await stream.serve(request_iterator, context.write, answer, facts.heartbeat_interval_s)
            finally:
                self._leave(stream, runner)
        except EndStream as end:
            log.info("stream ended", code=end.code.name, detail=end.detail)
            await context.abort(end.code, end.detail)

    @override
    async def GetInfo(
        self,
        request: runtime_pb2.GetRuntimeInfoRequest,
        context: aio.ServicerContext[runtime_pb2.GetRuntimeInfoRequest, runtime_pb2.RuntimeInfo],
    ) -> runtime_pb2.RuntimeInfo:
        """See runtime.proto."""
        try:
            _, facts = await self._unless_closing(asyncio.shield(self._ready))
        except EndStream as end:
            await _abort(context, end)
        return wire.info_to_proto(facts)

    @override
    async def ReadRows(
        self,
        request: runtime_pb2.ReadRowsRequest,
        context: aio.ServicerContext[runtime_pb2.ReadRowsRequest, runtime_pb2.ReadRowsResponse],
    ) -> runtime_pb2.ReadRowsResponse:
        """See runtime.proto."""
        try:
            return wire.rows_to_proto(await self._unless_closing(self._read_rows(request)))
        except EndStream as end:
            await _abort(context, end)

    # -- details

    async def _unless_closing(self, what: Awaitable[T]) -> T:
        """The value of `what`, or EndStream(UNAVAILABLE) if the runtime begins to shut down first."""
        task = asyncio.ensure_future(what)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.is_set():
                raise EndStream(grpc.StatusCode.UNAVAILABLE, "the runtime is shutting down")
            return task.result()
        finally:
            closing.cancel()
            task.cancel()
            # Takes up the error of a task that failed in the same moment; nobody else will.
            await asyncio.gather(task, return_exceptions=True)

    async def _read_rows(self, request: runtime_pb2.ReadRowsRequest) -> RowsSnapshot:
        runner, facts = await asyncio.shield(self._ready)
        try:
            rows = wire.rows_from_proto(request)
        except wire.MalformedColumnError as error:
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        if rows is not None and len(rows) > facts.max_rows:
            detail = f"{len(rows)} row numbers were asked for, this runtime has {facts.max_rows} rows"
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, detail)
        if self._num_reads >= MAX_CONCURRENT_READS:
            detail = f"{MAX_CONCURRENT_READS} readings of rows are going on, which is the limit; try again later"
            raise EndStream(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        self._num_reads += 1
        reading = self._thread.call(lambda: runner.read_rows(rows))
        # It takes its turn, and counts, also when the caller has gone.
        reading.add_done_callback(self._note_read)
        try:
            return await asyncio.shield(reading)
        except IndexError as error:
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def _note_read(self, reading: asyncio.Future[RowsSnapshot]) -> None:
        self._num_reads -= 1
        if not reading.cancelled():
            reading.exception()  # looked at: nobody else may be there to do it

    @staticmethod
    async def _read_hello(requests: AsyncIterator[runtime_pb2.ExecuteRequest]) -> runtime_pb2.SchedulerHello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                request = await anext(aiter(requests))
        except StopAsyncIteration:
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, "the stream was closed before its hello") from None
        except TimeoutError:
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        kind = request.WhichOneof("message")
        if kind != "hello":
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be a hello, it is {kind or 'empty'}")
        hello = request.hello
        if hello.protocol_version != wire.PROTOCOL_VERSION:
            detail = f"the scheduler speaks protocol version {hello.protocol_version}, this runtime {wire.PROTOCOL_VERSION}"
            raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, detail)
        if hello.scheduler_epoch == 0 or hello.session_no == 0:
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, "scheduler_epoch and session_no of a hello must not be 0")
        if hello.overlap_depth > MAX_OVERLAP_DEPTH:
            detail = f"overlap_depth is {hello.overlap_depth}, it must be at most {MAX_OVERLAP_DEPTH}"
            raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, detail)
        return hello

    def _take_over(self, hello: runtime_pb2.SchedulerHello, runner: StepRunner, facts: RuntimeFacts) -> ExecuteStream:
        """Make this hello's stream the present one; whatever stream of the same scheduler there was ends at once."""
        present = self._stream
        if present is not None and present.session_no:
            if present.scheduler_epoch != hello.scheduler_epoch:
                detail = (
                    f"the stream of scheduler {present.scheduler_epoch:#018x} is alive, "
                    f"scheduler {hello.scheduler_epoch:#018x} must wait for its end"
                )
                raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, detail)
            if hello.session_no <= present.session_no:
                detail = f"session {hello.session_no} is not higher than the present one, {present.session_no}"
                raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, detail)
            present.end(grpc.StatusCode.ABORTED, f"session {hello.session_no} took over from {present.session_no}")
        self._stream = ExecuteStream(hello, self._thread, runner, short_steps=facts.model.short_steps, note=self._note)
        log.info("session opens", scheduler_epoch=f"{hello.scheduler_epoch:#018x}", session_no=hello.session_no)
        return self._stream

    def _note(self, step: PendingStep | Refusal, answer: StepResult | Refusal) -> None:
        for note in self.notes:
            note(step, answer)

    def _leave(self, stream: ExecuteStream, runner: StepRunner) -> None:
        """The stream is over. Unless another one has taken its place, everything it held is dropped."""
        if self._stream is stream:
            self._stream = None
            self._thread.call(runner.close)


def _compare_expectations(hello: runtime_pb2.SchedulerHello, facts: RuntimeFacts) -> None:
    differing = [
        f"{name} is {expected} in the scheduler's configuration and {actual} in the runtime"
        for name, actual in (
            ("page_size", facts.page_size),
            ("num_pages", facts.num_pages),
            ("max_rows", facts.max_rows),
            ("max_pages_per_row", facts.max_pages_per_row),
        )
        if hello.HasField(f"expect_{name}") and (expected := getattr(hello, f"expect_{name}")) != actual  # type: ignore[arg-type]
    ]
    if differing:
        raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(differing))


async def _abort(context: aio.ServicerContext[Any, Any], end: EndStream) -> NoReturn:
    await context.abort(end.code, end.detail)
    raise AssertionError("abort() returned")
