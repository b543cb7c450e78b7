"""Clients' views of their requests: tokens pile up here until a stream takes them, up to a limit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from typing_extensions import override

from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.ops import TokenLogprobs
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.errors import OutputUnreadError, QueueWaitError, RequestFailedError
from scheduler_service.metrics import Metrics

if TYPE_CHECKING:
    from scheduler_service.core.intake import Outputs

log = structlog.get_logger("pagemirror.engine")

DEFAULT_MAX_UNREAD = 65_536
_PIECE_VALUES = 8192  # of 4 or 8 bytes each: at most 64 KiB a message
_MIN_AGAIN = 8  # requests; with fewer it costs more than it saves


class Outlet(Protocol):
    """What the output of several requests leaves by."""

    def share(self, members: list[Any]) -> Callable[[Sequence[int]], bool]:
        """A way to add a token to each of these subscribers of its, none of which wants log probabilities. It does as `add` of
        each does, or returns False and has done nothing.
        """


class Subscriber(ABC):
    """Whoever gets the output of one live request. Several may have an `outlet` in common."""

    __slots__ = ("error", "finished", "outlet", "overflowed", "queue_timer", "queue_wait_ms", "request")

    def __init__(self, request: Request, queue_wait_ms: int | None, outlet: Outlet | None = None) -> None:
        self.request = request
        self.outlet = outlet
        self.finished = False
        """The request is over; nothing is added any more."""
        self.error: PagemirrorError | None = None
        """Why it is over, where that is no ordinary end."""
        self.overflowed = False
        """The client left too much unread, and is told so."""
        self.queue_wait_ms = queue_wait_ms
        self.queue_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append one token, with its log probabilities where the request wants them."""

    def finish(self, error: PagemirrorError | None = None) -> None:
        """Nothing more comes. An error that was set before stays."""
        self.finished = True
        self.error = self.error or error
        if self.queue_timer is not None:
            self.queue_timer.cancel()


