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
from scheduler_service.channels import CLIENT_OPTIONS
from scheduler_service.columns import int32_to_bytes
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.errors import (
    LinkBrokenError,
    ProtocolError,
    RuntimeBusyError,
    RuntimeLinkError,
    RuntimeMismatchError,
)
from scheduler_service.wire import (
    PROTOCOL_VERSION,
    MirrorRows,
    RuntimeFacts,
    StepRefusal,
    facts_from_proto,
    mirror_rows_from_proto,
    op_to_proto,
    refusal_from_proto,
    result_from_proto,
)

log = structlog.get_logger("pagemirror.runtime_client")


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Time limits of a link, in seconds."""

    heartbeat_timeout_s: float = 5.0
    """Silence after which the runtime counts as gone."""
    step_timeout_s: float = 120.0
    """Longest time from sending an op to its answer, and for a hello (the runtime may still be compiling)."""
    close_timeout_s: float = 1.0
    """How long a close waits for the runtime to end the stream by itself."""


@dataclass(frozen=True, slots=True)
class ExpectedShape:
    """Values the scheduler's own configuration states; None: it takes what the runtime says."""

    page_size: int | None = None
    num_pages: int | None = None
    max_rows: int | None = None
    max_pages_per_row: int | None = None
    vocab_size: int | None = None
    max_context: int | None = None

    @classmethod
    def of(cls, facts: RuntimeFacts) -> ExpectedShape:
        """What a later runtime must say so that a core configured from `facts` can go on with it."""
        return cls(**{key: getattr(facts, key) for key in cls.__slots__})

    def check(self, facts: RuntimeFacts) -> None:
        """Raises RuntimeMismatchError, with both values, for the first value that disagrees."""
        for key in self.__slots__:
            configured, actual = getattr(self, key), getattr(facts, key)
            if configured is not None and configured != actual:
                raise RuntimeMismatchError(key, configured, actual)


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
        self._outbox: asyncio.Queue[runtime_pb2.ExecuteRequest] = asyncio.Queue()
        self._reset_done = asyncio.Event()
        self._silent_ticks = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._channel = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._call: grpc.aio.StreamStreamCall[runtime_pb2.ExecuteRequest, runtime_pb2.ExecuteResponse] | None = None

    async def _open(self, scheduler_epoch: int, session_no: int, overlap_depth: int, expected: ExpectedShape) -> RuntimeFacts:
        self._session_no = session_no
        self._call = self._stub.Execute()
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
                await self._call.write(runtime_pb2.ExecuteRequest(hello=hello))
                reply = await self._call.read()
        except TimeoutError:
            raise LinkBrokenError(f"{self.target} did not answer the hello for {self._limits.step_timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise _broken(self.target, error) from error
            # Either the two sides disagree, which its facts show, or the runtime serves somebody else.
            expected.check(await self.read_facts())
            raise RuntimeBusyError(f"{self.target} refuses the session: {error.details()}") from error
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

    def send(self, op: ForwardOp) -> None:
        """Queue one op for the writer. Nothing is sent once the link is broken: the owner resets then."""
        if op.session_no != self._session_no:
            raise ValueError(f"op of session {op.session_no} on a link of session {self._session_no}")
        self._in_flight.append((op.step, op.num_rows, asyncio.get_running_loop().time()))
        self._outbox.put_nowait(runtime_pb2.ExecuteRequest(op=op_to_proto(op)))

    async def reset(self, session_no: int) -> None:
        """Start session `session_no` on this stream; returns when nothing of an older one runs any more.

        Raises:
            RuntimeLinkError: the link broke, or the runtime did not answer within the step limit.
        """
        self._session_no = session_no
        self._in_flight.clear()
        self.answers.clear()
        self._reset_done.clear()
        self._outbox.put_nowait(runtime_pb2.ExecuteRequest(reset=runtime_pb2.Reset(session_no=session_no)))
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
        # Ticks without a message are counted instead of comparing clocks: when this process itself was stopped for a while,
        # that is one tick, not proof that the runtime is gone.
        limit = self._limits.heartbeat_timeout_s
        tick = limit / 5
        while self.broken is None:
            await asyncio.sleep(tick)
            self._silent_ticks += 1
            if self._silent_ticks > 5:
                self._break(LinkBrokenError(f"no sign of life from {self.target} for {limit:g} s"))
            elif self._in_flight:
                step, _, sent_at = self._in_flight[0]
                if asyncio.get_running_loop().time() - sent_at > self._limits.step_timeout_s:
                    self._break(LinkBrokenError(f"step {step} took {self.target} over {self._limits.step_timeout_s:g} s"))


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
    return LinkBrokenError(f"{target}: {error.code().name}: {error.details()}")
