"""Scheduler: aborts, retractions, late tokens, ids used again, resets; at overlap depths 0, 1 and 2."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import (
    CacheInUseError,
    DuplicateRequestError,
    NotRunningError,
    UnexpectedResultError,
    UnknownRequestError,
)
from scheduler_service.core.ops import RowStatus
from scheduler_service.core.scheduler import PoolStats
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])


def _bring(driver: Any, state: State) -> None:
    """Submit A, five tokens in chunks of at most two, and bring it to `state` with nothing in flight."""
    driver.submit("A", [1, 2, 3, 4, 5], 4)
    steps = {State.SUBMITTED: 0, State.PREFILLING: 1, State.PREFILL_DONE: 3, State.DECODING: 4, State.RETRACTED: 4}[state]
    for _ in range(steps):
        driver.plan()
        driver.complete()
    if state is State.RETRACTED:
        driver.retract("A")
    assert driver.requests["A"].state is state


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
    _bring(driver, state)
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
    _bring(driver, state)
    driver.scheduler.fail_request("A", "out of luck")
    driver.collect()
    assert driver.finish == {"A": "failed"}
    assert driver.requests["A"].finish_detail == "out of luck"
    assert driver.stats == PoolStats(free=16 - cached, cached=cached, private=0)


@pytest.mark.parametrize("state", _LIVE)
def test_expire_ends_a_request_that_was_never_admitted(drive: Drive, state: State) -> None:
    """The limit is one of the queue: a request that ran before is not ended by it."""
    driver = drive(page_size=2, chunk_size=2)
    _bring(driver, state)
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


# Retraction and late tokens


@pytest.mark.parametrize("state", [State.SUBMITTED, State.RETRACTED])
def test_retract_needs_a_row(drive: Drive, state: State) -> None:
    """Who holds no row cannot lose it: the call raises and changes nothing."""
    driver = drive(page_size=2, chunk_size=2)
    _bring(driver, state)
    before = driver.state()
    with pytest.raises(NotRunningError, match=f"is {state} and holds no row"):
        driver.scheduler.retract("A")
    assert driver.state() == before


@pytest.mark.parametrize("state", [State.PREFILLING, State.PREFILL_DONE, State.DECODING])
def test_retract_in_every_state_with_a_row(drive: Drive, definition: Definition, state: State) -> None:
    """A retraction costs steps, no tokens."""
    driver = drive(page_size=2, chunk_size=2)
    _bring(driver, state)
    driver.retract("A")
    assert driver.rows == {}
    assert driver.stats.private == 0
    driver.run()
    assert driver.outputs["A"] == definition([1, 2, 3, 4, 5], 4)
    assert driver.requests["A"].num_retractions == 1


@pytest.mark.parametrize("overlap_depth", [1, 2])
def test_retracted_request_accepts_its_outstanding_tokens(drive: Drive, overlap_depth: int) -> None:
    """Every token of a step in flight is kept, and the request resumes behind the last of them."""
    driver = drive(overlap_depth=overlap_depth)
    driver.submit("A", [1, 2, 3], 6)
    for _ in range(overlap_depth + 1):
        driver.plan()
    driver.retract("A")
    assert driver.requests["A"].num_outstanding == overlap_depth + 1
    for count in range(1, overlap_depth + 2):
        assert driver.plan() == {}, "it does not resume while a step is outstanding"
        driver.complete()
        assert len(driver.outputs["A"]) == count
    resume = driver.plan()["A"]
    assert (resume.cause, resume.num_computed + resume.input_len) == ("resume", 3 + overlap_depth + 1)
    driver.run()
    assert driver.outputs["A"] == [20, 104, 629, 421, 384, 473]


def test_retracted_request_ends_by_a_late_token(drive: Drive) -> None:
    """Its last allowed token arrives while it is retracted: it ends with `length` and never resumes."""
    driver = drive(overlap_depth=2)
    driver.submit("A", [1, 2, 3], 2)
    driver.plan()
    driver.plan()
    driver.retract("A")
    driver.complete()
    assert driver.requests["A"].state is State.RETRACTED
    driver.complete()
    assert (driver.outputs["A"], driver.finish) == ([20, 104], {"A": "length"})
    assert driver.plan() == {}
    assert driver.num_ops == 2


def test_retracted_request_ends_by_a_late_stop_token(drive: Drive) -> None:
    """A stop token that comes late ends it as well, and what was computed beyond it is dropped."""
    driver = drive(overlap_depth=2)
    driver.submit("A", [1, 2, 3], 6, stop_ids=[104])
    for _ in range(3):
        driver.plan()
    driver.retract("A")
    for _ in range(3):
        driver.complete()
    assert (driver.outputs["A"], driver.finish) == ([20, 104], {"A": "stop"})
    assert driver.scheduler.num_retracted == 0


def test_retracted_request_fails_by_a_late_result(drive: Drive) -> None:
    """Non-finite logits of an outstanding step end the retracted request."""
    driver = drive(overlap_depth=1)
    driver.submit("A", [1, 2, 3], 6)
    driver.plan()
    driver.retract("A")
    driver.results[0].row_status = np.array([RowStatus.NON_FINITE], dtype=np.uint8)
    driver.complete()
    assert driver.finish == {"A": "failed"}
    assert (driver.scheduler.num_retracted, driver.scheduler.has_work) == (0, False)


def test_abort_of_a_retracted_request_with_outstanding_steps(drive: Drive) -> None:
    """It ends at once, and its late results are dropped."""
    driver = drive(overlap_depth=2)
    driver.submit("A", [1, 2, 3], 6)
    for _ in range(3):
        driver.plan()
    driver.retract("A")
    driver.abort("A")
    for _ in range(3):
        driver.complete()
    assert (driver.outputs["A"], driver.finish) == ([], {"A": "abort"})


def test_retraction_publishes_what_is_known_and_computed(drive: Drive) -> None:
    """With two results outstanding only pages of known tokens are published; the resume finds those."""
    driver = drive(page_size=1, overlap_depth=2)
    driver.submit("A", [1, 2, 3], 6)
    for _ in range(3):
        driver.plan()
    driver.retract("A")
    assert driver.stats.cached == 3
    for _ in range(3):
        driver.complete()
    assert driver.plan() == {}
    assert driver.plan()["A"].num_computed == 3
    driver.run()


@_DEPTHS
def test_overlap_changes_no_output(drive: Drive, definition: Definition, overlap_depth: int) -> None:
    """Planning ahead changes when tokens come, not which, under pressure as well."""
    driver = drive(page_size=2, num_pages=10, overlap_depth=overlap_depth)
    for index, name in enumerate("ABCD"):
        driver.submit(name, [index + 1] * 3, 8)
    driver.run()
    for index, name in enumerate("ABCD"):
        assert driver.outputs[name] == definition([index + 1] * 3, 8)
    assert sum(request.num_retractions for request in driver.requests.values()) > 0


@_DEPTHS
def test_overlap_plans_ahead_but_never_beyond_the_limit(drive: Drive, overlap_depth: int) -> None:
    """A request of k tokens is planned k times, at every depth."""
    driver = drive(overlap_depth=overlap_depth)
    driver.submit("A", [1, 2, 3], 4)
    driver.run()
    assert driver.num_ops == 4


# Reset of the session


@_DEPTHS
@pytest.mark.parametrize("state", _LIVE)
def test_reset_in_every_state(drive: Drive, definition: Definition, state: State, overlap_depth: int) -> None:
    """The runtime is lost: known tokens stay, tree and pool are empty, and the output is the same in the end."""
    driver = drive(page_size=2, chunk_size=2, overlap_depth=overlap_depth)
    _bring(driver, state)
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