class Subscription(Subscriber):
    """Output of one live request.

    What a slow client has not taken yet is one growing list, not a queue of messages, and the client gets it in few pieces.
    When it would hold more than `max_unread` values the client loses it, and the request ends: see `overflowed`. A token is
    one value; where log probabilities are wanted it is one more for its own and two for each of the others'.
    """

    __slots__ = (
        "_changed",
        "_logprobs",
        "_max_unread",
        "_most",
        "_on_overflow",
        "_piece",
        "_tokens",
    )

    def __init__(
        self,
        request: Request,
        queue_wait_ms: int | None = None,
        max_unread: int = DEFAULT_MAX_UNREAD,
        on_overflow: Callable[[Subscriber], None] = lambda subscriber: None,
    ) -> None:
        super().__init__(request, queue_wait_ms)
        values = values_per_token(request)
        self._max_unread = max_unread
        self._most = max(1, max_unread // values)
        self._on_overflow = on_overflow
        self._piece = max(1, _PIECE_VALUES // values)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._changed = asyncio.Event()

    @override
    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        if len(self._tokens) >= self._most:
            self._most = 0  # whatever else comes before the request is ended
            self._tokens, self._logprobs = [], []
            if not self.overflowed:
                self.overflowed = True
                self.error = OutputUnreadError(self.request.request_id, self._max_unread)
                self._on_overflow(self)
            return
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._changed.set()

    @override
    def finish(self, error: PagemirrorError | None = None) -> None:
        super().finish(error)
        self._changed.set()

    @property
    def exhausted(self) -> bool:
        """The request is over and everything was taken."""
        return self.finished and not self._tokens

    async def take(self) -> list[int]:
        """Tokens since the last call, as many as make one message; waits until there are some or the request is over (then the
        list may be empty).
        """
        await self._changed.wait()
        tokens = self._tokens
        if len(tokens) <= self._piece:
            self._tokens = []
            if not self.finished:
                self._changed.clear()
            return tokens
        self._tokens = tokens[self._piece :]
        return tokens[: self._piece]

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of the tokens that the last `take` returned, to be called at once; empty where none are wanted."""
        count = len(self._logprobs) - len(self._tokens)
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return logprobs


def values_per_token(request: Request) -> int:
    """What a token counts for in limits of unread output."""
    num_logprobs = request.sampling.num_logprobs
    return 1 if num_logprobs is None else 2 + 2 * num_logprobs


class _Again:
    """A token for each of the same subscribers, time and again."""

    def __init__(self, subscribers: list[Subscriber]) -> None:
        self._single: list[tuple[int, Subscriber]] = []
        shares: dict[Outlet, list[tuple[int, Subscriber]]] = {}
        for place, subscriber in enumerate(subscribers):
            others = self._single if subscriber.outlet is None else shares.setdefault(subscriber.outlet, [])
            others.append((place, subscriber))
        # Itemgetter gives a tuple only where it has two places at least.
        for outlet in [outlet for outlet, members in shares.items() if len(members) == 1]:
            self._single += shares.pop(outlet)
        self._shares = [
            (itemgetter(*(place for place, _ in entries)), outlet.share(members := [member for _, member in entries]), members)
            for outlet, entries in shares.items()
        ]

    def deliver(self, tokens: list[int]) -> None:
        """One each, in the order of the subscribers."""
        for pick, add_each, members in self._shares:
            picked: tuple[int, ...] = pick(tokens)
            if not add_each(picked):
                for member, token in zip(members, picked, strict=True):
                    member.add(token)
        for place, subscriber in self._single:
            subscriber.add(tokens[place])


class Subscribers:
    """All live subscriptions; every token and every end reaches its own exactly once."""

    def __init__(self, metrics: Metrics, max_unread: int = DEFAULT_MAX_UNREAD) -> None:
        self._metrics = metrics
        self._max_unread = max_unread
        self._live: dict[str, Subscriber] = {}
        self._overflowed: list[str] = []
        # Requests with a token in the last delivery, and how to deliver to them again at once, if that is known.
        self._last: list[Request] = []
        self._again: _Again | None = None

    def __len__(self) -> int:
        return len(self._live)

    def ids(self) -> list[str]:
        """Ids of the live requests."""
        return list(self._live)

    def add(self, request: Request, queue_wait_ms: int | None) -> Subscription:
        """Subscribe to a request that was just submitted."""
        subscription = Subscription(request, queue_wait_ms, self._max_unread, self.note_overflow)
        self.follow(subscription)
        return subscription

    def follow(self, subscriber: Subscriber) -> None:
        """Output of a request that was just submitted goes to this subscriber of it."""
        request = subscriber.request
        self._live[request.request_id] = subscriber
        self._metrics.tally.begin(request)

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
            self._deliver(outputs.requests, outputs.tokens)
        else:
            for request, token, logprobs in zip(outputs.requests, outputs.tokens, outputs.logprobs, strict=True):
                live[request.request_id].add(token, logprobs)
        if self._metrics.tally.traces is not None:
            self._metrics.tally.traces.delivered(outputs)
        for request in outputs.finished:
            self._finish(live.pop(request.request_id))

    def _deliver(self, requests: list[Request], tokens: list[int]) -> None:
        # A run of decode steps has the same requests in the same order each time: from the third one on none is looked up.
        if requests != self._last:
            self._last, self._again = requests, None
        elif self._again is not None:
            self._again.deliver(tokens)
            return
        elif len(requests) >= _MIN_AGAIN:
            subscribers = [self._live[request.request_id] for request in requests]
            if len(set(subscribers)) == len(subscribers):  # else it is several steps
                self._again = _Again(subscribers)
        for request, token in zip(requests, tokens, strict=True):
            self._live[request.request_id].add(token)

    def note_overflow(self, subscription: Subscriber) -> None:
        """A client has left too much unread; its request is to be ended."""
        request_id = subscription.request.request_id
        log.warning("client_reads_too_slowly", request_id=request_id, unread=self._max_unread)
        self._metrics.calls_refused.labels("unread").inc()
        self._overflowed.append(request_id)

    def take_overflowed(self) -> list[str]:
        """Ids of the live requests whose clients have left too much unread since the last call: they are to be ended."""
        overflowed, self._overflowed = self._overflowed, []
        return [request_id for request_id in overflowed if request_id in self._live]

    def _finish(self, subscription: Subscriber) -> None:
        request = subscription.request
        reason = request.finish_reason or FinishReason.FAILED
        self._metrics.tally.end(request)
        if reason is FinishReason.FAILED:
            log.error("request_failed", request_id=request.request_id, detail=request.finish_detail)
            subscription.finish(RequestFailedError(request.request_id, request.finish_detail))
        elif reason is FinishReason.DEADLINE:
            subscription.finish(QueueWaitError(request.request_id, subscription.queue_wait_ms or 0))
        else:
            subscription.finish()
