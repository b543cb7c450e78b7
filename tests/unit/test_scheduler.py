"""Scheduler: submit, outputs and ends.

Results are in test_scheduler_results.py, aborts and ids used again in test_scheduler_lives.py, retractions in
test_scheduler_retraction.py, resets in test_scheduler_reset.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.choice import Choice
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import (
    BadParameterError,
    BadTokenError,
    DuplicateRequestError,
    EmptyPromptError,
    NoProgressError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from scheduler_service.core.page_pool import PoolStats
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]


# Submit


@pytest.mark.parametrize(
    ("name", "prompt", "options", "error"),
    [
        ("new", [], {}, EmptyPromptError),
        ("new", [1, 997], {}, BadTokenError),
        ("new", [1, -1], {}, BadTokenError),
        ("new", [1] * 65, {}, PromptTooLongError),
        ("new", [1], {"max_tokens": 0}, BadParameterError),
        ("new", [1], {"max_tokens": -1}, BadParameterError),
        ("new", [1], {"priority": 2**40}, BadParameterError),
        ("new", [1], {"stop_ids": [-1]}, BadParameterError),
        ("", [1], {}, BadParameterError),
        ("running", [1], {}, DuplicateRequestError),
        ("waiting1", [1], {}, DuplicateRequestError),
        ("retracted", [1], {}, DuplicateRequestError),
        ("new", [1], {}, QueueFullError),
    ],
)
def test_refused_submit_changes_nothing(
    drive: Drive, name: str, prompt: list[int], options: dict[str, Any], error: type[RequestError]
) -> None:
    """Whatever is wrong with a request, the scheduler is as if it had never come."""
    driver = drive(max_rows=2, max_waiting=2)
    driver.submit("running", [1, 2, 3], 9)
    driver.submit("retracted", [1, 2, 3], 9)
    driver.step()
    driver.retract("retracted")
    driver.submit("waiting1", [4])
    driver.submit("waiting2", [5])
    before = driver.state()
    with pytest.raises(error):
        driver.scheduler.submit(name, prompt, **{"max_tokens": 2} | options)
    assert driver.state() == before
    driver.run()
    assert set(driver.finish) == {"running", "retracted", "waiting1", "waiting2"}


def test_submit_takes_in(drive: Drive) -> None:
    """A request waits, without pages or a row, and is live under its id."""
    driver = drive()
    request = driver.submit("A", [1, 2, 3], 5, stop_ids=[7, 8], priority=2)
    assert driver.scheduler.requests == {"A": request}
    assert (request.state, request.limit_len, request.stop_ids, request.priority) == (State.SUBMITTED, 8, (7, 8), 2)
    scheduler = driver.scheduler
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_retracted) == (1, 0, 0)
    assert scheduler.has_work
    assert driver.stats == PoolStats(free=16, cached=0, private=0)


def test_submit_copies_the_prompt(drive: Drive) -> None:
    """What the caller does with its array later does not reach the request."""
    driver = drive()
    prompt = np.array([1, 2, 3], dtype=np.int32)
    request = driver.scheduler.submit("A", prompt, max_tokens=1)
    prompt[:] = 9
    assert request.tokens.tolist() == [1, 2, 3]


def test_queue_limit_counts_waiting_requests_only(drive: Drive) -> None:
    """Running and retracted requests take no place in the queue, and an ended one gives its place back."""
    driver = drive(max_rows=2, max_waiting=1)
    driver.submit("A", [1], 9)
    driver.step()
    driver.submit("B", [2], 9)
    driver.step()
    driver.submit("C", [3], 9)
    with pytest.raises(QueueFullError):
        driver.submit("D", [4], 9)
    driver.abort("C")
    driver.submit("D", [4], 9)
    driver.retract("A")
    assert (driver.scheduler.num_waiting, driver.scheduler.num_running, driver.scheduler.num_retracted) == (1, 1, 1)
    driver.run()


def test_largest_max_tokens_on_a_large_pool(make_config: Callable[..., SchedulerConfig]) -> None:
    """A wish of 2^31 - 1 tokens is planned also where pool and row would hold them: no count overflows."""
    scheduler = Scheduler(make_config(page_size=2**20, num_pages=4096, max_pages_per_row=4096))
    scheduler.submit("A", [1, 2, 3], max_tokens=2**31 - 1)
    op = scheduler.plan()
    assert op is not None
    assert op.num_rows == 1


# Outputs and ends


def test_output_is_the_definition(drive: Drive, definition: Definition) -> None:
    """A request returns as many tokens as were asked for, each in the step that sampled it."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 6)
    for count in range(1, 7):
        driver.step()
        assert len(driver.outputs["A"]) == count
    assert driver.outputs["A"] == definition([1, 2, 3], 6) == [20, 104, 629, 421, 384, 473]
    assert driver.finish == {"A": "length"}
    assert not driver.scheduler.has_work


def test_abort_shows_up_in_take_outputs(drive: Drive) -> None:
    """An end that no step brought is handed over as well."""
    scheduler = drive().scheduler
    request = scheduler.submit("A", [1], max_tokens=1)
    scheduler.abort("A")
    assert scheduler.take_outputs().finished == [request]


