"""Scheduler: resets of the session and of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import CacheInUseError, UnexpectedResultError
from scheduler_service.core.page_pool import PoolStats
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])
_LIVE = [State.SUBMITTED, State.PREFILLING, State.PREFILL_DONE, State.DECODING, State.RETRACTED]


# Reset of the session


@_DEPTHS
@pytest.mark.parametrize("state", _LIVE)
def test_reset_in_every_state(drive: Drive, definition: Definition, state: State, overlap_depth: int) -> None:
    """The runtime is lost: known tokens stay, tree and pool are empty, and the output is the same in the end."""
    driver = drive(page_size=2, chunk_size=2, overlap_depth=overlap_depth)
    driver.bring(state)
    known = list(driver.outputs["A"])
    retractions = driver.requests["A"].num_retractions
    driver.restart()
    assert driver.outputs["A"] == known
    assert driver.requests["A"].state is (State.SUBMITTED if state is State.SUBMITTED else State.RETRACTED)
    assert driver.stats == PoolStats(free=16, cached=0, private=0)
    assert (driver.scheduler.session_no, driver.scheduler.last_step, driver.scheduler.num_in_flight) == (2, 0, 0)
    driver.run()
    assert driver.outputs["A"] == definition([1, 2, 3, 4, 5], 4)
    assert driver.requests["A"].num_retractions == retractions


def test_reset_forgets_ops_in_flight(drive: Drive) -> None:
    """Results of the old session are refused, their tokens are computed again, and steps begin at 1."""
    driver = drive(overlap_depth=2)
    driver.submit("A", [1, 2, 3], 6)
    driver.submit("B", [4, 5, 6], 6)
    for _ in range(3):
        driver.plan()
    driver.retract("B")
    late = driver.results[0]
    driver.restart()
    assert [driver.requests[name].num_outstanding for name in "AB"] == [0, 0]
    before = driver.state()
    with pytest.raises(UnexpectedResultError):
        driver.scheduler.complete(late)
    assert driver.state() == before
    driver.run()
    assert driver.outputs["A"] == [20, 104, 629, 421, 384, 473]
    assert len(driver.outputs["B"]) == 6


def test_reset_holder_resumes_in_the_step_after(drive: Drive) -> None:
    """A holder met by a reset misses one step; ops carry the new session and full rows of new leases."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5], 4)
    driver.step()
    driver.step()
    driver.restart()
    assert driver.plan() == {}
    resume = driver.plan()["A"]
    assert (resume.cause, resume.row, resume.begin, resume.full, resume.num_computed) == ("resume", 1, 0, True, 0)
    assert (driver.op.session_no, driver.op.step) == (2, 1)
    assert driver.op.row_generations.tolist() == [2]
    assert driver.op.released_rows.tolist() == []
    driver.run()


def test_reset_keeps_the_order(drive: Drive) -> None:
    """Resumes after a reset come in the order of their requests, ahead of the queue."""
    driver = drive(max_rows=3)
    for name, priority in (("A", 2), ("B", 1), ("C", 3)):
        driver.submit(name, [1, 2], 5, priority=priority)
    driver.step()
    driver.restart()
    assert driver.step() == {}
    driver.submit("D", [1, 2], 5)
    assert list(driver.step()) == ["B", "A", "C"]
    driver.run()
    assert set(driver.finish.values()) == {"length"}


# Reset of the prefix cache


def test_cache_reset_is_refused_while_pages_are_used(drive: Drive) -> None:
    """A running request uses cached pages: nothing is changed, and the error counts them."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4, 5], 4)
    driver.step()
    driver.step()
    before = driver.state()
    with pytest.raises(CacheInUseError, match="2 of its pages"):
        driver.scheduler.reset_prefix_cache()
    assert driver.state() == before
    driver.run()
    assert driver.scheduler.reset_prefix_cache() == 4
    assert driver.stats == PoolStats(free=16, cached=0, private=0)


def test_cache_reset_beside_requests_that_use_no_cached_page(drive: Drive) -> None:
    """A request whose pages are all private does not stand in the way, and publishes afterwards as usual."""
    driver = drive(page_size=2)
    driver.submit("old", [9, 9, 9])
    driver.run()
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.step()
    assert driver.scheduler.reset_prefix_cache() == 1
    driver.audit()
    driver.run()
    driver.submit("B", [1, 2, 3, 4, 5], 2)
    driver.run()
    assert driver.requests["B"].cached_tokens == 4


def test_forced_cache_reset_retracts_all_first(drive: Drive, definition: Definition) -> None:
    """Every running request loses its row, no cached page is left, and the outputs do not change."""
    driver = drive(page_size=2, overlap_depth=1)
    driver.submit("A", [1, 2, 3, 4, 5], 4)
    driver.submit("B", [1, 2, 3, 4, 6], 4)
    driver.plan()
    driver.plan()
    freed = driver.scheduler.reset_prefix_cache(force=True)
    driver.audit()
    assert freed == 2
    assert driver.stats == PoolStats(free=16, cached=0, private=0)
    assert sorted(driver.free) == list(range(1, 17))
    assert driver.scheduler.num_retracted == 2
    driver.run()
    assert driver.outputs == {"A": definition([1, 2, 3, 4, 5], 4), "B": definition([1, 2, 3, 4, 6], 4)}
    assert [driver.requests[name].num_retractions for name in "AB"] == [1, 1]


def test_cache_reset_of_an_idle_scheduler(drive: Drive) -> None:
    """Nothing to free is no error, with and without force."""
    scheduler = drive().scheduler
    assert (scheduler.reset_prefix_cache(), scheduler.reset_prefix_cache(force=True)) == (0, 0)


def test_next_prompt_after_a_cache_reset_starts_cold(drive: Drive) -> None:
    """What was published before is not found any more."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3])
    driver.run()
    driver.scheduler.reset_prefix_cache()
    driver.submit("B", [1, 2, 3, 4])
    driver.run()
    assert driver.requests["B"].cached_tokens == 0
