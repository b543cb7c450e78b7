"""Planner, for requests that wait: order, what fits, what the cache gives. Resumes are in test_resumes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


# What the cache gives


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
