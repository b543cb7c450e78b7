"""The one thread that touches mirror, KV cache and model: jobs run one after another, in the order in which they are given.

Nothing that reads or writes their state runs anywhere else, so a page or row freed by one job may be granted by the next. While
the thread is idle the event loop may take its place: steps that are shorter than the way to the thread and back run there.

A job may be in two halves: the first queues work on the device, the second waits for it. The thread runs the first half of the
next such job before the second half of the last one, so that the device always has something to do; second halves run in
the order of their jobs, and any other job waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

POLL_S = 100e-6
"""How often a step that is not over is looked at while the thread waits for more to do; short beside the shortest step."""


class SecondHalf(Protocol[T_co]):
    """What is left of a job whose first half has run."""

    def ready(self) -> bool:
        """Whether `finish()` would return at once."""

    def finish(self) -> T_co:
        """Wait and make the job's value, or raise."""


@dataclass(slots=True)
class _Job(Generic[T]):
    run: Callable[[], Any]  # T, or SecondHalf[T] where max_pending is not 0
    future: asyncio.Future[T]
    loop: asyncio.AbstractEventLoop
    max_pending: int  # of jobs in two halves: how many may have only their first half behind them, this one included
    then: Callable[[asyncio.Future[T]], object] | None = None


class _Jobs:
    """What is given to the thread, in order. Any thread puts, one takes.

    A `queue.Queue` costs ten times as much, and the get() of a SimpleQueue waits for ever if a short timeout runs out while it
    begins to wait (CPython 3.11).
    """

    def __init__(self) -> None:
        self._jobs: deque[_Job[Any] | None] = deque()
        # Locked, unless something was put since the thread last found nothing.
        self._told = threading.Lock()
        self._told.acquire()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: _Job[Any] | None) -> None:
        self._jobs.append(job)
        with contextlib.suppress(RuntimeError):  # it is told already
            self._told.release()

    def is_empty(self, timeout_s: float = -1) -> bool:
        """Whether there is still nothing after a wait of that length, or without end."""
        while not self._jobs:
            if not self._told.acquire(timeout=timeout_s):
                return not self._jobs
        return False

    def take(self) -> _Job[Any] | None:
        return self._jobs.popleft()


class ExecutionThread:
    """A daemon thread with an unbounded queue; its callers bound what they give it.

    A daemon, because a step that never ends must not keep the process from ending.
    """

    def __init__(self, name: str = "execution") -> None:
        self._jobs = _Jobs()
        self._pending: deque[tuple[_Job[Any], SecondHalf[Any]]] = deque()
        self.num_given = 0
        """Jobs since the start."""
        self._num_unanswered = 0  # known to the event loop alone
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], T], then: Callable[[asyncio.Future[T]], object] | None = None) -> asyncio.Future[T]:
        """Queue a job; the future, of the running event loop, gets its value or its exception.

        Futures are completed in the order of their jobs. Cancelling one does not take its job out of the queue. `then` is
        called with the completed future in the event loop, in the same order, and one turn of the loop earlier than a callback
        of the future would be: callbacks of both kinds have no order among each other.
        """
        return self._queue(job, 0, then)

    def call_in_halves(
        self,
        first_half: Callable[[], SecondHalf[T]],
        max_pending: int,
        then: Callable[[asyncio.Future[T]], object] | None = None,
    ) -> asyncio.Future[T]:
        """Queue a job in two halves; the future gets what `finish()` of the second one returns.

        The first half runs when at most `max_pending - 1` earlier jobs have a second half that has not run. `then`: see `call`.
        """
        return self._queue(first_half, max(max_pending, 1), then)

    def _queue(
        self, run: Callable[[], Any], max_pending: int, then: Callable[[asyncio.Future[Any]], object] | None = None
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.num_given += 1
        self._num_unanswered += 1
        self._jobs.put(_Job(run, future, loop, max_pending, then))
        return future

    @property
    def is_idle(self) -> bool:
        """Whether every job has run and was answered. To be asked in the event loop that gives it its jobs: until it gives the
        next one, it may do itself what is for the thread to do.
        """
        return not self._num_unanswered

    @property
    def num_done(self) -> int:
        """Jobs that have ended, as the event loop knows."""
        return self.num_given - self._num_unanswered

    @property
    def num_queued(self) -> int:
        """Jobs that wait behind the one that runs."""
        return len(self._jobs)

    def stop(self) -> None:
        """End the thread after the jobs that are queued now."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when it has not ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- in the thread

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            self._finish_down_to(max(job.max_pending - 1, 0))
            try:
                value = job.run()
            except BaseException as error:
                self._finish_down_to(0)  # futures are completed in order
                self._deliver(job, self._fail, error)
                continue
            if job.max_pending:
                self._pending.append((job, value))
            else:
                self._deliver(job, self._finish, value)
            # What is over now is answered now: on a CPU that is every step.
            while self._pending and self._pending[0][1].ready():
                self._finish_oldest()
        self._finish_down_to(0)

    def _next_job(self) -> _Job[Any] | None:
        """The next job of the queue; second halves that become ready are run while there is none."""
        while self._pending:
            ready = self._pending[0][1].ready()
            if not self._jobs.is_empty(0 if ready else POLL_S):
                return self._jobs.take()
            if ready:
                self._finish_oldest()
        self._jobs.is_empty()
        return self._jobs.take()

    def _finish_down_to(self, num_pending: int) -> None:
        while len(self._pending) > num_pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        job, half = self._pending.popleft()
        try:
            value = half.finish()
        except BaseException as error:
            self._deliver(job, self._fail, error)
        else:
            self._deliver(job, self._finish, value)

    @staticmethod
    def _deliver(job: _Job[Any], how: Callable[[_Job[Any], Any], None], value: object) -> None:
        # RuntimeError: the loop is closed, nobody waits any more.
        try:
            job.loop.call_soon_threadsafe(how, job, value)
        except RuntimeError:
            return

    # -- in the event loop

    def _finish(self, job: _Job[Any], value: object) -> None:
        self._num_unanswered -= 1
        if not job.future.done():
            job.future.set_result(value)
        if job.then is not None:
            job.then(job.future)

    def _fail(self, job: _Job[Any], error: BaseException) -> None:
        self._num_unanswered -= 1
        if not job.future.done():
            job.future.set_exception(error)
        if job.then is not None:
            job.then(job.future)
