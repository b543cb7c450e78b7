"""The execution thread: order of jobs, and of jobs in two halves whose second halves wait for events of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from runtime_service import execution
from runtime_service.execution import ExecutionThread

WAIT_S = 20.0


class Half:
    """A second half that is over when the test says so."""

    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self.over = threading.Event()
        self._log = log
        self._name = name
        self._error = error

    def ready(self) -> bool:
        return self.over.is_set()

    def finish(self) -> str:
        assert self.over.wait(WAIT_S)
        self._log.append(f"finish {self._name}")
        if self._error is not None:
            raise self._error
        return self._name


class Bench:
    """An execution thread, what ran on it, and jobs for it."""

    def __init__(self) -> None:
        self.thread = ExecutionThread()
        self.log: list[str] = []
        self.halves: dict[str, Half] = {}

    def step(self, name: str, max_pending: int = 2, error: Exception | None = None) -> asyncio.Future[str]:
        """Queue a job in two halves."""
        half = self.halves[name] = Half(self.log, name, error)

        def launch() -> Half:
            self.log.append(f"launch {name}")
            return half

        return self.thread.call_in_halves(launch, max_pending)

    def job(self, name: str) -> asyncio.Future[None]:
        """Queue a job in one piece."""
        return self.thread.call(lambda: self.log.append(name))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has happened in the thread."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A thread that is ended whatever the test leaves behind."""
    bench = Bench()
    yield bench
    for half in bench.halves.values():
        half.over.set()
    bench.thread.stop()
    assert await asyncio.to_thread(bench.thread.join, WAIT_S)


async def test_next_step_is_launched_before_the_last_one_is_read(bench: Bench) -> None:
    """Two steps are launched while the first is still computing; futures get their values in order."""
    first, second = bench.step("1"), bench.step("2")
    await bench.until(lambda: "launch 2" in bench.log)
    assert bench.log == ["launch 1", "launch 2"]
    assert not first.done()
    bench.halves["1"].over.set()
    assert await first == "1"
    assert not second.done()
    bench.halves["2"].over.set()
    assert await second == "2"


async def test_step_that_arrives_later_is_launched_too(bench: Bench) -> None:
    """The thread that waits for a step takes the op that comes meanwhile, instead of being stuck in the wait."""
    bench.step("1")
    await bench.until(lambda: bench.log == ["launch 1"])
    bench.step("2")
    await bench.until(lambda: bench.log == ["launch 1", "launch 2"])


@pytest.mark.parametrize("max_pending", [1, 2, 3])
async def test_no_more_than_max_pending_are_held(max_pending: int, bench: Bench) -> None:
    """One more step than allowed is launched only after the oldest was read."""
    steps = [bench.step(str(n), max_pending) for n in range(max_pending + 1)]
    await bench.until(lambda: len(bench.log) == max_pending)
    assert await asyncio.to_thread(threading.Event().wait, 0.02) is False
    assert bench.log == [f"launch {n}" for n in range(max_pending)]
    bench.halves["0"].over.set()
    await bench.until(lambda: len(bench.log) == max_pending + 2)
    assert bench.log[max_pending:] == ["finish 0", f"launch {max_pending}"]
    for half in bench.halves.values():
        half.over.set()
    assert await asyncio.gather(*steps) == [str(n) for n in range(max_pending + 1)]


async def test_finished_steps_are_answered_before_the_next_is_launched(bench: Bench) -> None:
    """A step that is over when its first half returns, as on a CPU, is answered at once, whatever is queued behind it."""
    gate = threading.Event()
    bench.thread.call(lambda: gate.wait(WAIT_S))
    steps = [bench.step(str(n)) for n in range(3)]
    for half in bench.halves.values():
        half.over.set()
    gate.set()
    assert await asyncio.gather(*steps) == ["0", "1", "2"]
    assert bench.log == ["launch 0", "finish 0", "launch 1", "finish 1", "launch 2", "finish 2"]


async def test_other_jobs_wait_for_pending_steps(bench: Bench) -> None:
    """A job in one piece runs when every step before it was read."""
    bench.step("1")
    bench.step("2")
    other = bench.job("rows")
    await bench.until(lambda: len(bench.log) == 2)
    bench.halves["2"].over.set()
    bench.halves["1"].over.set()
    await other
    assert bench.log == ["launch 1", "launch 2", "finish 1", "finish 2", "rows"]


async def test_errors_of_either_half_reach_their_own_future(bench: Bench) -> None:
    """A first half that raises, or a second, fails its job alone; the thread goes on, and answers stay in order."""
    done: list[str] = []

    def note(name: str, future: asyncio.Future[object]) -> asyncio.Future[object]:
        future.add_done_callback(lambda _: done.append(name))
        return future

    def fail() -> Half:
        raise ValueError("first half")

    first = note("first", bench.step("1", error=KeyError("second half")))
    second = note("second", bench.thread.call_in_halves(fail, 2))
    third = note("third", bench.job("after"))
    await bench.until(lambda: "launch 1" in bench.log)
    bench.halves["1"].over.set()
    with pytest.raises(KeyError, match="second half"):
        await first
    with pytest.raises(ValueError, match="first half"):
        await second
    await third
    await bench.until(lambda: len(done) == 3)
    assert done == ["first", "second", "third"]


async def test_waiting_for_a_step_never_outlasts_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the looks at the queue are, a step that ends with nothing queued behind it is read."""
    monkeypatch.setattr(execution, "POLL_S", 1e-6)
    for number in range(100):
        gate = threading.Event()
        bench.thread.call(partial(gate.wait, WAIT_S))
        step = bench.step(str(number))  # queued while the thread is busy
        gate.set()
        await bench.until(partial(bench.log.__contains__, f"launch {number}"))
        bench.halves[str(number)].over.set()
        async with asyncio.timeout(WAIT_S):
            assert await step == str(number)


async def test_stop_reads_what_is_pending(bench: Bench) -> None:
    """The thread ends after its queued jobs, pending steps included."""
    step = bench.step("1")
    bench.thread.stop()
    await bench.until(lambda: bench.log == ["launch 1"])
    assert not bench.thread.join(0)
    bench.halves["1"].over.set()
    assert await step == "1"
    assert await asyncio.to_thread(bench.thread.join, WAIT_S)


async def test_then_is_called_in_the_order_of_jobs_of_both_kinds(bench: Bench) -> None:
    """What is to follow a step and what is to follow another job come in the order of the jobs, however close they are."""
    order: list[str] = []
    waits = []
    for number in range(50):
        name = f"step {number}"
        half = Half(bench.log, name)
        half.over.set()
        waits.append(
            bench.thread.call_in_halves(partial(lambda half: half, half), 2, lambda future: order.append(future.result()))
        )
        waits.append(bench.thread.call(partial(str, number), lambda future: order.append(future.result())))
    await asyncio.gather(*waits)
    assert order == [name for number in range(50) for name in (f"step {number}", str(number))]
