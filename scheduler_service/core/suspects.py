"""Which request is it that steps fail on?

A step fails as a whole, whichever of its rows is to blame, and the session that is lost with it costs every request its row.
So failed steps are counted for each request that was in them. Two of them without progress in between make it a *suspect*:
suspects are planned one at a time, first in order first, with nobody else in the step and nothing else in flight. What fails
then is that request's own doing, and it ends; nobody else does.

A request is cleared by `TOKENS_TO_CLEAR` tokens since its last failed step. They are two, since the first one comes from the
prefill after the reset: a request on which only decode steps fail would be cleared by that one every time.

Every cycle of failures ends, because each either ends a request, brings one nearer to its end, or follows on a new token.
"""

from __future__ import annotations

from collections.abc import Collection

from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.request import Request
from scheduler_service.core.states import State

TOKENS_TO_CLEAR = 2
"""Tokens gained since the last failed step after which the steps that failed before count no more."""

FAILURES_TO_SUSPECT = 2
"""Failed steps after which a request runs alone."""

FAILURES_TO_END = 3
"""Failed steps after which a request ends, if the last one says that the runtime lived on: it was alone in that one."""

CRASHES_TO_END = 5
"""The same where the runtime was lost in the last one. A runtime is also lost for reasons that lie outside it, so this takes
three steps alone."""


class Suspects:
    """Failed steps of live requests; empty as long as no step fails."""

    def __init__(self) -> None:
        self._failures: dict[Request, tuple[int, int]] = {}  # how many, tokens known at the last one

    def __bool__(self) -> bool:
        return self.first() is not None

    def num_failures(self, request: Request) -> int:
        """Failed steps that count for the request."""
        count, num_tokens = self._failures.get(request, (0, 0))
        return count if len(request.tokens) < num_tokens + TOKENS_TO_CLEAR else 0

    def note_failure(self, op: ForwardOp, rows: Collection[int] = (), *, crashed: bool = False) -> list[Request]:
        """Count one failed step; returns the requests that must end for it, at most one.

        Args:
            op: the step.
            rows: rows of it that are known to be the cause; none, or rows that are not in it: each of its rows may be.
            crashed: the runtime was lost.
        """
        indices = op.req_pool_indices.tolist()
        blamed = set(rows) & set(indices) or set(indices)
        limit = CRASHES_TO_END if crashed else FAILURES_TO_END
        ends = []
        for row, request in zip(indices, op.requests, strict=True):
            if row in blamed and request.state is not State.FINISHED:
                count = self.num_failures(request) + 1
                self._failures[request] = (count, len(request.tokens))
                if count >= limit:
                    ends.append(request)
        return ends

    def first(self) -> Request | None:
        """The suspect whose turn it is, or None when there is none; requests that are cleared or over are forgotten."""
        if not self._failures:
            return None
        for request in [r for r in self._failures if r.state is State.FINISHED or not self.num_failures(r)]:
            del self._failures[request]
        suspects = [request for request in self._failures if self.num_failures(request) >= FAILURES_TO_SUSPECT]
        return min(suspects, key=lambda request: request.order, default=None)
