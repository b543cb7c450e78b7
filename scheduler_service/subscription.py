"""Clients' views of their requests: tokens pile up here until a stream takes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.ops import TokenLogprobs
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.errors import QueueWaitError, RequestFailedError
from scheduler_service.metrics import Metrics

if TYPE_CHECKING:
    from scheduler_service.core.intake import Outputs

log = structlog.get_logger("pagemirror.engine")


class Subscription:
    """Output of one live request.

    What a slow client has not taken yet is one growing list, not a queue of messages: it is bounded by max_tokens, and the
    client gets it in one piece.
    """

    __slots__ = ("_changed", "_logprobs", "_tokens", "error", "finished", "queue_timer", "queue_wait_ms", "request")

    def __init__(self, request: Request, queue_wait_ms: int | None = None) -> None:
        self.request = request
        self.finished = False
        """The request is over; nothing is added any more."""
        self.error: PagemirrorError | None = None
        """Why it is over, where that is no ordinary end."""
        self.queue_wait_ms = queue_wait_ms
        self.queue_timer: asyncio.TimerHandle | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._changed = asyncio.Event()

    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append one token, with its log probabilities where the request wants them."""
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._changed.set()

    def finish(self, error: PagemirrorError | None = None) -> None:
        """Nothing more comes. An error that was set before stays."""
        self.finished = True
        self.error = self.error or error
        if self.queue_timer is not None:
            self.queue_timer.cancel()
        self._changed.set()

    async def take(self) -> list[int]:
        """Tokens since the last call; waits until there are some or the request is over (then the list may be empty)."""
        await self._changed.wait()
        if not self.finished:
            self._changed.clear()
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of the tokens that the last `take` returned, to be called at once; empty where none are wanted."""
        logprobs, self._logprobs = self._logprobs, []
        return logprobs


class Subscribers:
    """All live subscriptions; every token and every end reaches its own exactly once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._live: dict[str, Subscription] = {}

    def __len__(self) -> int:
        return len(self._live)

    def ids(self) -> list[str]:
        """Ids of the live requests."""
        return list(self._live)

    def add(self, request: Request, queue_wait_ms: int | None) -> Subscription:
        """Subscribe to a request that was just submitted."""
        subscription = self._live[request.request_id] = Subscription(request, queue_wait_ms)
        self._metrics.requests.inc()
        self._metrics.prompt_tokens.inc(request.prompt_len)
        return subscription

    def set_error(self, error: PagemirrorError) -> None:
        """Whatever ends live requests from now on, their clients are told this."""
        for subscription in self._live.values():
            subscription.error = error

    def finish_all(self, error: PagemirrorError) -> None:
        """End every subscription at once, without the core."""
        for subscription in self._live.values():
            subscription.finish(error)
        self._live.clear()

    def deliver(self, outputs: Outputs) -> None:
        """Hand on what the core put out since the last call."""
        live = self._live
        if outputs.logprobs is None:
            for request, token in zip(outputs.requests, outputs.tokens, strict=True):
                live[request.request_id].add(token)
        else:
            for request, token, logprobs in zip(outputs.requests, outputs.tokens, outputs.logprobs, strict=True):
                live[request.request_id].add(token, logprobs)
        if outputs.tokens:
            self._metrics.tokens.inc(len(outputs.tokens))
        for request in outputs.finished:
            self._finish(live.pop(request.request_id))

    def _finish(self, subscription: Subscription) -> None:
        request = subscription.request
        reason = request.finish_reason or FinishReason.FAILED
        self._metrics.finished.labels(reason.value).inc()
        self._metrics.cached_tokens.inc(request.cached_tokens)
        self._metrics.retractions.inc(request.num_retractions)
        if reason is FinishReason.FAILED:
            log.error("request_failed", request_id=request.request_id, detail=request.finish_detail)
            subscription.finish(RequestFailedError(request.request_id, request.finish_detail))
        elif reason is FinishReason.DEADLINE:
            subscription.finish(QueueWaitError(request.request_id, subscription.queue_wait_ms or 0))
        else:
            subscription.finish()
