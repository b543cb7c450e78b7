"""The one thread that touches mirror, KV cache and model: jobs run one after another, in the order in which they are given.

Nothing that reads or writes their state runs anywhere else, so a page or row freed by one job may be granted by the next.

A job may be in two halves: the first queues work on the device, the second waits for it. The thread runs the first half of the
next such job before the second half of the last one, so that the device always has something to do; second halves run in
the order of their jobs, and any other job waits for them.
"""

from __future__ import annotations

import asyncio
import queue
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


class ExecutionThread:
    """A daemon thread with an unbounded queue; its callers bound what they give it.

    A daemon, because a step that never ends must not keep the process from ending.
    """

    def __init__(self, name: str = "execution") -> None:
        # Not a SimpleQueue: its get() waits for ever if a short timeout runs out while it begins to wait (CPython 3.11).
        self._jobs: queue.Queue[_Job[Any] | None] = queue.Queue()
        self._pending: deque[tuple[_Job[Any], SecondHalf[Any]]] = deque()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job; the future, of the running event loop, gets its value or its exception.

        Futures are completed in the order of their jobs. Cancelling one does not take its job out of the queue.
        """
        return self._queue(job, 0)

    def call_in_halves(self, first_half: Callable[[], SecondHalf[T]], max_pending: int) -> asyncio.Future[T]:
        """Queue a job in two halves; the future gets what `finish()` of the second one returns.

        The first half runs when at most `max_pending - 1` earlier jobs have a second half that has not run.
        """
        return self._queue(first_half, max(max_pending, 1))

    def _queue(self, run: Callable[[], Any], max_pending: int) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(_Job(run, future, loop, max_pending))
        return future

    @property
    def num_queued(self) -> int:
        """Jobs that wait behind the one that runs."""
        return self._jobs.qsize()

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
                self._deliver(job, _fail, error)
                continue
            if job.max_pending:
                self._pending.append((job, value))
            else:
                self._deliver(job, _finish, value)
            # What is over now is answered now: on a CPU that is every step.
            while self._pending and self._pending[0][1].ready():
                self._finish_oldest()
        self._finish_down_to(0)

    def _next_job(self) -> _Job[Any] | None:
        """The next job of the queue; second halves that become ready are run while there is none."""
        while self._pending:
            ready = self._pending[0][1].ready()
            try:
                return self._jobs.get_nowait() if ready else self._jobs.get(timeout=POLL_S)
            except queue.Empty:
                if ready:
                    self._finish_oldest()
        return self._jobs.get()

    def _finish_down_to(self, num_pending: int) -> None:
        while len(self._pending) > num_pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        job, half = self._pending.popleft()
        try:
            value = half.finish()
        except BaseException as error:
            self._deliver(job, _fail, error)
        else:
            self._deliver(job, _finish, value)

    @staticmethod
    def _deliver(job: _Job[Any], how: Callable[..., None], value: object) -> None:
        # RuntimeError: the loop is closed, nobody waits any more.
        try:
            job.loop.call_soon_threadsafe(how, job.future, value)
        except RuntimeError:
            return


def _finish(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
