"""The one thread that touches mirror, KV cache and model: jobs run one after another, in the order in which they are given.

Nothing that reads or writes their state runs anywhere else, so a page or row freed by one job may be granted by the next.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class ExecutionThread:
    """A daemon thread with an unbounded queue; its callers bound what they give it.

    A daemon, because a step that never ends must not keep the process from ending.
    """

    def __init__(self, name: str = "execution") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job; the future, of the running event loop, gets its value or its exception.

        Futures are completed in the order of their jobs. Cancelling one does not take its job out of the queue.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((job, future, loop))
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

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, loop = entry
            try:
                value = job()
            except BaseException as error:
                self._deliver(loop, _fail, future, error)
            else:
                self._deliver(loop, _finish, future, value)

    @staticmethod
    def _deliver(loop: asyncio.AbstractEventLoop, how: Callable[..., None], future: asyncio.Future[Any], value: object) -> None:
        # RuntimeError: the loop is closed, nobody waits any more.
        try:
            loop.call_soon_threadsafe(how, future, value)
        except RuntimeError:
            return


def _finish(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
