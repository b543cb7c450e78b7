"""Planner, for retracted requests: their turn before the submitted ones, and how a resume goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.states import State

Drive = Callable[..., Any]


# Retracted requests


def test_retracted_go_before_submitted_whatever_their_priority(drive: Drive) -> None:
    """A resume of priority 9 is admitted ahead of a first chunk of priority -9."""
    driver = drive()
    driver.submit("keeps running", [1], 9)
    driver.submit("retracted", [2], 9, priority=9)
    driver.step()
    driver.retract("retracted")
    driver.submit("submitted", [3], 9, priority=-9)
    assert list(driver.step()) == ["keeps running"]
    assert [(name, row.cause) for name, row in driver.step().items()] == [
        ("retracted", "resume"),
        ("submitted", "first_chunk"),
        ("keeps running", "decode"),
    ]


def test_retracted_head_that_does_not_fit_holds_back_submitted_ones(drive: Drive) -> None:
    """Order is strict across both kinds: a small newcomer does not overtake a large resume."""
    driver = drive(num_pages=6, prefix_cache=False)
    driver.submit("A", [1] * 4, 9)
    driver.submit("B", [2] * 12, 2)
    driver.step()
    driver.retract("B")
    driver.submit("small", [3])
    driver.step()
    assert driver.free == [3, 2, 5, 6]
    assert list(driver.step()) == ["A"], "B needs 4 pages and one for A"
    driver.abort("B")
    assert list(driver.step()) == ["small", "A"]


def test_request_retracted_before_a_step_resumes_in_the_next(drive: Drive) -> None:
    """A row that is lost in one step comes back in the following one at the earliest, whoever took it."""
    driver = drive()
    driver.submit("A", [1, 2, 3], 3)
    driver.step()
    driver.retract("A")
    assert driver.step() == {}
    assert driver.step()["A"].cause == "resume"


def test_just_retracted_head_lets_others_pass_when_nothing_else_could_run(drive: Drive) -> None:
    """A step that would be empty is given to who waits behind it; the resume comes a step later."""
    driver = drive()
    driver.submit("retracted", [1, 2, 3], 3)
    driver.step()
    driver.retract("retracted")
    driver.submit("submitted", [4, 5], 2)
    assert [(name, row.cause) for name, row in driver.step().items()] == [("submitted", "first_chunk")]
    assert [(name, row.cause) for name, row in driver.step().items()] == [
        ("retracted", "resume"),
        ("submitted", "prefill_done_to_decode"),
    ]


def test_just_retracted_head_does_not_let_others_pass_while_results_are_due(drive: Drive) -> None:
    """With an op in flight an empty step is no reason to overtake."""
    driver = drive(overlap_depth=1, mixed=False)
    driver.submit("retracted", [1, 2, 3], 3)
    driver.plan()
    driver.complete()
    driver.submit("in flight", [7])
    assert list(driver.plan()) == ["in flight"]
    driver.retract("retracted")
    driver.submit("behind", [4])
    assert driver.plan() == {}
    assert list(driver.plan()) == ["retracted", "behind"]
    driver.run()


def test_retracted_head_with_an_outstanding_step_is_passed_over(drive: Drive) -> None:
    """It waits for its own result and blocks nobody meanwhile."""
    driver = drive(overlap_depth=1)
    driver.submit("A", [1, 2, 3], 4)
    driver.plan()
    driver.retract("A")
    driver.submit("B", [4, 5, 6], 4)
    assert list(driver.plan()) == ["B"]
    driver.complete()
    assert driver.outputs["A"] == [20]
    assert list(driver.plan()) == ["A", "B"]
    driver.run()


def test_retracted_head_with_an_outstanding_chunk_is_passed_over(drive: Drive) -> None:
    """A chunk that samples nothing is outstanding as well."""
    driver = drive(overlap_depth=1, chunk_size=4)
    driver.submit("A", range(1, 8), 4)
    driver.plan()
    driver.retract("A")
    driver.submit("B", [4, 5, 6], 4)
    assert list(driver.plan()) == ["B"]
    driver.complete()
    assert driver.outputs["A"] == []
    planned = driver.plan()
    assert (planned["A"].cause, planned["A"].num_computed, planned["A"].input_len) == ("resume", 4, 3)
    driver.run()


# Resumes


def test_whole_resume_decodes_next(drive: Drive) -> None:
    """A resume that computes all that is missing samples, and goes on with plain decodes."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4, 5], 5)
    driver.step()
    driver.retract("A")
    driver.step()
    resume = driver.step()["A"]
    assert (resume.cause, resume.num_computed, resume.input_len, resume.sample) == ("resume", 4, 2, True)
    assert driver.requests["A"].state is State.DECODING
    assert driver.step()["A"].cause == "decode"


@pytest.mark.parametrize(("chunk_size", "token_budget"), [(3, 64), (64, 3)])
def test_resume_beyond_a_chunk_prefills_on(drive: Drive, chunk_size: int, token_budget: int) -> None:
    """A missing suffix longer than a chunk, or than the budget, goes through Prefilling and PrefillDone again."""
    driver = drive(prefix_cache=False, chunk_size=chunk_size, token_budget=token_budget)
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 4)
    for _ in range(3):
        driver.step()
    assert driver.outputs["A"] == [168]
    driver.retract("A")
    driver.step()
    rows = [driver.step()["A"] for _ in range(5)]
    assert [(row.cause, row.num_computed, row.input_len, row.sample) for row in rows] == [
        ("resume", 0, 3, False),
        ("continuation", 3, 3, False),
        ("continuation", 6, 2, True),
        ("prefill_done_to_decode", 8, 1, True),
        ("decode", 9, 1, True),
    ]
    assert driver.finish == {"A": "length"}


def test_resume_without_prefix_cache_computes_everything(drive: Drive) -> None:
    """With the cache off nothing is published at retraction and nothing matched at resume."""
    driver = drive(page_size=2, prefix_cache=False)
    driver.submit("A", [1, 2, 3, 4, 5], 5)
    driver.step()
    driver.retract("A")
    assert (driver.tree, driver.stats.free) == (set(), 16)
    driver.step()
    assert driver.step()["A"].num_computed == 0
    driver.run()
    assert driver.tree == set()
