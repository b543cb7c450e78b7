"""Bytes that are no message: the call ends with INVALID_ARGUMENT, as with any other fault of the caller.

For the servers on both sides of the wire. gRPC itself reports what a deserializer raises as UNKNOWN, with the text of the
exception, and logs it as an error of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio
from typing_extensions import override

log = structlog.get_logger("pagemirror.rpc")

Call = Callable[[Any, Any], Any]


class _UnreadableError(Exception):
    """Stands where the message should be; raised in the handler's place, or out of its request iterator."""


class UnreadableMessages(aio.ServerInterceptor):
    """For every service of a server; a stream ends at its first message that cannot be read."""

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        many_in, many_out = handler.request_streaming, handler.response_streaming
        kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}"
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            _guarded(getattr(handler, kind), many_in=many_in),
            request_deserializer=_never_raises(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _never_raises(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _UnreadableError(f"a message of {len(data)} bytes cannot be read: {error}")

    return read


def _guarded(call: Call, *, many_in: bool) -> Call:
    """`call`, ended with INVALID_ARGUMENT where a message cannot be read; of the same kind, which gRPC looks at."""

    def messages(request: Any) -> Any:
        if many_in:
            return _readable(request)
        if isinstance(request, _UnreadableError):
            raise request
        return request

    if inspect.isasyncgenfunction(call):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in call(messages(request), context):
                    yield response
            except _UnreadableError as error:
                await _refuse(context, error)

        return generate

    async def answer(request: Any, context: Any) -> Any:
        try:
            return await call(messages(request), context)
        except _UnreadableError as error:
            return await _refuse(context, error)

    return answer


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _UnreadableError):
            raise request
        yield request


async def _refuse(context: Any, error: _UnreadableError) -> None:
    log.info("message_unreadable", detail=str(error))
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
