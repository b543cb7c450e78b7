"""GenerationService as a front end serves it: Generate over the session, everything else passed on to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from pagemirror.v1 import generation_pb2, generation_pb2_grpc
from scheduler_service.columns import float32_to_bytes, int32_to_bytes
from scheduler_service.errors import DrainingError, EventsOffError, shorten
from scheduler_service.frontend_link import SchedulerLink
from scheduler_service.generation_servicer import traceparent_of
from scheduler_service.grpc_status import errors_as_status
from scheduler_service.session_output import OutputPiece, SessionCallError

_M = TypeVar("_M", bound=Message)

Context = grpc.aio.ServicerContext[Any, Any]


class FrontendServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves what the scheduler behind `link` serves, with its statuses."""

    def __init__(self, link: SchedulerLink, *, serves_page_events: bool = True) -> None:
        self._link = link
        self._serves_page_events = serves_page_events
        self._event_calls: set[Any] = set()
        self._draining = False
        self.num_requests = self.num_tokens = 0
        """Calls of Generate so far, and tokens written to them."""
        self.num_live = 0
        """Calls of Generate that are being served."""
        self.idle = asyncio.Event()
        """There are none."""
        self.idle.set()

    @override
    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Stream one request's tokens; whatever ends the call ends the request."""
        self.num_requests += 1
        async with _statuses(context, "Generate"):
            if self.draining:
                raise DrainingError
            if not request.request_id:
                request.request_id = f"req-{secrets.token_hex(8)}"
            session = self._link.session
            self.num_live += 1
            self.idle.clear()
            try:
                output = await session.submit(request, traceparent_of(context))
                try:
                    await output.accepted()
                    await context.write(generation_pb2.GenerateResponse(request_id=request.request_id))
                    while True:
                        piece = await output.take()
                        await context.write(_response(piece))
                        self.num_tokens += len(piece.tokens)
                        if piece.finished is not None:
                            return
                finally:
                    session.abort(output)
            finally:
                self.num_live -= 1
                if not self.num_live:
                    self.idle.set()
                    self._end_events_if_due()

    @override
    async def Session(self, requests: Any, context: Context) -> None:  # type: ignore[override]
        """Not here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a front end serves Generate; open sessions with the scheduler")

    @override
    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        return await self._pass_on(context, "Abort", request, generation_pb2.AbortResponse)

    @override
    async def Retract(self, request: generation_pb2.RetractRequest, context: Context) -> generation_pb2.RetractResponse:
        return await self._pass_on(context, "Retract", request, generation_pb2.RetractResponse)

    @override
    async def GetState(self, request: generation_pb2.GetStateRequest, context: Context) -> generation_pb2.RequestInfo:
        return await self._pass_on(context, "GetState", request, generation_pb2.RequestInfo)

    @override
    async def ListRows(self, request: generation_pb2.ListRowsRequest, context: Context) -> generation_pb2.ListRowsResponse:
        return await self._pass_on(context, "ListRows", request, generation_pb2.ListRowsResponse)

    @override
    async def ResetPrefixCache(
        self, request: generation_pb2.ResetPrefixCacheRequest, context: Context
    ) -> generation_pb2.ResetPrefixCacheResponse:
        return await self._pass_on(context, "ResetPrefixCache", request, generation_pb2.ResetPrefixCacheResponse)

    @override
    async def GetInfo(self, request: generation_pb2.GetInfoRequest, context: Context) -> generation_pb2.ServerInfo:
        return await self._pass_on(context, "GetInfo", request, generation_pb2.ServerInfo)

    @override
    async def SubscribePageEvents(  # type: ignore[override]
        self, request: generation_pb2.SubscribePageEventsRequest, context: Context
    ) -> None:
        """Pass the scheduler's stream on."""
        async with _statuses(context, "SubscribePageEvents"):
            if not self._serves_page_events:
                raise EventsOffError
            if self.draining:
                raise DrainingError
            client = self._link.client
            call = client.stub.SubscribePageEvents(request, metadata=client.metadata())
            self._event_calls.add(call)
            try:
                await call.initial_metadata()
                await context.send_initial_metadata(())
                async for batch in call:
                    await context.write(batch)
            except grpc.aio.AioRpcError as error:
                raise SessionCallError(error.code(), client.explain(error.code(), error.details() or "")) from error
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                if self.draining:
                    raise DrainingError from None
                # The channel was closed, since the session over it has ended.
                raise SessionCallError(grpc.StatusCode.UNAVAILABLE, "this front end has lost its scheduler") from None
            finally:
                self._event_calls.discard(call)
                call.cancel()

    @property
    def draining(self) -> bool:
        """No request is taken any more; when the last one is over the streams of page events are ended."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        self._end_events_if_due()

    def _end_events_if_due(self) -> None:
        if self._draining and not self.num_live:
            for call in list(self._event_calls):
                call.cancel()

    async def _pass_on(self, context: Context, method: str, request: Message, kind: Callable[[], _M]) -> _M:
        """Call the scheduler's method of this name; its answer is of this kind."""
        answer = kind()
        async with _statuses(context, method):
            client = self._link.client
            call: Callable[..., Any] = getattr(client.stub, method)
            try:
                answer = await call(request, metadata=client.metadata(), timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                details = client.explain(error.code(), error.details() or "")
                raise SessionCallError(error.code(), details) from error
        return answer


@contextlib.asynccontextmanager
async def _statuses(context: Context, method: str) -> AsyncIterator[None]:
    """End the call with the status that the scheduler gave, or that an error of our own has."""
    async with errors_as_status(context, method):
        try:
            yield
        except SessionCallError as error:
            await context.abort(error.code, shorten(error.details))


def _response(piece: OutputPiece) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(tokens=int32_to_bytes(piece.tokens), finished=piece.finished)
    if piece.logprobs:
        response.logprobs = float32_to_bytes(piece.logprobs)
        response.top_tokens = int32_to_bytes(piece.top_tokens)
        response.top_logprobs = float32_to_bytes(piece.top_logprobs)
    return response
