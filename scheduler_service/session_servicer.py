"""GenerationService.Session: one stream's submits and aborts into the engine, and its requests' output back, as columns.

Two coroutines serve a session. One reads: it hands requests to the engine, and reads no further while the session's window is
full. The other, the call's own, writes whatever the outbox holds, as a rule one message a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import structlog

from pagemirror.v1 import generation_pb2
from scheduler_service.columns import float32_to_bytes, int32_from_bytes, int32_to_bytes
from scheduler_service.core.errors import BadParameterError, InternalError, InvalidRequestError, PagemirrorError
from scheduler_service.engine_loop import EngineLoop
from scheduler_service.errors import shorten
from scheduler_service.generate_messages import finished_message, submit_options
from scheduler_service.grpc_status import errors_as_status, status_of
from scheduler_service.session_outbox import End, Outbox, Parcel

log = structlog.get_logger("pagemirror.session")

HELLO_TIMEOUT_S = 30.0
"""From the opening of a session to its hello."""

MAX_NUMBER = 2**31 - 1
"""Of a submit; the columns that name requests are int32."""

_PIECE = 8192  # tokens a message
_PIECE_WITH_LOGPROBS = 256

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[generation_pb2.SessionRequest]


class SessionOrderError(InvalidRequestError):
    """A message that no session may have, or not at its place; it ends the session."""


async def serve_session(engine: EngineLoop, requests: Requests, context: Context) -> None:
    """Serve one session to its end."""
    async with errors_as_status(context, "Session"):
        hello = await _hello(requests)
        outbox = engine.open_outbox()
        reader: asyncio.Task[None] | None = None
        try:
            welcome = generation_pb2.SessionWelcome(
                window=outbox.window, max_message_bytes=engine.settings.max_message_mib * 2**20
            )
            await _send(context, generation_pb2.SessionResponse(welcome=welcome))
            reader = asyncio.create_task(_Reader(engine, outbox).run(hello, requests), name="session")
            await _write(outbox, context)
        finally:
            engine.close_outbox(outbox)
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)


async def _hello(requests: Requests) -> generation_pb2.SessionRequest:
    """The first message. Raises SessionOrderError when it is none, or does not come."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await _next(requests)
    except TimeoutError:
        raise SessionOrderError(f"the session was opened {HELLO_TIMEOUT_S:g} s ago, and its hello has not come") from None
    if message is None or not message.HasField("hello"):
        raise SessionOrderError("the first message of a session must have the hello")
    return message


async def _next(requests: Requests) -> generation_pb2.SessionRequest | None:
    """The next message; None: there is none. Raises SessionOrderError for bytes that are no message."""
    try:
        return await anext(requests, None)
    except Exception as error:
        # The stream itself may be gone as well: nobody is told then.
        raise SessionOrderError(shorten(str(error))) from error


class _Reader:
    """Takes a session's messages in, in their order."""

    def __init__(self, engine: EngineLoop, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._last = 0

    async def run(self, message: generation_pb2.SessionRequest | None, requests: Requests) -> None:
        """From the first message on. Returns when nothing more comes, or the session has to end: the outbox is told."""
        try:
            while message is not None:
                await self._take_in(message)
                message = await _next(requests)
                if message is not None and message.HasField("hello"):
                    raise SessionOrderError("only the first message of a session may have the hello")
            self._outbox.close()
        except Exception as error:
            self._outbox.fail(error)

    async def _take_in(self, message: generation_pb2.SessionRequest) -> None:
        aborts = int32_from_bytes(message.aborts, "aborts").tolist()
        for submit in message.submits:
            if submit.number != self._last + 1:
                raise SessionOrderError(f"a submit has number {submit.number}, but the last one had {self._last}")
            if submit.number > MAX_NUMBER:
                raise SessionOrderError(f"a session has at most {MAX_NUMBER} requests; open another one")
            self._last += 1
            await self._outbox.room()
            self._submit(submit)
        for number in aborts:
            if (member := self._outbox.find(number)) is not None:
                self._engine.release(member)

    def _submit(self, submit: generation_pb2.Submit) -> None:
        """What is wrong with one request ends that request."""
        request, number = submit.request, submit.number
        try:
            if not request.request_id:
                raise BadParameterError("", "request_id", "", "chosen by the front end")
            prompt = int32_from_bytes(request.prompt, "prompt")
            options = submit_options(request.request_id, request, submit.traceparent)
            self._engine.submit_to(self._outbox, number, request.request_id, prompt, options)
        except PagemirrorError as error:
            log.debug("request_refused", request_id=request.request_id, error=str(error))
            self._outbox.refuse(number, error)
        except Exception:
            log.exception("submit_failed", request_id=request.request_id)
            self._outbox.refuse(number, InternalError("the scheduler's log has the details"))


async def _write(outbox: Outbox, context: Context) -> None:
    """Write whatever there is until the session is over. Raises what the session has to end with."""
    while True:
        await outbox.changed.wait()
        error = outbox.error  # looked at first: what it came after is taken below
        parcel = outbox.take()
        for message in _messages(parcel):
            await _send(context, message)
        outbox.note_written(parcel)
        if error is not None:
            raise error
        if outbox.is_over:
            return


async def _send(context: Context, message: generation_pb2.SessionResponse) -> None:
    try:
        await context.write(message)
    except Exception as error:
        # The stream is gone, and gRPC is about to cancel the call: there is nobody to be told, and no status to send.
        raise asyncio.CancelledError from error


def _messages(parcel: Parcel) -> Iterator[generation_pb2.SessionResponse]:
    """The parcel in as many messages as it takes, as a rule one; ends come in the last."""
    piece = _PIECE if parcel.logprobs is None else _PIECE_WITH_LOGPROBS
    total = len(parcel.tokens)
    start = 0
    while True:
        stop = min(start + piece, total)
        message = generation_pb2.SessionResponse(
            numbers=int32_to_bytes(parcel.numbers[start:stop]), tokens=int32_to_bytes(parcel.tokens[start:stop])
        )
        if start == 0:
            message.accepted = int32_to_bytes(parcel.accepted)
        if parcel.logprobs is not None:
            given = [entry for entry in parcel.logprobs[start:stop] if entry is not None]
            message.logprobs = float32_to_bytes([entry.logprob for entry in given])
            message.top_tokens = int32_to_bytes([token for entry in given for token in entry.top_tokens])
            message.top_logprobs = float32_to_bytes([value for entry in given for value in entry.top_logprobs])
        if stop == total:
            message.ended.extend(_end(end) for end in parcel.ended)
        if stop < total or message.ByteSize():
            yield message
        if stop == total:
            return
        start = stop


def _end(end: End) -> generation_pb2.SessionEnd:
    if end.error is not None:
        code, detail = status_of(end.error)
        return generation_pb2.SessionEnd(number=end.number, status=code.value[0], detail=detail)
    assert end.request is not None
    return generation_pb2.SessionEnd(number=end.number, finished=finished_message(end.request))
