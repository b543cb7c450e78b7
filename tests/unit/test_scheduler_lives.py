"""Scheduler: aborts, failures, expiry, ids used again; at overlap depths 0, 1 and 2."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import DuplicateRequestError, UnknownRequestError
from scheduler_service.core.page_pool import PoolStats
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])
_LIVE = [State.SUBMITTED, State.PREFILLING, State.PREFILL_DONE, State.DECODING, State.RETRACTED]


# Abort, failure, expiry


@pytest.mark.parametrize(
    ("state", "cached"),
    [
        (State.SUBMITTED, 0),
        (State.PREFILLING, 1),
        (State.PREFILL_DONE, 2),
        (State.DECODING, 3),
        (State.RETRACTED, 3),
    ],
)
def test_abort_in_every_state(drive: Drive, state: State, cached: int) -> None:
    """A live request ends at once; its computed full pages are published, the rest is freed, and no op names it again."""
    driver = drive(page_size=2, chunk_size=2)
    driver.bring(state)
    driver.abort("A")
    assert driver.finish == {"A": "abort"}
    assert driver.requests["A"].state is State.FINISHED
    assert driver.stats == PoolStats(free=16 - cached, cached=cached, private=0)
    assert not driver.scheduler.has_work
    assert driver.plan() == {}
    with pytest.raises(UnknownRequestError):
        driver.scheduler.abort("A")


@pytest.mark.parametrize(("state", "cached"), [(State.PREFILLING, 0), (State.PREFILL_DONE, 2), (State.DECODING, 2)])
def test_failed_request_publishes_nothing_more(drive: Drive, state: State, cached: int) -> None:
    """What is wrong with the last step may be wrong with its pages: only what the tree had before stays."""
    driver = drive(page_size=2, chunk_size=2)
    driver.bring(state)
    driver.scheduler.fail_request("A", "out of luck")
    driver.collect()
    assert driver.finish == {"A": "failed"}
    assert driver.requests["A"].finish_detail == "out of luck"
    assert driver.stats == PoolStats(free=16 - cached, cached=cached, private=0)


@pytest.mark.parametrize("state", _LIVE)
def test_expire_ends_a_request_that_was_never_admitted(drive: Drive, state: State) -> None:
    """The limit is one of the queue: a request that ran before is not ended by it."""
    driver = drive(page_size=2, chunk_size=2)
    driver.bring(state)
    before = driver.state()
    driver.scheduler.expire("A")
    driver.collect()
    if state is State.SUBMITTED:
        assert driver.finish == {"A": "deadline"}
        assert driver.scheduler.num_waiting == 0
    else:
        assert driver.state() == before
        assert driver.finish == {}


def test_expire_of_an_unknown_request_is_no_error(drive: Drive) -> None:
    """The clock may fire after the end."""
    drive().scheduler.expire("gone")


def test_calls_about_unknown_requests_raise(drive: Drive) -> None:
    """Abort, retract and fail name the id they do not know."""
    scheduler = drive().scheduler
    for call in (scheduler.abort, scheduler.retract, lambda name: scheduler.fail_request(name, "")):
        with pytest.raises(UnknownRequestError, match="'nobody'"):
            call("nobody")


@_DEPTHS
def test_abort_with_ops_in_flight(drive: Drive, overlap_depth: int) -> None:
    """Tokens of an ended request are dropped, its pages serve others at once, and its end is reported once."""
    driver = drive(page_size=2, num_pages=4, overlap_depth=overlap_depth)
    driver.submit("A", [1, 2, 3, 4, 5], 4)
    for _ in range(overlap_depth + 1):
        driver.plan()
    driver.abort("A")
    driver.submit("B", [9, 9, 9, 9, 9], 3)
    driver.run()
    assert driver.outputs["A"] == []
    assert driver.finish == {"A": "abort", "B": "length"}


def test_abort_of_a_request_between_others(drive: Drive) -> None:
    """The results of the others in the same op are accepted, the aborted one's is not."""
    driver = drive(overlap_depth=1)
    for name in "ABC":
        driver.submit(name, [ord(name), 2, 3], 3)
    driver.plan()
    driver.plan()
    driver.abort("B")
    driver.complete()
    assert {name: len(output) for name, output in driver.outputs.items()} == {"A": 1, "B": 0, "C": 1}
    driver.run()


def test_namespace_of_an_aborted_request_is_forgotten(drive: Drive) -> None:
    """A request that waited in vain leaves nothing behind for the name its client chose."""
    driver = drive(page_size=2, num_pages=2)
    driver.submit("A", [1, 2, 3], 2)
    driver.submit("B", [4, 5, 6, 7], cache_namespace="tenant")
    driver.step()
    driver.abort("B")
    driver.run()
    assert "tenant" not in driver.scheduler.placement.cache.roots()


# Ids used again


@_DEPTHS
def test_live_id_is_refused_and_may_be_used_after_the_end(drive: Drive, definition: Definition, overlap_depth: int) -> None:
    """A duplicate leaves the first life alone; after its end the id begins anew."""
    driver = drive(overlap_depth=overlap_depth)
    driver.submit("r1", [1, 2, 3], 6)
    driver.step()
    with pytest.raises(DuplicateRequestError):
        driver.scheduler.submit("r1", [4, 5, 6], max_tokens=6)
    driver.run()
    assert driver.outputs["r1"] == [20, 104, 629, 421, 384, 473]
    driver.submit("r1", [4, 5, 6], 6)
    driver.run()
    assert driver.outputs["r1"] == definition([4, 5, 6], 6)


@_DEPTHS
def test_second_life_gets_no_token_of_the_first(drive: Drive, definition: Definition, overlap_depth: int) -> None:
    """The id is aborted and submitted again while steps of its first life are in flight: their tokens are nobody's."""
    driver = drive(overlap_depth=overlap_depth)
    driver.submit("r1", [1, 2, 3], 6)
    for _ in range(overlap_depth + 1):
        driver.plan()
    driver.abort("r1")
    first = driver.requests["r1"]
    second = driver.submit("r1", [7, 8, 9], 3)
    driver.audit()
    driver.run()
    assert (first.output, str(first.finish_reason)) == ([], "abort")
    assert second.output == driver.outputs["r1"] == definition([7, 8, 9], 3)
    assert driver.finish == {"r1": "length"}


# Everything at once


def test_any_pair_of_events_at_any_step(drive: Drive, definition: Definition) -> None:
    """Two events at every pair of moments of a tight run, at every depth: each other request says what it says alone."""
    events = ("retract", "abort", "restart")
    for overlap_depth, (first, second), (early, late) in itertools.product(
        (0, 2), itertools.product(events, events), [(1, 1), (1, 3), (2, 4), (4, 5)]
    ):
        driver = drive(page_size=2, num_pages=9, chunk_size=3, overlap_depth=overlap_depth)
        prompts = {"A": [1, 2, 3, 4, 5], "B": [1, 2, 3, 4, 5, 6], "C": [1, 2, 9]}
        for name, prompt in prompts.items():
            driver.submit(name, prompt, 5)
        for step in range(8):
            for event, moment in ((first, early), (second, late)):
                target = "B" if event == first else "A"
                if step != moment or (target not in driver.scheduler.requests):
                    continue
                if event == "restart":
                    driver.restart()
                elif event == "abort":
                    driver.abort(target)
                elif driver.requests[target].state.holds_row:
                    driver.retract(target)
            driver.step()
        driver.run()
        for name, prompt in prompts.items():
            expected = definition(prompt, 5)
            assert driver.outputs[name] == expected[: len(driver.outputs[name])]
            assert driver.finish[name] == "abort" or driver.outputs[name] == expected
