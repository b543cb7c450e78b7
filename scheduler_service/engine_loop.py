"""The engine of one scheduler process, as its clients see it: calls → core → runtime → subscribers.

One `EngineLoop` owns the core. Its task (`step_loop.py`) plans and hands results back; calls from RPC handlers (`submit`,
`abort`, …) change the core directly, since everything runs on one event loop and no core method yields: between two `await`s
the core is in one piece.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from scheduler_service.core.errors import InternalError, PagemirrorError, UnknownRequestError
from scheduler_service.core.ops import GREEDY, Int32Array, SamplingParams
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.errors import DrainingError
from scheduler_service.metrics import Metrics
from scheduler_service.session_outbox import Outbox
from scheduler_service.settings import SchedulerSettings
from scheduler_service.step_loop import StepLoop
from scheduler_service.subscription import Subscriber, Subscription

log = structlog.get_logger("pagemirror.engine")

_WARM_UP_PAUSE_S = 1.0  # after one that failed


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Everything of a request but its id and its prompt. `queue_wait_ms` None: no limit."""

    max_tokens: int = 16
    sampling: SamplingParams = GREEDY
    stop_ids: tuple[int, ...] = ()
    ignore_default_stop_ids: bool = False
    priority: int = 0
    prefix_cache: bool = True
    cache_namespace: str = ""
    queue_wait_ms: int | None = None
    traceparent: str = ""


