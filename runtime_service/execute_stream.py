"""One `Execute` call after its hello: reads ops and resets, has them executed in order, writes answers and heartbeats.

Three tasks share a stream: the reader queues jobs for the execution thread, the writer owns the gRPC context's `write`, and the
beat puts a heartbeat into the writer's queue every interval, whatever the execution thread does. `session_no` is the one
thing the execution thread looks at: a job whose session is no longer the stream's is dropped before it runs, and a result that
comes too late is discarded.

An op is a job in two halves, launch and collect, so up to `overlap_depth + 1` steps are on the device at once. Where a model's
steps are short, the reader runs an op itself while the execution thread is idle: the way there and back would cost more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from runtime_service import wire
from runtime_service.errors import Refusal, shorten
from runtime_service.execution import ExecutionThread
from runtime_service.ops import StepResult
from runtime_service.pending_step import PendingStep
from runtime_service.step_runner import StepRunner

log = structlog.get_logger(__name__)

MAX_UNANSWERED_OPS = 16
"""Ops read and not yet answered; a scheduler that keeps to its overlap_depth has at most 3. Beyond, reading pauses."""
MAX_UNANSWERED_RESETS = 16
"""Likewise for resets, of which a scheduler has one at a time."""
SHORT_STEP_S = 2e-3
"""An op that the reader ran and that took longer sends the next ones to the execution thread, ..."""
LONG_STEPS = 50
"""... so many of them: the event loop has heartbeats to send."""
WRITE_TIMEOUT_S = 60.0
"""A scheduler that reads nothing for so long loses its stream, so that another one can be served."""

Write = Callable[[wire.ExecuteResponse], Awaitable[None]]
Note = Callable[[PendingStep | Refusal, StepResult | Refusal], None]


class EndStream(Exception):
    """Ends a call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        detail = shorten(detail)
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class _LaunchedOp:
    """The second half of an op's job."""

    stream: ExecuteStream
    session_no: int
    launched: PendingStep | Refusal | None  # None: the op's session was over before it was launched

    def ready(self) -> bool:
        return not isinstance(self.launched, PendingStep) or self._is_over() or self.launched.ready()

    def finish(self) -> wire.ExecuteResponse | None:
        return self.stream._collect_op(self.launched, self.session_no)

    def _is_over(self) -> bool:
        return self.stream.session_no != self.session_no


