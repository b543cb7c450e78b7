"""The front end's side of GenerationService.Session: many requests over one stream.

    session = await Session.open(stub, metadata)
    output = await session.submit(request)      # waits while the session's window is full
    while True:
        piece = await output.take()             # raises SessionCallError where Generate's call would end with that status
        if piece.finished is not None:
            break

What a request's reader leaves is kept for it, up to a limit, so that no other request of the session waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, Self

import grpc
import structlog

from pagemirror.v1 import generation_pb2
from scheduler_service.columns import float32_from_bytes, int32_from_bytes, int32_to_bytes
from scheduler_service.errors import OutputUnreadError
from scheduler_service.session_output import SessionCallError, SessionOutput
from scheduler_service.subscription import DEFAULT_MAX_UNREAD

log = structlog.get_logger("pagemirror.session")

_MAX_SUBMITS = 256  # of one message
_SHARED_BYTES = 256 * 1024  # of submits that share a message; one alone may be larger
_OVERHEAD_BYTES = 1024  # of one submit in a message of its own
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Session:
    """One open session. `max_unread`: values kept for each request whose reader is late; beyond, the request ends."""

    def __init__(self, call: Any, welcome: generation_pb2.SessionWelcome, max_unread: int = DEFAULT_MAX_UNREAD) -> None:
        self.window = window = welcome.window
        self._max_bytes = welcome.max_message_bytes - _OVERHEAD_BYTES
        self._call = call
        self._max_unread = max_unread
        self._room = asyncio.Semaphore(window)
        self._live: dict[int, SessionOutput] = {}
        self._last = 0
        self._submits: deque[tuple[SessionOutput, generation_pb2.GenerateRequest, str]] = deque()
        self._aborts: list[int] = []
        self._to_send = asyncio.Event()
        self._no_more = False
        self.broken: SessionCallError | None = None
        """Why the session is over."""
        self.over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._send())]

    @classmethod
    async def open(cls, stub: Any, metadata: Any = (), max_unread: int = DEFAULT_MAX_UNREAD) -> Self:
        """Say hello and await the answer. Raises SessionCallError when the scheduler refuses, or is not there."""
        call = stub.Session(metadata=metadata)
        try:
            await call.write(generation_pb2.SessionRequest(hello=generation_pb2.SessionHello()))
            message = await call.read()
            if message is grpc.aio.EOF or not message.HasField("welcome"):
                raise await _ending(call)
        except grpc.aio.AioRpcError as error:
            raise SessionCallError(error.code(), error.details() or "") from error
        except asyncio.InvalidStateError as error:  # the call was over before the hello
            raise await _ending(call) from error
        except BaseException:
            call.cancel()
            raise
        return cls(call, message.welcome, max_unread)

    @property
    def num_live(self) -> int:
        """Requests that are not over."""
        return len(self._live) + len(self._submits)

    async def submit(self, request: generation_pb2.GenerateRequest, traceparent: str = "") -> SessionOutput:
        """Send a request, whose id must be set; waits while the window is full.

        Raises:
            SessionCallError: the session is over, or the request alone is more than the scheduler takes in a message.
        """
        if (size := request.ByteSize() + len(traceparent)) > self._max_bytes:
            details = f"the request has {size} bytes, but the scheduler takes at most {self._max_bytes} (--max-message-mib)"
            raise SessionCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        await self._room.acquire()
        if self.broken is not None:
            self._room.release()
            raise self.broken
        num_logprobs = request.sampling.num_logprobs if request.sampling.HasField("num_logprobs") else None
        output = SessionOutput(request.request_id, num_logprobs, self._max_unread)
        self._submits.append((output, request, traceparent))
        self._to_send.set()
        return output

    def abort(self, output: SessionOutput) -> None:
        """End a request, if it is not over."""
        if self.broken is None and not output.is_over:
            if output.number:
                self._aborts.append(output.number)
            else:
                self._submits = deque(entry for entry in self._submits if entry[0] is not output)
                output.end(None, SessionCallError(grpc.StatusCode.CANCELLED, "ended before it was sent"))
                self._room.release()
            self._to_send.set()

    async def drain(self) -> None:
        """Submit no more; return when the session is over: every request has ended."""
        self._no_more = True
        self._to_send.set()
        await self.over.wait()

    async def close(self) -> None:
        """End the session, and with it its requests."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._break(SessionCallError(grpc.StatusCode.CANCELLED, "the session was closed"))

    # --- the stream -------------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Whatever waits, in as few messages as it takes."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # told to whoever reads
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                while self._submits or self._aborts:
                    await self._call.write(self._next_message())
                if self._no_more:
                    await self._call.done_writing()
                    return

    def _next_message(self) -> generation_pb2.SessionRequest:
        message = generation_pb2.SessionRequest()
        num_bytes = 0
        while self._submits and len(message.submits) < _MAX_SUBMITS:
            output, request, traceparent = self._submits[0]
            num_bytes += request.ByteSize() + len(traceparent)
            if message.submits and num_bytes > _SHARED_BYTES:
                return message  # aborts may be of requests that are still to be sent
            self._submits.popleft()
            self._last += 1
            output.number = self._last
            self._live[self._last] = output
            message.submits.add(number=self._last, request=request, traceparent=traceparent)
        message.aborts, self._aborts = int32_to_bytes(self._aborts), []
        return message

    async def _read(self) -> None:
        error = SessionCallError(grpc.StatusCode.UNAVAILABLE, "the session is over")
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take_in(message)
            if await self._call.code() is not grpc.StatusCode.OK:
                error = await _ending(self._call)
        except grpc.aio.AioRpcError as failure:
            error = SessionCallError(failure.code(), failure.details() or "")
        except Exception:
            log.exception("session_failed")
            error = SessionCallError(grpc.StatusCode.INTERNAL, "the session's messages cannot be understood")
            self._call.cancel()
        self._break(error)

    def _take_in(self, message: generation_pb2.SessionResponse) -> None:
        live = self._live
        for number in int32_from_bytes(message.accepted, "accepted").tolist():
            live[number].accept()
        numbers = int32_from_bytes(message.numbers, "numbers").tolist()
        tokens = int32_from_bytes(message.tokens, "tokens").tolist()
        logprobs = _logprobs(message) if message.logprobs else None
        for number, token in zip(numbers, tokens, strict=True):
            output = live[number]
            kept = output.add(token)
            if logprobs is not None and output.num_logprobs is not None:
                logprob, top_tokens, top_logprobs = logprobs(output.num_logprobs)
                if kept:
                    output.add_logprobs(logprob, top_tokens, top_logprobs)
            if not kept and output.error is None:
                self._overflow(output)
        for end in message.ended:
            finished = end.finished if end.HasField("finished") else None
            code = _CODES.get(end.status, grpc.StatusCode.UNKNOWN)
            live.pop(end.number).end(finished, None if finished is not None else SessionCallError(code, end.detail))
            self._room.release()

    def _overflow(self, output: SessionOutput) -> None:
        log.warning("client_reads_too_slowly", request_id=output.request_id, unread=self._max_unread)
        self.abort(output)
        error = OutputUnreadError(output.request_id, self._max_unread)
        output.error = SessionCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _break(self, error: SessionCallError) -> None:
        if self.broken is None:
            self.broken = error
            told = error
            if (
                error.code is not grpc.StatusCode.CANCELLED
            ):  # whatever the stream's status says, their requests are not to blame
                told = SessionCallError(grpc.StatusCode.UNAVAILABLE, f"the session with the scheduler ended: {error.details}")
            for output in [*self._live.values(), *(entry[0] for entry in self._submits)]:
                output.end(None, told)
                self._room.release()  # whoever waits is told
            self._live.clear()
            self._submits.clear()
            self._to_send.set()
            self.over.set()


async def _ending(call: Any) -> SessionCallError:
    return SessionCallError(await call.code(), await call.details() or "")


def _logprobs(message: generation_pb2.SessionResponse) -> Any:
    """Log probabilities of the next token of those that have some: its own and those of so many others."""
    own = iter(float32_from_bytes(message.logprobs))
    top_tokens = int32_from_bytes(message.top_tokens, "top_tokens").tolist()
    top_logprobs = float32_from_bytes(message.top_logprobs)
    start = 0

    def take(count: int) -> tuple[float, list[int], list[float]]:
        nonlocal start
        stop, first = start + count, start
        start = stop
        return next(own), top_tokens[first:stop], top_logprobs[first:stop]

    return take
