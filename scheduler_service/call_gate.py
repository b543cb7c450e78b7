"""What every call of the public port passes before, and while, a service works on it.

Who calls: a bearer token, where a token file is set; the health service alone needs none. How many: a limit of calls at a time,
with checks of health and everything else counted apart, so that none can be used to shut out the others. How long: a call whose
request does not come and a call whose answer is not read are ended, so that a peer that does nothing holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from grpc import aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # see cancel_call
from typing_extensions import override

from scheduler_service.metrics import CallMetrics
from scheduler_service.tokens import TokenFile

log = structlog.get_logger("pagemirror.gate")

MAX_CHECKS = 64
"""Checks of health at a time."""
MAX_OTHER_CALLS = 64
"""Other calls at a time: watchers of health, and reflection."""
REQUEST_TIMEOUT_S = 30.0
"""From the opening of a call to its whole request."""

_OPEN_SERVICE = "/grpc.health.v1.Health/"
_CHECK = _OPEN_SERVICE + "Check"
_TICKS = 4  # looks at a pending write until it counts as stalled


class CallGate(aio.ServerInterceptor):
    """One server's gate. Must be made inside a running event loop.

    Args:
        service: full name of the service, or with a slash of the method, whose calls `max_calls` limits.
        max_others: how many there may be of what is neither that nor a check of health.
        write_timeout_s: longest time for which one message may wait to be taken by the peer.
    """

    def __init__(
        self,
        service: str,
        metrics: CallMetrics,
        *,
        tokens: TokenFile | None = None,
        max_calls: int = 1024,
        max_others: int = MAX_OTHER_CALLS,
        write_timeout_s: float = 60.0,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._service = f"/{service}" if "/" in service else f"/{service}/"  # also the name of its kind of calls
        self._metrics = metrics
        self._tokens = tokens
        self._limits = {self._service: max_calls, _CHECK: MAX_CHECKS, "": max_others}
        self._open: Counter[str] = Counter()
        self._request_timeout_s = request_timeout_s
        self.opened = asyncio.Event()
        """Set unless calls of the service are to wait: there is nothing yet that could serve them."""
        self.opened.set()
        self._watch = _StallWatch(write_timeout_s, metrics)

    @property
    def num_open(self) -> int:
        """Calls of the service that are open now."""
        return self._open[self._service]

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method: str = handler_call_details.method
        if not method.startswith(_OPEN_SERVICE) and not self._admits(handler_call_details):
            return self._refuse(method, "token", grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is needed")
        kind = self._service if method.startswith(self._service) else _CHECK if method == _CHECK else ""
        limit = self._limits[kind]
        if self._open[kind] >= limit:
            option = " (--max-streams)" if kind == self._service else ""
            what = f"{limit} calls are open already, which is the limit{option}; try again later"
            return self._refuse(method, "streams", grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        task = asyncio.current_task()
        assert task is not None  # of this call alone; it ends when the call's handler does
        self._open[kind] += 1
        task.add_done_callback(lambda _: self._open.subtract((kind,)))
        handler = await continuation(handler_call_details)
        return self._guard(handler, waits=kind == self._service) if kind and handler is not None else handler

    def _admits(self, call: grpc.HandlerCallDetails) -> bool:
        return self._tokens is None or self._tokens.admits(call.invocation_metadata)

    def _refuse(self, method: str, reason: str, code: grpc.StatusCode, detail: str) -> Any:
        self._metrics.calls_refused.labels(reason).inc()
        log.debug("call_refused", method=method, reason=reason)

        async def refuse(requests: Any, context: Any) -> None:
            await context.abort(code, detail)

        # A handler of streams need not read a message first: nothing of a stranger's is taken in.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guard(self, handler: Any, *, waits: bool) -> Any:
        """A handler of one request, as one of streams that reads the request itself and is watched while it writes; one of
        streams as it is, but watched.
        """

        async def converse(requests: Any, context: Any) -> None:
            if waits:
                await self.opened.wait()
            watched = WatchedContext(context)
            with self._watch.over(watched):
                await handler.stream_stream(requests, watched)

        async def serve(requests: Any, context: Any) -> None:
            request = await self._read_request(context)
            if waits:
                await self.opened.wait()
            watched = WatchedContext(context)
            with self._watch.over(watched):
                if handler.response_streaming:
                    await handler.unary_stream(request, watched)
                else:
                    await watched.write(await handler.unary_unary(request, watched))

        return grpc.stream_stream_rpc_method_handler(
            converse if handler.request_streaming else serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _read_request(self, context: Any) -> Any:
        read = asyncio.ensure_future(context.read())
        # It ends with the call, whenever that is, and nobody looks then.
        read.add_done_callback(lambda task: task.cancelled() or task.exception())
        done, _ = await asyncio.wait({read}, timeout=self._request_timeout_s)
        if not done:
            self._metrics.calls_refused.labels("request").inc()
            detail = f"the call was opened {self._request_timeout_s:g} s ago, and its request has not come"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, detail)
        request = read.result()
        if request is aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        return request


class WatchedContext:
    """A call's context, of which it can be told how long a write has been pending."""

    __slots__ = ("_context", "_task", "ticks")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._task = asyncio.current_task()
        self.ticks = -1
        """Times the pending write was looked at; -1: none is pending."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Returns when the peer's flow control has let the message through."""
        self.ticks = 0
        await self._context.write(message)
        self.ticks = -1

    def cancel(self, code: grpc.StatusCode, detail: str) -> None:
        """End the call at once, past whatever waits to be written."""
        if not cancel_call(self._context, code, detail) and self._task is not None:
            self._task.cancel()  # what we hold is freed; the peer learns nothing until it reads