class ExecuteStream:
    """The session(s) of one scheduler on one stream. Lives in the event loop, except for what the execution thread is given."""

    def __init__(
        self,
        hello: wire.SchedulerHello,
        thread: ExecutionThread,
        runner: StepRunner,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        *,
        short_steps: bool = False,
        note: Note = lambda step, answer: None,
    ) -> None:
        """`short_steps`: see `ModelInfo`. `note` is told each step and its answer, by whoever executes."""
        self.scheduler_epoch = hello.scheduler_epoch
        self.session_no = hello.session_no
        """Number of the present session; 0 once the stream is over."""
        self.last_step = 0
        self._overlap_depth = hello.overlap_depth
        self._thread = thread
        self._runner = runner
        self._note = note
        # Each answer with the room that it frees when it is written.
        self._outbox: asyncio.Queue[tuple[wire.ExecuteResponse, asyncio.Semaphore | None] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_UNANSWERED_OPS)
        self._reset_room = asyncio.Semaphore(MAX_UNANSWERED_RESETS)
        self._write_timeout_s = write_timeout_s
        self._short_steps = short_steps
        self._num_long = 0  # ops that go to the execution thread whatever it does
        self._beat_queued = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, code: grpc.StatusCode, detail: str) -> None:
        """End the stream from outside: queued ops are dropped unexecuted, the result of a running one is discarded."""
        self.session_no = 0
        if not self._over.done():
            self._over.set_exception(EndStream(code, detail))

    async def serve(
        self,
        requests: AsyncIterable[wire.ExecuteRequest],
        write: Write,
        hello: wire.ExecuteResponse,
        heartbeat_interval_s: float,
    ) -> None:
        """Open the session, answer with `hello`, then serve until the scheduler half-closes and everything is answered.

        Raises EndStream for any other end that is not a cancellation.
        """
        tasks: set[asyncio.Future[None]] = {self._over}
        try:
            await self._until_over(self._open())
            self._outbox.put_nowait((hello, None))
            writer = asyncio.create_task(self._write(write))
            tasks |= {writer, asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat(heartbeat_interval_s))}
            while not writer.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended the stream
                tasks -= done
        finally:
            self.session_no = 0
            self._over.cancel()
            for task in tasks:
                task.cancel()
            # Also takes up the errors of those that failed together.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_over(self, what: Awaitable[None]) -> None:
        task = asyncio.ensure_future(what)
        try:
            await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                self._over.result()
            await task
        finally:
            task.cancel()

    async def _open(self) -> None:
        session_no = self.session_no

        def job() -> None:
            if self.session_no == session_no:
                self._runner.open(self.scheduler_epoch, session_no, self._overlap_depth)

        try:
            await self._thread.call(job)
        except Refusal as refusal:
            raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, refusal.detail) from None

    # -- reading

    async def _read(self, requests: AsyncIterable[wire.ExecuteRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "op":
                await self._room.acquire()
            elif kind == "reset":
                await self._reset_room.acquire()
            if self.session_no == 0:
                return  # over, though this task is not cancelled yet; what it reads must not touch a successor's session
            if kind == "op":
                if self._short_steps and self._run_op(request.op):
                    await asyncio.sleep(0)  # the answer goes out first
                    if self.session_no and self._thread.is_idle:
                        self._runner.prepare()
                else:
                    self._submit_op(request.op)
            elif kind == "reset":
                self._submit_reset(request.reset.session_no)
            else:
                what = "a second hello" if kind == "hello" else "a message with no member set"
                raise EndStream(grpc.StatusCode.INVALID_ARGUMENT, f"{what}; after the hello come ops and resets")
        # Half-closed: everything before this job is answered when it is done.
        await self._thread.call(lambda: None)
        self._outbox.put_nowait(None)

    def _submit_op(self, message: wire.ForwardOpMessage) -> None:
        launch = partial(self._launch_op, message, self.session_no)
        self._thread.call_in_halves(launch, self._overlap_depth + 1, self._answer_op)

    def _run_op(self, message: wire.ForwardOpMessage) -> bool:
        """Do here what the execution thread would do, if it is idle and steps are short."""
        if not self._thread.is_idle:
            return False
        if self._num_long:
            self._num_long -= 1
            return False
        begin = time.perf_counter()
        response = None
        try:
            response = self._launch_op(message, self.session_no).finish()
        except Exception as error:
            self._end_by(error)
        if response is not None:
            self._outbox.put_nowait((response, self._room))
        else:
            self._room.release()
        if time.perf_counter() - begin > SHORT_STEP_S:
            self._num_long = LONG_STEPS
        return True

    def _submit_reset(self, session_no: int) -> None:
        if session_no <= self.session_no:
            detail = f"Reset to session {session_no}, which must be higher than the present one, {self.session_no}"
            raise EndStream(grpc.StatusCode.FAILED_PRECONDITION, detail)
        self.session_no = session_no
        self.last_step = 0
        # Like an op's, or answers would not be written in the order of their jobs.
        self._thread.call(partial(self._run_reset, session_no), partial(self._answer, frees=self._reset_room))

    # -- in the execution thread

    def _launch_op(self, message: wire.ForwardOpMessage, session_no: int) -> _LaunchedOp:
        if self.session_no != session_no:
            return _LaunchedOp(self, session_no, None)
        runner = self._runner
        try:
            op = wire.op_from_proto(message, runner.foreseen)
        except Refusal as refusal:
            return _LaunchedOp(self, session_no, runner.refuse(refusal))
        return _LaunchedOp(self, session_no, runner.launch(op))

    def _collect_op(self, launched: PendingStep | Refusal | None, session_no: int) -> wire.ExecuteResponse | None:
        # A session that is over has no use for its results: the reset that follows drops them, unread.
        if launched is None or self.session_no != session_no:
            return None
        answer = launched if isinstance(launched, Refusal) else self._runner.collect(launched)
        if self.session_no != session_no:
            return None
        self._note(launched, answer)
        if isinstance(answer, Refusal):
            return wire.refusal_to_proto(answer)
        self.last_step = max(self.last_step, answer.step)
        return wire.result_to_proto(answer)

    def _run_reset(self, session_no: int) -> wire.ExecuteResponse | None:
        if self.session_no == 0:
            return None
        self._runner.reset(session_no)
        return wire.reset_done_to_proto(session_no)

    # -- writing

    def _answer_op(self, future: asyncio.Future[wire.ExecuteResponse | None]) -> None:
        self._answer(future, frees=self._room)

    def _answer(self, future: asyncio.Future[wire.ExecuteResponse | None], *, frees: asyncio.Semaphore) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._end_by(error)
            return
        response = future.result()
        if response is not None:
            self._outbox.put_nowait((response, frees))
        else:
            frees.release()

    def _end_by(self, error: BaseException) -> None:
        log.error("answering failed", exc_info=error)
        self.end(grpc.StatusCode.INTERNAL, "an error inside the runtime; see its log")

    async def _write(self, write: Write) -> None:
        while (entry := await self._outbox.get()) is not None:
            response, frees = entry
            await write(response)
            if frees is not None:
                frees.release()
            elif response.HasField("heartbeat"):
                self._beat_queued = False

    async def _beat(self, interval_s: float) -> None:
        num_unread = 0
        while True:
            await asyncio.sleep(interval_s)
            # At most one waits to be written, so that a peer that does not read cannot make the queue grow.
            if self._beat_queued:
                # Beats are counted, not seconds: a time in which this process was stopped is not the peer's fault.
                num_unread += 1
                if num_unread * interval_s > self._write_timeout_s:
                    detail = f"the scheduler has read nothing for {self._write_timeout_s:g} s"
                    raise EndStream(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
            else:
                num_unread = 0
                self._beat_queued = True
                self._outbox.put_nowait((wire.heartbeat_to_proto(self.last_step), None))
