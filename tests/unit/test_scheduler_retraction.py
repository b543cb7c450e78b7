"""Scheduler: retractions and the tokens that come after them, at overlap depths 0, 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import NotRunningError
from scheduler_service.core.ops import RowStatus
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])


@pytest.mark.parametrize("state", [State.SUBMITTED, State.RETRACTED])
def test_retract_needs_a_row(drive: Drive, state: State) -> None:
    """Who holds no row cannot lose it: the call raises and changes nothing."""
    driver = drive(page_size=2, chunk_size=2)
    driver.bring(state)
    before = driver.state()
    with pytest.raises(NotRunningError, match=f"is {state} and holds no row"):
        driver.scheduler.retract("A")
    assert driver.state() == before


@pytest.mark.parametrize("state", [State.PREFILLING, State.PREFILL_DONE, State.DECODING])
def test_retract_in_every_state_with_a_row(drive: Drive, definition: Definition, state: State) -> None:
    """A retraction costs steps, no tokens."""
    driver = drive(page_size=2, chunk_size=2)
    driver.bring(state)
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
