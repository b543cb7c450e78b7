"""The scheduler's end of the stream to one runtime: hello, one writer, results in order, watchdogs.

`RuntimeLink` is one open `Execute` stream. It decides nothing: it hands ops out, hands answers in, and says when it is broken.
What happens then (a new session, here or on a new stream) is the engine loop's affair.

Times are those of the event loop's clock. Everything runs on one event loop; no method is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from pagemirror.v1 import runtime_pb2, runtime_pb2_grpc
from scheduler_service.agreement import ExpectedShape
from scheduler_service.channels import open_channel
from scheduler_service.columns import int32_to_bytes
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.errors import (
    LinkBrokenError,
    ProtocolError,
    RuntimeBusyError,
    RuntimeLinkError,
    shorten,
)
from scheduler_service.tls import ClientTls, TlsFileError
from scheduler_service.wire import StepRefusal, op_to_proto, refusal_from_proto, result_from_proto
from scheduler_service.wire_facts import PROTOCOL_VERSION, MirrorRows, RuntimeFacts, facts_from_proto, mirror_rows_from_proto

log = structlog.get_logger("pagemirror.runtime_client")

_EXECUTE = f"/{runtime_pb2.DESCRIPTOR.services_by_name['RuntimeService'].full_name}/Execute"


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Time limits of a link, in seconds, and how it is secured."""

    heartbeat_timeout_s: float = 5.0
    """Silence after which the runtime counts as gone."""
    step_timeout_s: float = 120.0
    """Longest time from sending an op to its answer, and for a hello (the runtime may still be compiling)."""
    close_timeout_s: float = 1.0
    """How long a close waits for the runtime to end the stream by itself."""
    tls: ClientTls | None = None
    """Certificates, which are read again at each connect; None: plaintext."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the runtime made of one op, and how long it took from the sending, in seconds."""

    outcome: StepResult | StepRefusal
    seconds: float


