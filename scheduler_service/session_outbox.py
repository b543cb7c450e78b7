"""What waits to be written to one session: tokens of all its requests as two arrays, accepted numbers, and ends.

A step's tokens are appended here one after the other and leave as the columns of one message. A front end that is slow gets
the tokens of several steps in one message.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.ops import TokenLogprobs
from scheduler_service.core.request import Request
from scheduler_service.errors import OutputUnreadError
from scheduler_service.subscription import Subscriber, values_per_token


@dataclass(frozen=True, slots=True)
class End:
    """The end of request `number`. One that was never accepted has no `request`; without an `error` it is an ordinary end."""

    number: int
    request: Request | None = None
    error: PagemirrorError | None = None


@dataclass(slots=True)
class Parcel:
    """What happened to a session's requests in a while; `tokens` and `logprobs`, if any, are parallel to `numbers`."""

    accepted: array[int]
    numbers: array[int]
    tokens: array[int]
    logprobs: list[TokenLogprobs | None] | None
    ended: list[End]


class Member(Subscriber):
    """One request of a session. Its output goes to the session's outbox under its number."""

    __slots__ = ("_outbox", "_share", "_taken", "_unread", "_values", "number")

    def __init__(self, outbox: Outbox, number: int, request: Request, queue_wait_ms: int | None) -> None:
        super().__init__(request, queue_wait_ms, outbox)
        self.number = number
        self._outbox = outbox
        self._values = values_per_token(request)
        self._taken = -1
        self._unread = 0
        self._share: _Share | None = None

    def join(self, share: _Share) -> None:
        """What is added to the share is added to this request."""
        self._share = share

    @override
    def add(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        outbox = self._outbox
        if self._taken != outbox.num_taken:
            by_share = self._share is not None and outbox.added_to is self._share
            self._taken, self._unread = outbox.num_taken, self._values if by_share else 0
        self._unread += self._values
        if self._unread > outbox.max_unread and not self._overflows():
            return
        numbers = outbox.numbers
        if not numbers:
            outbox.changed.set()
        numbers.append(self.number)
        outbox.tokens.append(token)
        if logprobs is not None:
            outbox.add_logprobs(logprobs)

    def _overflows(self) -> bool:
        """Whether the token may be kept all the same: where it is the only one."""
        if self._unread == self._values:
            return True
        if not self.overflowed:
            self.overflowed = True
            self.error = OutputUnreadError(self.request.request_id, self._outbox.max_unread)
            self._outbox.on_overflow(self)
        return False

    @override
    def finish(self, error: PagemirrorError | None = None) -> None:
        super().finish(error)
        self._outbox.end(End(self.number, self.request, self.error))


class _Share:
    """Requests of one session that get their tokens together."""

    def __init__(self, outbox: Outbox, members: list[Member]) -> None:
        self._outbox = outbox
        self._numbers = array("i", [member.number for member in members])
        for member in members:
            member.join(self)

    def add_each(self, tokens: Sequence[int]) -> bool:
        """A token for each. False: something is still to be taken, and nothing was added; it must be counted for each alone."""
        outbox = self._outbox
        if outbox.numbers:
            return False
        outbox.changed.set()
        outbox.added_to = self
        outbox.numbers += self._numbers
        outbox.tokens += array("i", tokens)
        return True


class Outbox:
    """Of one session. At most `window` of its requests are live, or over and not yet written."""

    def __init__(self, window: int, max_unread: int, on_overflow: Callable[[Subscriber], None]) -> None:
        self.window = window
        self.max_unread = max_unread
        self.on_overflow = on_overflow
        self.changed = asyncio.Event()
        """There is something to take."""
        self.error: Exception | None = None
        """Why the session has to end."""
        self.num_taken = 0
        self.numbers = array("i")
        self.tokens = array("i")
        self.added_to: _Share | None = None
        """Whose requests have a token here that no `Member.add` has counted."""
        self._accepted = array("i")
        self._logprobs: list[TokenLogprobs | None] | None = None
        self._ended: list[End] = []
        self._live: dict[int, Member] = {}
        self._num_told = 0  # ends taken and not yet written
        self._no_more = False
        self._freed = asyncio.Event()

    # --- requests come ----------------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that take room in the window."""
        return len(self._live) + len(self._ended) + self._num_told

    async def room(self) -> None:
        """Return when one more request has room."""
        while self.num_held >= self.window:
            self._freed.clear()
            await self._freed.wait()

    def member(self, number: int, request: Request, queue_wait_ms: int | None) -> Member:
        """A request that was accepted."""
        member = self._live[number] = Member(self, number, request, queue_wait_ms)
        self._accepted.append(number)
        self.changed.set()
        return member

    def refuse(self, number: int, error: PagemirrorError) -> None:
        """A request that was not accepted."""
        self.end(End(number, None, error))

    def find(self, number: int) -> Member | None:
        """The live request of this number."""
        return self._live.get(number)

    def live(self) -> list[Member]:
        """All live requests."""
        return list(self._live.values())

    def close(self) -> None:
        """No request comes any more: the session is over when the last one is."""
        self._no_more = True
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """The session is to end, after what can be taken now."""
        self.error = self.error or error
        self.changed.set()

    # --- output goes ------------------------------------------------------------------------------------------------------

    def share(self, members: list[Member]) -> Callable[[Sequence[int]], bool]:
        """See `Outlet`."""
        return _Share(self, members).add_each

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of the token that was appended last."""
        if self._logprobs is None:
            self._logprobs = []
        self._fill_logprobs(len(self.tokens) - 1)
        self._logprobs.append(logprobs)

    def _fill_logprobs(self, length: int) -> None:
        if self._logprobs is not None:
            self._logprobs += [None] * (length - len(self._logprobs))

    def end(self, end: End) -> None:
        """A request is over."""
        self._live.pop(end.number, None)
        self._ended.append(end)
        self.changed.set()

    def take(self) -> Parcel:
        """Everything since the last call; may be empty."""
        self._fill_logprobs(len(self.tokens))
        parcel = Parcel(self._accepted, self.numbers, self.tokens, self._logprobs, self._ended)
        self.numbers, self.tokens, self._accepted = array("i"), array("i"), array("i")
        self._logprobs, self._ended, self.added_to = None, [], None
        self._num_told += len(parcel.ended)
        self.num_taken += 1
        self.changed.clear()
        return parcel

    def note_written(self, parcel: Parcel) -> None:
        """The parcel is on its way: its requests that are over give their room back."""
        if parcel.ended:
            self._num_told -= len(parcel.ended)
            self._freed.set()

    @property
    def is_over(self) -> bool:
        """Nothing comes any more, and everything is written."""
        return self._no_more and not self.num_held
