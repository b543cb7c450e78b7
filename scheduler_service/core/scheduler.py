"""The scheduler core: requests in, ForwardOps out, StepResults in, tokens out.

It is a plain object driven from outside: no threads, no clock, no I/O. A driver calls `plan()` while fewer than
`overlap_depth + 1` ops are in flight, sends what it returns, and hands results to `complete()` in the order of the ops:

    scheduler = Scheduler(SchedulerConfig(page_size=16, num_pages=1024, max_rows=64, max_pages_per_row=128, vocab_size=32000))
    scheduler.submit("a", [1, 2, 3], max_tokens=8)
    while scheduler.has_work:
        op = scheduler.plan()
        scheduler.complete(run_somewhere(op))
        outputs = scheduler.take_outputs()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from scheduler_service.core.choice import Choice
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import (
    CacheInUseError,
    ConfigError,
    DuplicateRequestError,
    NoProgressError,
    NotRunningError,
    QueueFullError,
    UnknownRequestError,
)
from scheduler_service.core.intake import Outputs, ResultIntake
from scheduler_service.core.journal import Restore
from scheduler_service.core.lives import Lives
from scheduler_service.core.op_builder import build_op
from scheduler_service.core.ops import GREEDY, ForwardOp, Int32Array, SamplingParams, StepResult
from scheduler_service.core.page_pool import PoolStats
from scheduler_service.core.parameters import check_labels, check_parameters
from scheduler_service.core.placement import Placement
from scheduler_service.core.policy import Planner
from scheduler_service.core.request import FinishReason, Request, check_prompt, output_limit
from scheduler_service.core.states import State
from scheduler_service.core.suspects import Suspects


class Scheduler:
    """Owner of every request, page and row.

    Args:
        config: limits and policy.
        session_no: number of the session with the runtime; every op carries it.
        keep_sent: keep a copy of what was sent of every row, so that the audit can compare.
    """

    def __init__(self, config: SchedulerConfig, session_no: int = 1, *, keep_sent: bool = False) -> None:
        self.config = config
        self.session_no = session_no
        self.placement = Placement(config, keep_sent=keep_sent)
        self._lives = Lives(self.placement, self._note_finished)
        self.requests = self._lives.requests
        self._waiting, self._retracted = self._lives.waiting, self._lives.retracted
        self._planner = Planner(config, self.placement, self._waiting, self._retracted, self._lives.retract)
        self._in_flight: deque[ForwardOp] = deque()
        self._intake = ResultIntake(config, self.placement, self._lives.finish)
        self.placement.journal.watch(self._snapshot)
        self._atomically = self.placement.journal.run
        self._suspects = Suspects()
        self._step = 0
        self._arrivals = 0

    # What a driver asks

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def ops_in_flight(self) -> list[ForwardOp]:
        """Ops whose results are awaited, the oldest first."""
        return list(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return self.placement.num_holders

    @property
    def num_retracted(self) -> int:
        return len(self._retracted)

    @property
    def num_retractions(self) -> int:
        return self._lives.num_retractions

    def queues(self) -> tuple[list[Request], list[Request]]:
        """Requests that wait for their first admission, and requests that wait to resume; for audits."""
        return self._waiting.requests(), self._retracted.requests()

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self.requests)

    @property
    def last_step(self) -> int:
        """Number of the last op of the present session; 0 before the first."""
        return self._step

    @property
    def token_budget(self) -> int:
        """Tokens that the next step may compute."""
        return self._planner.token_budget

    def rows(self) -> dict[int, tuple[Request, Int32Array]]:
        """Row number → the request that holds it and a copy of its page row."""
        return self.placement.rows_in_use()

    def stats(self) -> PoolStats:
        """How the pool is divided at this moment."""
        return self.placement.pool.stats()

    def take_outputs(self) -> Outputs:
        """Everything accepted and ended since the last call."""
        return self._intake.take_outputs()

    # What clients ask

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int] | Int32Array,
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_ids: Sequence[int] = (),
        priority: int = 0,
        prefix_cache: bool = True,
        cache_namespace: str = "",
        traceparent: str = "",
    ) -> Request:
        """Take a request in; it waits for its first admission.

        Args:
            request_id: unique among live requests.
            prompt: at least one token id in [0, vocab_size).
            max_tokens: at least 1; cut to what the row, the pool and the model's context hold.
            stop_ids: ids that end the output; a stop token is part of it.
            priority: a smaller number goes first.
            prefix_cache: read and feed the prefix cache.
            cache_namespace: requests of different namespaces share no pages.

        Raises:
            EmptyPromptError, BadTokenError, BadParameterError, PromptTooLongError, DuplicateRequestError, QueueFullError:
                nothing was changed.
        """
        check_parameters(request_id, max_tokens, priority, stop_ids, sampling, self.config)
        check_labels(request_id, cache_namespace, traceparent)
        tokens = check_prompt(request_id, prompt, self.config)
        if request_id in self.requests:
            raise DuplicateRequestError(request_id)
        if self.config.max_waiting and len(self._waiting) >= self.config.max_waiting:
            raise QueueFullError(request_id, self.config.max_waiting)
        limit, limit_reason = output_limit(len(tokens), max_tokens, self.config)
        request = Request(
            request_id,
            tokens,
            max_tokens=max_tokens,
            limit_len=len(tokens) + limit,
            limit_reason=limit_reason,
            arrival=self._arrivals + 1,
            sampling=sampling,
            stop_ids=tuple(map(int, stop_ids)),
            priority=priority,
            prefix_cache=prefix_cache and self.config.prefix_cache,
            cache_namespace=cache_namespace,
            traceparent=traceparent,
            late=self._intake.late,
        )
        self._lives.begin(request)
        self._arrivals += 1
        return request

    def abort(self, request_id: str) -> None:
        """End a live request; its computed full pages are published. Raises UnknownRequestError."""
        self._atomically(self._lives.finish, self._live(request_id), FinishReason.ABORT)

    def expire(self, request_id: str) -> None:
        """The request's time in the queue is over: end it if it still waits for its first admission."""
        request = self.requests.get(request_id)
        if request is not None and request.state is State.SUBMITTED:
            self._atomically(self._lives.finish, request, FinishReason.DEADLINE)

    def fail_request(self, request_id: str, detail: str) -> None:
        """End a live request as failed; nothing of it is published. Raises UnknownRequestError."""
        self._atomically(self._lives.finish, self._live(request_id), FinishReason.FAILED, detail)

    def retract(self, request_id: str) -> None:
        """Take row and pages away from a running request; it resumes by itself, in a later plan than the next.

        Raises:
            UnknownRequestError, NotRunningError: nothing was changed.
        """
        request = self._live(request_id)
        if not request.state.holds_row:
            raise NotRunningError(request_id, request.state)
        self._atomically(self._lives.retract, request.row, in_plan=self._lives.plan_no + 1)

    def reset_prefix_cache(self, *, force: bool = False) -> int:
        """Empty the prefix cache; returns how many pages that freed. `force` retracts every running request first.

        Raises:
            CacheInUseError: a running request uses cached pages and `force` is off; nothing was changed.
        """
        locked = self.placement.cache.num_locked
        if locked and not force:
            raise CacheInUseError(locked)
        return self._atomically(self._lives.empty_cache, retract_first=force)

    # Steps

    def plan(self) -> ForwardOp | None:
        """Choose the next step's rows and return them as an op, which must be sent, or None when there is nothing to send.

        While a request is suspected of making steps fail, it runs alone: see `suspects`.

        Raises:
            NoProgressError: nothing is in flight, and no row was planned although a request could run.
        """
        return self._atomically(self._plan)

    def _plan(self) -> ForwardOp | None:
        lives = self._lives
        lives.plan_no += 1
        suspect = self._suspects.first()
        choice = self._planner.choose(lives.plan_no, idle=not self._in_flight, alone=suspect)
        if choice.is_empty:
            if not self._in_flight:
                eligible = list(self.requests.values()) if suspect is None else [suspect]
                if any(request.retracted_in_plan < lives.plan_no for request in eligible):
                    raise NoProgressError(f"nothing was planned, although these could run: {eligible[:8]}")
            return None
        return self._send(choice)

    def flush_releases(self) -> ForwardOp | None:
        """An op without rows that tells the runtime of rows released since the last op; None: none was, or a suspect runs."""
        if not self.placement.released_rows or (self._in_flight and self._suspects):
            return None
        return self._atomically(self._send, Choice())

    def complete(self, result: StepResult) -> None:
        """Take in the result of the oldest op in flight.

        Raises:
            UnexpectedResultError: it answers another op, or has a token outside the vocabulary; nothing was changed.
        """
        op, wanted = self._intake.check(self._in_flight[0] if self._in_flight else None, result)
        self._in_flight.popleft()
        self._intake.take(op, result, wanted)

    def note_failure(self, op: ForwardOp, rows: Collection[int] = (), *, crashed: bool = False) -> list[Request]:
        """An op in flight failed: count it, before the `reset` that follows (see `suspects`). Returns whom that ended."""
        ends = self._suspects.note_failure(op, rows, crashed=crashed)
        for request in ends:
            self._lives.finish(request, FinishReason.FAILED, "steps with it fail, also when nothing else is in them")
        return ends

    def reset(self, session_no: int) -> None:
        """The runtime's memory is gone: begin a new session.

        Ops in flight are forgotten, requests that hold a row are retracted without publishing, tree and pool are emptied. Known
        tokens stay known, so that nothing a client has seen is taken back.
        """
        self.session_no = session_no
        self._step = 0
        self._in_flight.clear()
        self._lives.lose_rows()

    def set_token_budget(self, token_budget: int) -> None:
        """Plan steps of at most so many tokens from now on; `config` goes on to say what was configured.

        Raises:
            ConfigError: below 1, or above the configured budget, which the runtime was promised; nothing was changed.
        """
        if not 1 <= token_budget <= self.config.token_budget:
            raise ConfigError("token_budget", token_budget, f"an integer from 1 to {self.config.token_budget}")
        self._planner.token_budget = token_budget

    # Inside

    def _live(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(request_id)
        return request

    def _send(self, choice: Choice) -> ForwardOp:
        self._step += 1
        op = build_op(self.placement, choice, self.session_no, self._step)
        self._in_flight.append(op)
        self._planner.note_op(op)
        return op

    def _note_finished(self, request: Request) -> None:
        finished = self._intake.outputs.finished
        num_before = len(finished)
        self.placement.journal.note(lambda: finished.__delitem__(slice(num_before, None)))
        finished.append(request)

    def _snapshot(self) -> Restore:
        step, num_in_flight = self._step, len(self._in_flight)

        def restore() -> None:
            self._step = step
            while len(self._in_flight) > num_in_flight:
                self._in_flight.pop()
            self._planner.forget()

        return restore