class RuntimeLink:
    """One open stream to a runtime. Made by `open_link`."""

    def __init__(self, target: str, limits: LinkLimits, wake: Callable[[], None]) -> None:
        self.target = target
        self.answers: deque[Answer] = deque()
        """Answers to ops of the present session, in the order of the ops; the owner takes them from the left."""
        self.broken: RuntimeLinkError | None = None
        """Why the link can no longer be used; None while it can."""
        self._limits = limits
        self._wake = wake
        self._session_no = 0
        self._in_flight: deque[tuple[int, int, float]] = deque()  # step, rows, time of sending
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._reset_done = asyncio.Event()
        self._silent_ticks = 0
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self._channel = open_channel(target, limits.tls)
        except TlsFileError as error:
            raise LinkBrokenError(f"no TLS to {target}: {error}") from error
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._call: grpc.aio.StreamStreamCall[bytes, runtime_pb2.ExecuteResponse] | None = None

    async def _open(self, scheduler_epoch: int, session_no: int, overlap_depth: int, expected: ExpectedShape) -> RuntimeFacts:
        self._session_no = session_no
        # Not the stub's method: an op is serialised once, however many runtimes it goes to.
        execute: grpc.aio.StreamStreamMultiCallable[bytes, runtime_pb2.ExecuteResponse]
        execute = self._channel.stream_stream(_EXECUTE, None, runtime_pb2.ExecuteResponse.FromString)
        self._call = execute()
        hello = runtime_pb2.SchedulerHello(
            protocol_version=PROTOCOL_VERSION,
            scheduler_epoch=scheduler_epoch,
            session_no=session_no,
            overlap_depth=overlap_depth,
            expect_page_size=expected.page_size,
            expect_num_pages=expected.num_pages,
            expect_max_rows=expected.max_rows,
            expect_max_pages_per_row=expected.max_pages_per_row,
        )
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                await self._call.write(runtime_pb2.ExecuteRequest(hello=hello).SerializeToString())
                reply = await self._call.read()
        except TimeoutError:
            raise LinkBrokenError(f"{self.target} did not answer the hello for {self._limits.step_timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise _broken(self.target, error) from error
            # Either the two sides disagree, which its facts show, or the runtime serves somebody else.
            expected.check(await self.read_facts())
            raise RuntimeBusyError(f"{self.target} refuses the session: {shorten(error.details() or '')}") from error
        if not isinstance(reply, runtime_pb2.ExecuteResponse):
            raise LinkBrokenError(f"{self.target} ended the stream instead of answering the hello")
        if reply.WhichOneof("message") != "hello":
            raise ProtocolError(f"{self.target} answered the hello with {reply.WhichOneof('message')}")
        facts = facts_from_proto(reply.hello)
        expected.check(facts)
        for work in (self._read(), self._write(), self._watch()):
            self._tasks.append(asyncio.create_task(work))
        return facts

    @property
    def num_in_flight(self) -> int:
        """Ops of the present session that were sent and not answered."""
        return len(self._in_flight)

    def send(self, op: ForwardOp, encoded: bytes | None = None) -> None:
        """Queue one op for the writer. Nothing is sent once the link is broken: the owner resets then.

        `encoded` is what `encode` made of the op, where it goes to several links.
        """
        if op.session_no != self._session_no:
            raise ValueError(f"op of session {op.session_no} on a link of session {self._session_no}")
        self._in_flight.append((op.step, op.num_rows, asyncio.get_running_loop().time()))
        self._outbox.put_nowait(encode(op) if encoded is None else encoded)

    async def reset(self, session_no: int) -> None:
        """Start session `session_no` on this stream; returns when nothing of an older one runs any more.

        Raises:
            RuntimeLinkError: the link broke, or the runtime did not answer within the step limit.
        """
        self._session_no = session_no
        self._in_flight.clear()
        self.answers.clear()
        self._reset_done.clear()
        reset = runtime_pb2.ExecuteRequest(reset=runtime_pb2.Reset(session_no=session_no))
        self._outbox.put_nowait(reset.SerializeToString())
        try:
            async with asyncio.timeout(self._limits.step_timeout_s):
                await self._reset_done.wait()
        except TimeoutError:
            self._break(LinkBrokenError(f"{self.target} did not answer a reset for {self._limits.step_timeout_s:g} s"))
        if self.broken is not None:
            raise self.broken

    async def read_rows(self, rows: list[int], timeout_s: float) -> MirrorRows:
        """Rows of the mirror between two ops; an empty list asks for every row with a lease.

        Raises:
            RuntimeLinkError: the runtime did not answer, or not as it should.
        """
        request = runtime_pb2.ReadRowsRequest(rows=int32_to_bytes(rows))
        try:
            return mirror_rows_from_proto(await self._stub.ReadRows(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise _broken(self.target, error) from error

    async def read_facts(self) -> RuntimeFacts:
        """The runtime's facts without a session."""
        try:
            return facts_from_proto(await self._stub.GetInfo(runtime_pb2.GetRuntimeInfoRequest(), timeout=10))
        except grpc.aio.AioRpcError as error:
            raise _broken(self.target, error) from error

    async def close(self) -> None:
        """End the stream: half-close and wait a moment for the runtime's end, then cancel. Harmless when repeated."""
        reader = self._tasks[0] if self._tasks else None
        for task in self._tasks[1:]:
            task.cancel()
        if self._call is not None and reader is not None and self.broken is None:
            self.broken = LinkBrokenError("closed")
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(self._limits.close_timeout_s):
                    await self._call.done_writing()
                    await asyncio.wait({reader})
        for task in self._tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._channel.close()

    def _break(self, error: RuntimeLinkError) -> None:
        if self.broken is None:
            self.broken = error
            self._reset_done.set()
            self._wake()

    async def _write(self) -> None:
        assert self._call is not None
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except grpc.aio.AioRpcError as error:
            self._break(_broken(self.target, error))
        except asyncio.InvalidStateError:
            # The call is over; the reader knows why and says so.
            pass

    async def _read(self) -> None:
        assert self._call is not None
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, runtime_pb2.ExecuteResponse):
                    self._break(LinkBrokenError(f"{self.target} ended the stream"))
                    return
                self._silent_ticks = 0
                self._take(message)
                # Whoever waits for the answer comes first, and then the next message is asked for.
                await asyncio.sleep(0)
        except grpc.aio.AioRpcError as error:
            self._break(_broken(self.target, error))
        except RuntimeLinkError as error:
            self._break(error)

    def _take(self, message: runtime_pb2.ExecuteResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            return
        if kind == "reset_done":
            if message.reset_done.session_no == self._session_no:
                self._reset_done.set()
            return
        if kind == "result":
            session_no, step = message.result.session_no, message.result.step
        elif kind == "refusal":
            session_no, step = message.refusal.session_no, message.refusal.step
        else:
            raise ProtocolError(f"{self.target} sent {kind or 'an empty message'} in the middle of a stream")
        if session_no != self._session_no:
            return  # of a session that a reset has ended meanwhile
        if not self._in_flight or self._in_flight[0][0] != step:
            awaited = f"step {self._in_flight[0][0]}" if self._in_flight else "none"
            raise ProtocolError(f"{self.target} answered step {step}, awaited was {awaited}")
        _, num_rows, sent_at = self._in_flight.popleft()
        outcome = result_from_proto(message.result, num_rows) if kind == "result" else refusal_from_proto(message.refusal)
        self.answers.append(Answer(outcome, asyncio.get_running_loop().time() - sent_at))
        self._wake()

    async def _watch(self) -> None:
        # Ticks are counted instead of comparing clocks: when this process itself was stopped for a while, that is one tick, not
        # proof that the runtime is gone or slow.
        limit, step_limit = self._limits.heartbeat_timeout_s, self._limits.step_timeout_s
        tick = min(limit, step_limit) / 5
        oldest, step_ticks = (0, 0), 0
        while self.broken is None:
            await asyncio.sleep(tick)
            self._silent_ticks += 1
            awaited = (self._session_no, self._in_flight[0][0] if self._in_flight else 0)
            step_ticks = step_ticks + 1 if awaited[1] and awaited == oldest else 0
            oldest = awaited
            if self._silent_ticks * tick > limit:
                self._break(LinkBrokenError(f"no sign of life from {self.target} for {limit:g} s"))
            elif step_ticks * tick > step_limit:
                self._break(LinkBrokenError(f"step {awaited[1]} took {self.target} over {step_limit:g} s"))


def encode(op: ForwardOp) -> bytes:
    """The op as the message that goes over the wire."""
    return runtime_pb2.ExecuteRequest(op=op_to_proto(op)).SerializeToString()


async def open_link(
    target: str,
    *,
    scheduler_epoch: int,
    session_no: int,
    overlap_depth: int,
    expected: ExpectedShape,
    limits: LinkLimits,
    wake: Callable[[], None],
) -> tuple[RuntimeLink, RuntimeFacts]:
    """Connect, exchange hellos and start session `session_no`. `wake` is called for each answer and when the link breaks.

    Raises:
        RuntimeMismatchError: a configured value disagrees; trying again cannot help.
        RuntimeLinkError: nobody there, busy, or not speaking the protocol; trying again may help.
    """
    link = RuntimeLink(target, limits, wake)
    try:
        facts = await link._open(scheduler_epoch, session_no, overlap_depth, expected)
    except BaseException:
        await link.close()
        raise
    return link, facts


def _broken(target: str, error: grpc.aio.AioRpcError) -> LinkBrokenError:
    return LinkBrokenError(f"{target}: {error.code().name}: {shorten(error.details() or '')}")
