"""Planner, for requests without a row: order, what fits, retracted before submitted, resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.states import State

Drive = Callable[..., Any]


# Order


def test_smaller_priority_first_then_arrival(drive: Drive) -> None:
    """Requests that wait are admitted by priority, ties by arrival."""
    driver = drive()
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        driver.submit(name, [1, 2], priority=priority)
    assert list(driver.step()) == ["c", "b", "d", "a"]


def test_head_that_does_not_fit_holds_back_the_queue(drive: Drive) -> None:
    """Nobody behind it is admitted, however small; nothing is changed by the attempt."""
    driver = drive(num_pages=4)
    driver.submit("running", [1, 2, 3, 4, 5], 8)
    driver.step()
    driver.submit("large", range(10, 19))
    driver.submit("small", [7])
    assert list(driver.step()) == ["running"]
    assert [driver.requests[name].state for name in ("large", "small")] == [State.SUBMITTED] * 2
    assert driver.free == [3, 4]
    driver.abort("large")
    assert list(driver.step()) == ["small", "running"]


def test_more_urgent_request_becomes_the_head(drive: Drive) -> None:
    """A head that does not fit gives way to one that comes later and goes first."""
    driver = drive(num_pages=4)
    driver.submit("running", [1, 2, 3, 4, 5], 8)
    driver.step()
    driver.submit("large", range(10, 19))
    driver.step()
    driver.submit("urgent", [7], priority=-1)
    assert list(driver.step()) == ["urgent", "running"]


def test_rows_bound_admission(drive: Drive) -> None:
    """With every row in use the queue waits, and a row that is given back is used in the next step."""
    driver = drive(max_rows=2)
    driver.submit("A", [1])
    for name in "BCD":
        driver.submit(name, [2], 3)
    assert list(driver.step()) == ["A", "B"]
    assert list(driver.step()) == ["C", "B"]
    assert list(driver.step()) == ["B", "C"]
    assert list(driver.step()) == ["D", "C"]


# What fits


def test_watermark_is_a_page_for_each_running_row(drive: Drive) -> None:
    """B's two pages and one for A are three, which are there; with one token more in A they are not."""
    for prompt_len, admitted in ((4, ["A", "B"]), (5, ["A"])):
        driver = drive(num_pages=4)
        driver.submit("A", [1] * prompt_len, 2)
        driver.submit("B", [2] * 5, 2)
        assert list(driver.step()) == admitted


def test_watermark_counts_rows_admitted_in_the_same_step(drive: Drive) -> None:
    """Each admission raises the bar for the next: 1, then 1 + 1, then 1 + 2 pages."""
    for num_pages, admitted in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        driver = drive(num_pages=num_pages)
        for name in "ABC":
            driver.submit(name, [1], 2)
        assert len(driver.step()) == admitted


def test_no_watermark_when_nothing_runs(drive: Drive) -> None:
    """A request that needs the whole pool gets it when it is alone."""
    driver = drive(num_pages=4)
    driver.submit("A", [1] * 16)
    assert list(driver.step()) == ["A"]


def test_fit_counts_all_known_tokens_not_the_chunk(drive: Drive) -> None:
    """A prompt enters only when there are pages for all of it, though its first chunk takes one."""
    driver = drive(num_pages=4, chunk_size=4)
    driver.submit("running", [1], 9)
    driver.step()
    driver.submit("large", [2] * 9)
    assert list(driver.step()) == ["running"]
    driver.abort("large")
    driver.submit("fits", [2] * 8)
    planned = driver.step()
    assert list(planned) == ["fits", "running"]
    assert len(planned["fits"].pages) == 1


def test_cached_pages_count_as_available(drive: Drive) -> None:
    """Pages nobody uses are evicted for an admission, as many as are missing."""
    driver = drive(page_size=2, num_pages=4)
    driver.submit("old", [1, 2, 3, 4, 5, 6, 7])
    driver.run()
    assert (driver.free, driver.tree) == ([4], {1, 2, 3})
    driver.submit("new", [8, 8, 8, 8, 8], 2)
    assert driver.step()["new"].pages == [3, 2, 4]
    assert driver.tree == {1}