class EngineLoop(StepLoop):
    """The loop, and what clients may ask of it."""

    def __init__(
        self,
        settings: SchedulerSettings,
        metrics: Metrics | None = None,
        on_connected: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """See StepLoop."""
        super().__init__(settings, metrics, on_connected)
        self.draining = False
        self.stuck = False
        """A result is awaited that does not come."""
        self._outboxes: set[Outbox] = set()

    def awaited(self) -> tuple[int, int] | None:
        """Session and number of the step whose result is awaited; None: of no step."""
        return (self.core.session_no, self.num_steps) if self.core.num_in_flight else None

    async def warm_up(self) -> None:
        """Have the runtime compute a request of one token; returns when it has, however often that takes."""
        options = SubmitOptions(max_tokens=1, prefix_cache=False)
        while True:
            try:
                subscription = self.submit(f"warm-up-{secrets.token_hex(4)}", np.zeros(1, dtype=np.int32), options)
                while not subscription.exhausted:
                    await subscription.take()
                if subscription.error is None:
                    return
                raise subscription.error
            except PagemirrorError as error:
                log.warning("warm_up_failed", reason=str(error))
                await asyncio.sleep(_WARM_UP_PAUSE_S)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to `grace_s` for the live ones, end the rest with UNAVAILABLE."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                while self._subscribers:
                    await self._progress.wait()
        except TimeoutError:
            log.warning("drain_timed_out", live=len(self._subscribers), grace_s=grace_s)
        self.end_all(DrainingError())
        self._fail_outboxes(DrainingError())
        self.page_events.end(DrainingError())

    async def stop(self) -> None:
        """End the loop and the link. Live requests end with UNAVAILABLE."""
        self.draining = True
        self.end_all(DrainingError())
        self._fail_outboxes(DrainingError())
        self.page_events.end(DrainingError())
        await self._end_loop()

    def _fail_outboxes(self, error: PagemirrorError) -> None:
        for outbox in self._outboxes:
            outbox.fail(error)

    # --- calls of clients ---------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: Int32Array, options: SubmitOptions) -> Subscription:
        """Queue a request. Raises RequestError or ServiceError; nothing is changed then."""
        request = self._submit(request_id, prompt, options)
        subscription = self._subscribers.add(request, options.queue_wait_ms)
        self._begin(subscription)
        return subscription

    def open_outbox(self) -> Outbox:
        """Where the output of one session's requests goes. To be given back with `close_outbox`."""
        outbox = Outbox(self.settings.session_window, self.settings.max_unread_tokens, self._subscribers.note_overflow)
        self._outboxes.add(outbox)
        if self.draining:
            outbox.fail(DrainingError())
        return outbox

    def close_outbox(self, outbox: Outbox) -> None:
        """The session is over: abort its requests that still run."""
        self._outboxes.discard(outbox)
        for member in outbox.live():
            self.release(member)

    def submit_to(self, outbox: Outbox, number: int, request_id: str, prompt: Int32Array, options: SubmitOptions) -> None:
        """Queue a request whose output goes to an outbox, as its `number`. Raises RequestError or ServiceError, like submit."""
        member = outbox.member(number, self._submit(request_id, prompt, options), options.queue_wait_ms)
        self._subscribers.follow(member)
        self._begin(member)

    def _submit(self, request_id: str, prompt: Int32Array, options: SubmitOptions) -> Request:
        traces, traceparent, span = self.metrics.tally.traces, options.traceparent, None
        if traces is not None:
            span, traceparent = traces.begin(request_id, len(prompt), traceparent)
        try:
            self._check_open()
            stop_ids = options.stop_ids if options.ignore_default_stop_ids else options.stop_ids + self.facts.default_stop_ids
            request = self.core.submit(
                request_id,
                prompt,
                max_tokens=options.max_tokens,
                sampling=options.sampling,
                stop_ids=tuple(dict.fromkeys(stop_ids)),
                priority=options.priority,
                prefix_cache=options.prefix_cache,
                cache_namespace=options.cache_namespace,
                traceparent=traceparent,
            )
        except PagemirrorError as error:
            self.metrics.refused.labels(type(error).__name__).inc()
            if traces is not None and span is not None:
                traces.refuse(span, str(error))
            raise
        if traces is not None and span is not None:
            traces.follow(request_id, span)
        return request

    def _begin(self, subscriber: Subscriber) -> None:
        if len(self._subscribers) == 1 and self.connection.connected:
            self.connection.trouble_is_over()
        if subscriber.queue_wait_ms is not None:
            loop = asyncio.get_running_loop()
            request_id = subscriber.request.request_id
            subscriber.queue_timer = loop.call_later(subscriber.queue_wait_ms / 1000, self._expire, request_id)
        self._changed()

    def release(self, subscription: Subscriber) -> None:
        """The client is gone: abort its request if it still runs."""
        if not subscription.finished:
            self.abort(subscription.request.request_id)

    def abort(self, request_id: str) -> None:
        """End a live request. Raises UnknownRequestError."""
        self.core.abort(request_id)
        self._changed()

    def stop_request(self, request_id: str) -> None:
        """End a live request that has come to its stop, which only its reader could see. Raises UnknownRequestError."""
        request = self.get(request_id)
        self.core.abort(request_id)
        request.finish_reason = FinishReason.STOP  # for its account and the metrics; to the core it is over either way
        self._changed()

    def retract(self, request_id: str) -> None:
        """Take a running request's row away; it resumes by itself. Raises UnknownRequestError, NotRunningError."""
        self.core.retract(request_id)
        self._changed()

    def get(self, request_id: str) -> Request:
        """The live request. Raises UnknownRequestError."""
        try:
            return self.core.requests[request_id]
        except KeyError:
            raise UnknownRequestError(request_id) from None

    def num_computed(self, request: Request) -> int:
        """Tokens of a live request whose KV is written by ops that were sent."""
        return int(self.core.placement.rows.num_computed[request.row]) if request.state.holds_row else request.num_computed

    def reset_prefix_cache(self, force: bool) -> int:
        """Empty the prefix cache; returns the pages freed. Raises CacheInUseError unless `force`."""
        freed = self.core.reset_prefix_cache(force=force)
        self._changed()
        return freed

    async def progressed(self) -> None:
        """Return when a step was executed or a request has ended."""
        await self._progress.wait()

    def _check_open(self) -> None:
        if self.failed.is_set():
            raise InternalError("the scheduler failed")
        if self.draining:
            raise DrainingError
        if self.connection.unavailable is not None:
            raise self.connection.unavailable

    def _expire(self, request_id: str) -> None:
        # The timer is cancelled when its request ends, so the id is that of the request it was set for.
        self.core.expire(request_id)
        self._changed()

    # --- quiet moments, for readers that compare both sides -------------------------------------------------------------

    def pause(self) -> None:
        """Plan nothing until `resume` was called as often."""
        self._num_pauses += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._num_pauses -= 1
        self._wake.set()

    async def wait_quiet(self) -> None:
        """Return when nothing is in flight and a runtime is there. While paused, that lasts at least to the next await."""
        while self.core.num_in_flight or not self.connection.connected:
            await self._progress.wait()
