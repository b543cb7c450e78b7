"""The loop that moves ops and results between the core and the runtime.

The task plans while fewer than `overlap_depth + 1` ops are in flight, hands results to the core in the order of the ops, and
sleeps on an event when there is nothing to do. Whatever changes the core calls `_publish`, so every token and every end reaches
its subscriber.

Every trouble with the runtime leads to a new session (`connection.py`): the core forgets what was in flight and prefills again
from the tokens it knows, so clients see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import perf_counter

import structlog

from scheduler_service.connection import RuntimeConnection
from scheduler_service.core import invariants
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import (
    InternalError,
    InvariantViolation,
    NoProgressError,
    PagemirrorError,
    UnexpectedResultError,
)
from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.dump import dump_failure
from scheduler_service.failures import Failures
from scheduler_service.metrics import Metrics, fill_of
from scheduler_service.page_event_log import PageEventLog
from scheduler_service.recorder import RecordingScheduler
from scheduler_service.runtime_group import Disagreement, RuntimeGroup
from scheduler_service.settings import SchedulerSettings
from scheduler_service.subscription import Subscribers
from scheduler_service.verification import Verifier
from scheduler_service.wire import StepRefusal
from scheduler_service.wire_facts import RuntimeFacts, check_message_limit

log = structlog.get_logger("pagemirror.engine")

FLUSH_AFTER_S = 0.1
"""Idle time after which rows that were released are told to the runtime in an op of their own."""

_NEVER = float("inf")
_FILL_INTERVAL_S = 0.25
_MAX_EMPTY_PLANS = 1000


class StepLoop:
    """Core, connection and subscribers of one scheduler process, and the task that drives them."""

    core: Scheduler
    config: SchedulerConfig

    def __init__(
        self,
        settings: SchedulerSettings,
        metrics: Metrics | None = None,
        on_connected: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """`on_connected` is told whenever a runtime begins or ceases to serve. Must be made inside a running event loop."""
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.num_steps = 0
        """Steps executed since the start, over all sessions."""
        self.last_step = 0
        """Last step sent in the present session."""
        self.failed = asyncio.Event()
        """Set when the loop ended by an error of our own; the process should end."""
        self.page_events = PageEventLog()
        self._on_connected = on_connected
        self._subscribers = Subscribers(self.metrics, settings.max_unread_tokens)
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._num_pauses = 0
        self._flush_at: float | None = None  # None: not idle yet; _NEVER: nothing to tell until something changes
        self._fill_at = 0.0
        self._empty_plans = 0
        self._ranks_disagree = False
        self._task: asyncio.Task[None] | None = None
        self.connection = RuntimeConnection(
            settings,
            wake=self._wake.set,
            on_connected=self._note_connected,
            on_new_session=self._new_session,
            on_give_up=self.end_all,
        )

    @property
    def facts(self) -> RuntimeFacts:
        """What the runtime said of itself."""
        return self.connection.facts

    @property
    def link(self) -> RuntimeGroup:
        """The streams to the runtime, or to all of its ranks."""
        return self.connection.link

    async def start(self) -> None:
        """Connect, take the limits from the runtime, and begin to serve.

        Raises:
            RuntimeMismatchError, ConfigError: configured values disagree or are out of range.
            StartError: no runtime within `startup_timeout`.
        """
        await self.connection.start()
        try:
            check_message_limit(self.facts, self.settings.token_budget)
            self.config = self.settings.core_config(self.facts)
            kind = RecordingScheduler if self.settings.check else Scheduler
            self.core = kind(self.config, self.connection.session_no)
            self.page_events.attach(self.core.placement.cache, self.config.num_pages, self.config.page_size)
            self._failures = Failures(self.core, self.connection.cause_is_gone)
            self._verifier = Verifier(self.core, self.metrics, self.settings.verify_window)
            self.metrics.set_runtime(self.facts.model, self.config)
        except PagemirrorError:
            await self.connection.close()
            raise
        self.connection.set_connected(True)
        self._task = asyncio.create_task(self._run(), name="engine")

    def end_all(self, error: PagemirrorError) -> None:
        """End every live request; their clients are told `error`."""
        if self._subscribers:
            self._subscribers.set_error(error)
            for request_id in self._subscribers.ids():
                self.core.abort(request_id)
            self._changed()

    # --- the loop -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if trouble := self._take_answers() or self._break():
                    await self._recover(trouble)
                    continue
                if not self._num_pauses:
                    self._plan()
                if self.settings.check:
                    invariants.check(self.core)
                self._publish()
                self._write_fill()
                await self._sleep()
        except Exception as error:
            log.exception("engine_failed")
            if isinstance(self.core, RecordingScheduler):
                dump_failure(self.core, error, self.settings.dump_dir)
            self.failed.set()
            self._subscribers.finish_all(InternalError("the scheduler failed"))
            self.page_events.end(InternalError("the scheduler failed"))
            self.connection.set_connected(False)
            self._tell_progress()

    def _take_answers(self) -> str:
        """Hand results to the core; the trouble as text if one of them is none."""
        answers = self.link.answers
        while answers:
            answer = answers.popleft()
            if isinstance(answer, Disagreement):
                self._failures.note_failure(answer.rows)
                self._ranks_disagree = True
                return str(answer)
            if isinstance(answer.outcome, StepRefusal):
                self._failures.note_refusal(answer.outcome)
                return str(answer.outcome)
            if trouble := self._verifier.check(answer.outcome):
                return trouble
            began = perf_counter()
            try:
                self.core.complete(answer.outcome)
            except UnexpectedResultError as error:
                self._failures.note_failure()
                return str(error)
            self.metrics.tally.answered(answer.outcome, answer.seconds, began, perf_counter() - began)
            self._note_step()
            if answers:
                self._publish()  # requests that have ended are not counted in the next result
        return ""

    def _break(self) -> str:
        """Why the link broke, or nothing. If it did with ops in flight, the oldest may be the reason."""
        if self.link.broken is None:
            return ""
        self._failures.note_failure(crashed=True)
        return str(self.link.broken)

    def _note_step(self) -> None:
        self.connection.trouble_is_over()
        self.num_steps += 1
        self._flush_at = None
        self._tell_progress()

    def _plan(self) -> None:
        core = self.core
        while core.num_in_flight <= self.config.overlap_depth:
            began = perf_counter()
            op = core.plan()
            if op is not None:
                self._empty_plans = 0
                if self.settings.check and (findings := invariants.audit_op(op) + invariants.audit_writes(core, op)):
                    raise InvariantViolation(findings)
                self._send(op, began)
            elif core.has_work and not core.num_in_flight:
                # Everything that ran was retracted in this very plan: the next one admits again.
                self._empty_plans += 1
                if self._empty_plans > _MAX_EMPTY_PLANS:
                    raise NoProgressError(f"nothing was planned {_MAX_EMPTY_PLANS} times, {core.num_waiting} requests wait")
            else:
                self._flush_when_due()
                return

    def _flush_when_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._flush_at is None:
            self._flush_at = now + FLUSH_AFTER_S
        elif now >= self._flush_at:
            began = perf_counter()
            op = self.core.flush_releases()
            if op is None:
                self._flush_at = _NEVER
            else:
                self._send(op, began)

    def _send(self, op: ForwardOp, began: float) -> None:
        planned = perf_counter()
        self._flush_at = None
        self.last_step = op.step
        num_bytes = self.link.send(op)
        self.metrics.tally.sent(op, num_bytes, planned - began, perf_counter() - planned)

    async def _sleep(self) -> None:
        flush_at = _NEVER if self._flush_at is None or self._num_pauses else self._flush_at
        if flush_at == _NEVER:
            await self._wake.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(flush_at):
                await self._wake.wait()

    async def _recover(self, trouble: str) -> None:
        cause = "digest" if self._verifier.pending else "link" if self.link.broken else "refusal"
        if self._ranks_disagree:
            self._ranks_disagree, cause = False, "ranks"
        self.metrics.resets.labels(cause).inc()
        self._publish()  # of the results before the trouble: what follows takes time, and clients may act meanwhile
        await self._verifier.settle(self.link, self.end_all)
        broken = self.link.broken is not None
        await self.connection.recover(trouble)
        self.metrics.reconnects.inc(broken)
        if not self._subscribers:
            self.connection.trouble_is_over()
        self._tell_progress()

    def _new_session(self, session_no: int) -> None:
        self.core.reset(session_no)
        self.metrics.tally.reset()
        self.last_step = 0
        self._flush_at = None
        self._publish()

    # --- small things -----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """After every change by a client: tell subscribers, and have the loop look."""
        self._flush_at = None
        self._publish()
        self._wake.set()

    def _publish(self) -> None:
        if self.page_events.is_recording:
            self.page_events.drain()
        outputs = self.core.take_outputs()
        began = perf_counter()
        self._subscribers.deliver(outputs)
        if outputs.tokens:
            self._failures.note_tokens()
            self.metrics.tally.delivered(len(outputs.tokens), perf_counter() - began)
        if outputs.finished:
            self._tell_progress()
        if overflowed := self._subscribers.take_overflowed():
            for request_id in overflowed:
                self.core.abort(request_id)
            self._publish()

    def _write_fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._fill_at or not self.core.has_work:
            self._fill_at = now + _FILL_INTERVAL_S
            self.metrics.set_fill(fill_of(self.core))

    def _note_connected(self, connected: bool) -> None:
        self.metrics.connected.set(connected)
        self._on_connected(connected)

    def _tell_progress(self) -> None:
        # Whoever waits holds the old event, so none is missed and none needs to clear it.
        self._progress.set()
        self._progress = asyncio.Event()

    async def _end_loop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.connection.close()
