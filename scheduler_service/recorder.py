"""A scheduler core that keeps the history of what was asked of it, so that a failure can be replayed.

The core is deterministic: the same calls in the same order lead to the same decisions. So its history is the list of its calls,
each with the number of plans made before it, and the requests that they name. `dump.py` writes it down as a scenario file.

The history is bounded. It is kept in two parts; when the newer one has `MAX_ENTRIES` entries or `MAX_TOKENS` tokens, the older
one is dropped with every request that had ended by then. What was live at that moment is remembered with the tokens known then.
A core that is not recorded is a plain `Scheduler` and pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import UnexpectedResultError
from scheduler_service.core.ops import ForwardOp, RowStatus, StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.states import State

MAX_ENTRIES = 10_000
"""Calls and plans in each of the two parts of a history."""

MAX_TOKENS = 200_000
"""Tokens that were submitted and sampled in each of the two parts."""


class Call(StrEnum):
    """What was asked of the core."""

    SUBMIT = "submit"
    RETRACT = "retract"
    ABORT = "abort"
    FAIL = "fail"
    STEP_FAILED = "step_failed"
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    RESTART_RUNTIME = "restart_runtime"
    FLUSH_RELEASES = "flush_releases"
    TOKEN_BUDGET = "token_budget"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Entry:
    """One call: made after `step` plans, of what kind, about which request, with which other values."""

    step: int
    call: Call
    request: Request | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveAtStart:
    """A request that was live when a part of the history began, and how many of its tokens were known then."""

    request: Request
    num_known: int


@dataclass(slots=True)
class Part:
    """A stretch of history."""

    first_step: int
    live: list[LiveAtStart] = field(default_factory=list)
    """Requests live at its start, in the order in which they would run."""
    num_in_flight: int = 0
    """Results awaited at its start."""
    entries: list[Entry] = field(default_factory=list)
    num_plans: int = 0
    num_tokens: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.entries) + self.num_plans >= MAX_ENTRIES or self.num_tokens >= MAX_TOKENS


@dataclass(slots=True)
class History:
    """What is left of the calls, the oldest first."""

    parts: list[Part] = field(default_factory=lambda: [Part(0)])
    num_steps: int = 0
    """Plans made since the start."""
    num_submitted: int = 0
    """Requests taken in since the start."""

    @property
    def start(self) -> Part:
        """The oldest part that is left."""
        return self.parts[0]

    def entries(self) -> list[Entry]:
        """All calls that are left."""
        return [entry for part in self.parts for entry in part.entries]


class RecordingScheduler(Scheduler):
    """A `Scheduler` that records. Refused calls, and plans while no request is live, change nothing and are left out."""

    def __init__(self, config: SchedulerConfig, session_no: int = 1) -> None:
        super().__init__(config, session_no, keep_sent=True)
        self.history = History()

    def submit(self, *args: Any, **kwargs: Any) -> Request:
        """See `Scheduler.submit`."""
        request = super().submit(*args, **kwargs)
        self._note(Call.SUBMIT, request)
        self.history.num_submitted += 1
        self._count(tokens=request.prompt_len)
        return request

    def abort(self, request_id: str) -> None:
        """See `Scheduler.abort`."""
        if request_id in self.requests:
            self._note(Call.ABORT, self.requests[request_id])
        super().abort(request_id)

    def expire(self, request_id: str) -> None:
        """See `Scheduler.expire`. For a request that waits it comes to the same as `abort`."""
        request = self.requests.get(request_id)
        if request is not None and request.state is State.SUBMITTED:
            self._note(Call.ABORT, request)
        super().expire(request_id)

    def fail_request(self, request_id: str, detail: str) -> None:
        """See `Scheduler.fail_request`."""
        if request_id in self.requests:
            self._note(Call.FAIL, self.requests[request_id])
        super().fail_request(request_id, detail)

    def retract(self, request_id: str) -> None:
        """See `Scheduler.retract`."""
        request = self.requests.get(request_id)
        if request is not None and request.state.holds_row:
            self._note(Call.RETRACT, request)
        super().retract(request_id)

    def reset_prefix_cache(self, *, force: bool = False) -> int:
        """See `Scheduler.reset_prefix_cache`."""
        if force or not self.placement.cache.num_locked:
            self._note(Call.RESET_PREFIX_CACHE, force=force)
        return super().reset_prefix_cache(force=force)

    def plan(self) -> ForwardOp | None:
        """See `Scheduler.plan`."""
        if self.requests:
            self.history.num_steps += 1
            self.history.parts[-1].num_plans += 1
        op = super().plan()
        self._count(tokens=0)
        return op

    def flush_releases(self) -> ForwardOp | None:
        """See `Scheduler.flush_releases`."""
        op = super().flush_releases()
        if op is not None:
            self._note(Call.FLUSH_RELEASES)
        return op

    def complete(self, result: StepResult) -> None:
        """See `Scheduler.complete`."""
        entries = self.history.parts[-1].entries
        before = len(entries)
        if result.row_status is not None and (ops := self.ops_in_flight()):
            self._note_failed_rows(ops[0], result)
        self._note(Call.COMPLETE)
        try:
            super().complete(result)
        except UnexpectedResultError:
            del entries[before:]  # it changed nothing
            raise
        self._count(tokens=len(result.tokens))

    def note_failure(self, op: ForwardOp, rows: Collection[int] = (), *, crashed: bool = False) -> list[Request]:
        """See `Scheduler.note_failure`."""
        for place, outstanding in enumerate(self.ops_in_flight(), 1):
            if outstanding is op:
                self._note(Call.STEP_FAILED, place=place, rows=sorted(rows), crashed=crashed)
        return super().note_failure(op, rows, crashed=crashed)

    def reset(self, session_no: int) -> None:
        """See `Scheduler.reset`."""
        self._note(Call.RESTART_RUNTIME)
        super().reset(session_no)

    def set_token_budget(self, token_budget: int) -> None:
        """See `Scheduler.set_token_budget`."""
        super().set_token_budget(token_budget)
        self._note(Call.TOKEN_BUDGET, token_budget=token_budget)

    def _note(self, call: Call, request: Request | None = None, **values: Any) -> None:
        history = self.history
        history.parts[-1].entries.append(Entry(history.num_steps, call, request, values))

    def _note_failed_rows(self, op: ForwardOp, result: StepResult) -> None:
        """Rows that the runtime could not compute end before the others' tokens are looked at: just so when they fail first."""
        assert result.row_status is not None
        for status, request in zip(result.row_status.tolist(), op.requests, strict=False):
            if status != RowStatus.OK and request.state is not State.FINISHED:
                self._note(Call.ABORT if status == RowStatus.CLAMPED else Call.FAIL, request)

    def _count(self, tokens: int) -> None:
        """Tokens passed; begin a new part where the present one is full, and keep the last two."""
        history = self.history
        part = history.parts[-1]
        part.num_tokens += tokens
        if part.is_full:
            live = sorted(self.requests.values(), key=lambda request: (request.state is State.SUBMITTED, request.order))
            begin = [LiveAtStart(request, len(request.tokens)) for request in live]
            history.parts = [part, Part(history.num_steps, begin, self.num_in_flight)]
