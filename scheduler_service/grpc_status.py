"""Errors → gRPC statuses, at the edge and nowhere else.

The table is looked up along the error's class hierarchy, most special class first. An error that is not in it is our fault: the
client is told INTERNAL and nothing more, the log gets everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from scheduler_service.core import errors as core_errors
from scheduler_service.errors import (
    DataLossError,
    DrainingError,
    EventsGoneError,
    EventsMissedError,
    EventsOffError,
    ListingTooLargeError,
    NoTokenizerError,
    OutputUnreadError,
    QueueWaitError,
    RequestFailedError,
    RuntimeLinkError,
    RuntimeUnavailableError,
    TooManyFollowersError,
    shorten,
)

log = structlog.get_logger("pagemirror.rpc")

STATUS_OF: dict[type[BaseException], grpc.StatusCode] = {
    core_errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    core_errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    core_errors.DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    core_errors.UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    core_errors.NotRunningError: grpc.StatusCode.FAILED_PRECONDITION,
    core_errors.CacheInUseError: grpc.StatusCode.FAILED_PRECONDITION,
    QueueWaitError: grpc.StatusCode.DEADLINE_EXCEEDED,
    OutputUnreadError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ListingTooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoTokenizerError: grpc.StatusCode.NOT_FOUND,
    EventsOffError: grpc.StatusCode.PERMISSION_DENIED,
    EventsGoneError: grpc.StatusCode.OUT_OF_RANGE,
    EventsMissedError: grpc.StatusCode.DATA_LOSS,
    TooManyFollowersError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RequestFailedError: grpc.StatusCode.INTERNAL,
    DataLossError: grpc.StatusCode.DATA_LOSS,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    RuntimeUnavailableError: grpc.StatusCode.UNAVAILABLE,
    RuntimeLinkError: grpc.StatusCode.UNAVAILABLE,
}

UNKNOWN_ERROR_MESSAGE = "internal error; the scheduler's log has the details"


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status and message for a client; the message is short, since many peers limit HTTP/2 trailers to 8 KiB."""
    for kind in type(error).__mro__:
        code = STATUS_OF.get(kind)
        if code is not None:
            return code, shorten(str(error))
    return grpc.StatusCode.INTERNAL, UNKNOWN_ERROR_MESSAGE


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
    """End the call with the status of whatever error leaves the block."""
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        if context.done():
            log.debug("rpc_abandoned", method=method, error=repr(error))
            return  # nobody is left to be told
        code, message = status_of(error)
        if message == UNKNOWN_ERROR_MESSAGE:
            log.exception("rpc_failed", method=method)
        else:
            log.debug("rpc_refused", method=method, code=code.name, message=message)
        await context.abort(code, message)
