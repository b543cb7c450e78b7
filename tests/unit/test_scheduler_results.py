"""Scheduler: what is taken as a result, in what order, and what a row's status does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import UnexpectedResultError
from scheduler_service.core.ops import RowStatus, StepResult

Drive = Callable[..., Any]


def _result(step: int, tokens: list[int], status: list[int] | None = None, session_no: int = 1) -> StepResult:
    row_status = None if status is None else np.array(status, dtype=np.uint8)
    return StepResult(session_no, step, np.array(tokens, dtype=np.int32), row_status)


@pytest.mark.parametrize(
    "result",
    [
        _result(2, [5, 5]),
        _result(0, [5, 5]),
        _result(1, [5, 5], session_no=2),
        _result(1, [5]),
        _result(1, [5, 5, 5]),
        _result(1, []),
        _result(1, [5, -1]),
        _result(1, [997, 5]),
        _result(1, [-2, 5]),
        _result(1, [5, 997], [0, 0]),
        _result(1, [997, 5], [0, 1]),
        _result(1, [5, 5], [0, 0, 1]),
        _result(1, [5, 5], [1]),
        _result(1, [5, 5], []),
    ],
    ids=[
        "later step",
        "earlier step",
        "other session",
        "too few rows",
        "too many rows",
        "no rows",
        "no token",
        "out of the vocabulary",
        "negative",
        "out of the vocabulary with status",
        "out of the vocabulary beside a bad row",
        "too many statuses",
        "too few statuses",
        "no statuses",
    ],
)
def test_wrong_result_changes_nothing(drive: Drive, result: StepResult) -> None:
    """A result that does not answer the oldest op raises, and the right one is taken afterwards."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 2)
    driver.submit("B", [1, 2, 4], 2)
    driver.plan()
    before = driver.state()
    with pytest.raises(UnexpectedResultError):
        driver.scheduler.complete(result)
    assert driver.state() == before
    assert driver.scheduler.take_outputs().tokens == []
    driver.run()
    assert {name: len(output) for name, output in driver.outputs.items()} == {"A": 2, "B": 2}


def test_result_without_an_op_in_flight_is_refused(drive: Drive) -> None:
    """Nothing is awaited before the first op, and nothing after its result: a repeat is refused."""
    scheduler = drive().scheduler
    with pytest.raises(UnexpectedResultError, match="nothing is awaited"):
        scheduler.complete(_result(1, []))
    scheduler.submit("A", [1], max_tokens=3)
    scheduler.plan()
    scheduler.complete(_result(1, [5]))
    with pytest.raises(UnexpectedResultError, match="nothing is awaited"):
        scheduler.complete(_result(1, [5]))
    assert scheduler.take_outputs().tokens == [5]


def test_results_must_come_in_order(drive: Drive) -> None:
    """With two ops in flight the younger one's result is refused until the older one's is in."""
    scheduler = drive(overlap_depth=1).scheduler
    scheduler.submit("A", [1], max_tokens=3)
    scheduler.plan()
    scheduler.plan()
    with pytest.raises(UnexpectedResultError, match="step 1 of session 1 with 1 rows is awaited"):
        scheduler.complete(_result(2, [6]))
    scheduler.complete(_result(1, [5]))
    scheduler.complete(_result(2, [6]))
    assert scheduler.take_outputs().tokens == [5, 6]


def test_token_of_a_chunk_that_samples_nothing_is_ignored(drive: Drive) -> None:
    """A row whose op wanted no token may carry -1 or anything else in its place."""
    scheduler = drive(chunk_size=2).scheduler
    request = scheduler.submit("A", [1, 2, 3, 4, 5], max_tokens=1)
    for step, token in ((1, -1), (2, 5000)):
        scheduler.plan()
        scheduler.complete(_result(step, [token]))
    assert request.num_output == 0
    scheduler.plan()
    scheduler.complete(_result(3, [7]))
    assert request.output == [7]


@pytest.mark.parametrize("chunk_size", [2, 64])
def test_non_finite_logits_end_one_request(drive: Drive, chunk_size: int) -> None:
    """The bad row's request ends as failed without a token and publishes nothing; the others go on."""
    driver = drive(chunk_size=chunk_size)
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.submit("B", [6, 7, 8, 9, 5], 3)
    driver.plan()
    result = driver.results[0]
    result.row_status = np.array([RowStatus.NON_FINITE, RowStatus.OK], dtype=np.uint8)
    driver.complete()
    assert (driver.finish, driver.outputs["A"]) == ({"A": "failed"}, [])
    assert "not finite" in driver.requests["A"].finish_detail
    assert (driver.tree, list(driver.rows)) == (set(), ["B"])
    driver.run()
    assert driver.finish == {"A": "failed", "B": "length"}
    assert len(driver.outputs["B"]) == 3


def test_clamped_row_ends_with_length(drive: Drive) -> None:
    """A row that reached the mirror's width gets no token and ends; its full stored pages are published."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5], 3)
    driver.plan()
    driver.results[0].row_status = np.array([RowStatus.CLAMPED], dtype=np.uint8)
    driver.complete()
    assert (driver.finish, driver.outputs["A"]) == ({"A": "length"}, [])
    assert "width of 16 pages" in driver.requests["A"].finish_detail
    assert driver.stats.private == 0


def test_clamped_chunk_ends_with_length(drive: Drive) -> None:
    """The same in the middle of a prompt: no page that was not computed is published."""
    driver = drive(chunk_size=4)
    driver.submit("A", range(1, 11), 3)
    driver.plan()
    driver.results[0].row_status = np.array([RowStatus.CLAMPED], dtype=np.uint8)
    driver.complete()
    assert driver.finish == {"A": "length"}
    assert driver.stats.private == 0
    assert driver.stats.cached <= 1


def test_take_outputs_hands_over_once(drive: Drive) -> None:
    """Tokens and ends since the last call come as parallel lists in the order of acceptance, and then no more."""
    scheduler = drive().scheduler
    first = scheduler.submit("A", [1], max_tokens=1)
    second = scheduler.submit("B", [2], max_tokens=2)
    scheduler.plan()
    scheduler.complete(_result(1, [5, 6]))
    scheduler.plan()
    scheduler.complete(_result(2, [7]))
    outputs = scheduler.take_outputs()
    assert outputs.columns == ([first, second, second], [5, 6, 7])
    assert outputs.finished == [first, second]
    empty = scheduler.take_outputs()
    assert (empty.requests, empty.tokens, empty.finished) == ([], [], [])