class _StallWatch:
    """Ends calls whose peer has taken nothing for the limit. One timer for all of them, and only while there are some.

    Looks are counted, not seconds: when this process itself was stopped for a while, that is one look, not the peer's fault.
    """

    def __init__(self, limit_s: float, metrics: CallMetrics) -> None:
        self._limit_s = limit_s
        self._metrics = metrics
        self._calls: set[WatchedContext] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def over(self, call: WatchedContext) -> Any:
        self._calls.add(call)
        if self._timer is None:
            self._wind()
        try:
            yield
        finally:
            self._calls.discard(call)
            if not self._calls and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wind(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / _TICKS, self._look)

    def _look(self) -> None:
        for call in self._calls:
            if call.ticks < 0:
                continue
            call.ticks += 1
            if call.ticks > _TICKS:
                call.ticks = -1
                self._metrics.calls_refused.labels("unread").inc()
                log.warning("peer_reads_nothing", peer=call.peer(), limit_s=self._limit_s)
                detail = f"nothing was read for {self._limit_s:g} s (--write-timeout)"
                call.cancel(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        self._wind()


def cancel_call(context: Any, code: grpc.StatusCode, detail: str) -> bool:
    """End a call of this server at once: its peer gets the status, even if earlier messages still wait for its reading.

    Returns whether it could be done.

    `context.abort` queues the status behind those messages, so it ends nothing where the peer does not read. gRPC's core can
    cancel a call (`grpc_call_cancel_with_status`), its asyncio server has no method for that. Its context does however hand
    the call object, which has one, to a function of its module for as long as that takes.
    """
    done = False

    def cancel(call: Any) -> None:
        nonlocal done
        # Nothing may be raised here: the context would keep what it has lent.
        with contextlib.suppress(Exception):
            call.cancel(code.value[0], detail)
            done = True

    original = getattr(cygrpc, "peer_identity_key", None)
    if original is None:
        return False
    cygrpc.peer_identity_key = cancel
    try:
        context.peer_identity_key()
    finally:
        cygrpc.peer_identity_key = original
    return done