def test_matched_pages_count_neither_as_needed_nor_as_evictable(drive: Drive) -> None:
    """Two matched and two more pages with one for the running row are three: free 1 and evictable 2 - 2 do not hold them."""
    for num_pages, admitted in ((6, ["Z"]), (7, ["Z"]), (8, ["A", "Z"])):
        driver = drive(page_size=2, num_pages=num_pages)
        driver.submit("old", [1, 2, 3, 4, 5])
        driver.run()
        driver.submit("Z", [11] * 5, 2)
        driver.step()
        driver.submit("A", [1, 2, 3, 4, 5, 6, 7])
        assert len(driver.free) == num_pages - 5
        assert list(driver.step()) == admitted, num_pages


def test_refused_admission_changes_nothing(drive: Drive) -> None:
    """Trying again and again leaves locks, pages, rows and queues as they were."""
    driver = drive(page_size=2, num_pages=4, overlap_depth=1)
    driver.submit("old", [1, 2, 3])
    driver.run()
    driver.submit("Z", [11, 12, 13], 2)
    driver.plan()
    driver.plan()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7])
    before = driver.state()
    for _ in range(10):
        assert driver.plan() == {}
    assert driver.state() == before


def test_head_is_tried_again_when_pages_come_back(drive: Drive) -> None:
    """A refusal is remembered only as long as nothing has changed."""
    driver = drive(num_pages=4)
    driver.submit("running", [1, 2, 3, 4, 5], 8)
    driver.step()
    driver.submit("large", range(10, 26))
    for _ in range(3):
        assert list(driver.step()) == ["running"]
    driver.abort("running")
    assert list(driver.step()) == ["large"]


def test_no_match_of_pages_written_in_the_same_step(drive: Drive) -> None:
    """Twins that are admitted together compute the same tokens into pages of their own."""
    driver = drive()
    for name in "AB":
        driver.submit(name, range(1, 11))
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2, 3], [4, 5, 6])
    assert [driver.requests[name].cached_tokens for name in "AB"] == [0, 0]


def test_match_of_pages_sent_but_not_acknowledged(drive: Drive) -> None:
    """A page written by an op that was sent in an earlier step can be matched: whoever reads it comes later in the stream."""
    driver = drive(page_size=2, chunk_size=4, overlap_depth=2)
    driver.submit("A", range(1, 10), 2)
    driver.plan()
    driver.plan()
    driver.submit("B", range(1, 10), 2)
    assert driver.scheduler.num_in_flight == 2
    planned = driver.plan()
    assert (planned["A"].pages, planned["A"].input_len) == ([1, 2, 3, 4, 5], 1)
    assert (planned["B"].pages, planned["B"].num_computed) == ([1, 2, 3, 4, 6], 8)
    assert driver.requests["B"].cached_tokens == 8
    driver.run()
    assert driver.outputs["A"] == driver.outputs["B"]


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


def test_prefix_cache_off_neither_matches_nor_publishes(drive: Drive) -> None:
    """Equal prompts share nothing, at once or one after the other."""
    driver = drive(page_size=2, prefix_cache=False)
    for name in "AB":
        driver.submit(name, [1, 2, 3, 4, 5], 3)
    driver.run()
    driver.submit("C", [1, 2, 3, 4, 5], 3)
    driver.run()
    assert [driver.requests[name].cached_tokens for name in "ABC"] == [0, 0, 0]
    assert driver.tree == set()


def test_cached_tokens_count_the_first_admission_only(drive: Drive) -> None:
    """What a resume finds of the request's own pages is no hit."""
    driver = drive(page_size=2)
    driver.submit("A", [1, 2, 3, 4, 5], 5)
    driver.step()
    driver.retract("A")
    driver.step()
    assert driver.step()["A"].num_computed == 4
    assert driver.requests["A"].cached_tokens == 0