def test_stop_token_ends_and_is_part_of_the_output(drive: Drive) -> None:
    """A stop id ends the request with `stop` in the step in which it is sampled."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 6, stop_ids=[7, 629])
    driver.run()
    assert driver.outputs["A"] == [20, 104, 629]
    assert driver.finish == {"A": "stop"}


def test_stop_token_in_the_last_place_is_stop(drive: Drive) -> None:
    """Where limit and stop token meet, it is a stop."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 3, stop_ids=[629])
    driver.run()
    assert driver.finish == {"A": "stop"}


def test_stop_ids_are_each_requests_own(drive: Drive) -> None:
    """Twenty ids of one request do not stop another, and a row's next tenant does not inherit them."""
    driver = drive(max_rows=2)
    driver.submit("A", [1, 2, 3], 6, stop_ids=[*range(200, 220), 421])
    driver.submit("B", [1, 2, 3], 6)
    driver.submit("C", [1, 2, 3], 6)
    driver.run()
    assert driver.finish == {"A": "stop", "B": "length", "C": "length"}
    assert [len(driver.outputs[name]) for name in "ABC"] == [4, 6, 6]


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        ({"num_pages": 2, "max_pages_per_row": 8}, 4, "capacity"),
        ({"num_pages": 8, "max_pages_per_row": 2}, 4, "length"),
        ({"num_pages": 2, "max_pages_per_row": 2}, 4, "length"),
        ({"max_context": 7}, 2, "length"),
    ],
)
def test_limits_end_a_request(drive: Drive, options: dict[str, int], count: int, reason: str) -> None:
    """A request that wants more than the row, the context or the pool holds ends there, and says which it was."""
    driver = drive(**options)
    driver.submit("A", [1, 2, 3, 4, 5], 100)
    driver.run()
    assert len(driver.outputs["A"]) == count
    assert driver.finish == {"A": reason}
    assert driver.requests["A"].num_retractions == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_finish_publishes_exactly_the_stored_full_pages(drive: Drive, page_size: int) -> None:
    """L prompt tokens and k returned ones leave floor((L + k - 1) / page_size) pages in the tree, at every overlap depth."""
    for overlap_depth in (0, 1, 2):
        for prompt_len in range(1, 7):
            for count in range(1, 6):
                driver = drive(page_size=page_size, overlap_depth=overlap_depth)
                driver.submit("A", range(1, prompt_len + 1), count)
                driver.run()
                expected = (prompt_len + count - 1) // page_size
                assert driver.stats == PoolStats(free=16 - expected, cached=expected, private=0)


def test_stop_publishes_what_the_kept_tokens_need(drive: Drive) -> None:
    """A stop with two more steps in flight publishes by the tokens that count, not by what those steps wrote."""
    driver = drive(page_size=1, overlap_depth=2)
    driver.submit("A", [1, 2, 3], 6, stop_ids=[104])
    driver.run()
    assert driver.outputs["A"] == [20, 104]
    assert driver.stats.cached == 4
    driver.submit("B", [1, 2, 3, 20, 104, 7])
    driver.step()
    assert driver.requests["B"].cached_tokens == 4


def test_published_output_is_found_by_the_next_turn(drive: Drive, definition: Definition) -> None:
    """A prompt that repeats prompt and answer of an earlier request finds the pages of both."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3], 4)
    driver.run()
    driver.submit("B", [1, 2, 3, *definition([1, 2, 3], 4), 5], 2)
    driver.run()
    assert driver.requests["B"].cached_tokens == 6


# Steps, and what can be asked


def test_no_progress_is_an_error_not_a_hang(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is in flight and a request could run, an empty plan raises and names the request."""
    driver = drive()
    driver.submit("stuck", [1])
    monkeypatch.setattr(driver.scheduler._planner, "choose", lambda _, **__: Choice())
    with pytest.raises(NoProgressError, match="stuck"):
        driver.scheduler.plan()


def test_idle_scheduler_plans_nothing(drive: Drive) -> None:
    """Without requests there is no op, and the step number does not move."""
    scheduler = drive().scheduler
    assert scheduler.plan() is None
    assert scheduler.flush_releases() is None
    assert (scheduler.last_step, scheduler.num_in_flight, scheduler.has_work) == (0, 0, False)


def test_steps_count_sent_ops(drive: Drive) -> None:
    """Steps are 1, 2, 3 over ops, whatever plans were empty in between."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 2)
    driver.step()
    driver.retract("A")
    driver.step()
    driver.step()
    assert driver.op.step == driver.scheduler.last_step == 2


def test_rows_and_stats_are_snapshots(drive: Drive) -> None:
    """Rows are named with their request and a copy of their pages; the three counts add up."""
    driver = drive()
    request = driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.step()
    driver.step()
    rows = driver.scheduler.rows()
    assert {row: (holder, pages.tolist()) for row, (holder, pages) in rows.items()} == {1: (request, [1, 2])}
    rows[1][1][:] = 99
    assert driver.rows == {"A": [1, 2]}
    assert driver.stats == PoolStats(free=14, cached=1, private=1)
