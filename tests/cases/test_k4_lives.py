"""B23 to B31: races in a request's life.

Admission keeps one page in hand for every row in use (docs/policy.md), so of two requests that just fill the pool it admits
one. Where a report's pool is that small, the case says what happens in it, and then goes through the report in a pool with one
page more, which is the smallest that both are admitted to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_driver import alone
from scheduler_service.core.errors import DuplicateRequestError, QueueFullError
from scheduler_service.core.states import State

Drive = Callable[..., Any]

A_TOKENS, B_TOKENS = [20, 104, 629, 421, 384, 473], [38, 194, 172, 213, 714, 452]
"""What [1,2,3] and [4,5,6] return."""


def test_b23_abort_between_chunks(drive: Drive) -> None:
    """sgl-project/sglang-jax#984, sglang#1858: wherever its prompt stands, the request ends once and leaves nothing behind."""
    # moment -> plans and results before the abort, and what the follow-up finds cached
    moments = {"queued": ("", 0), "chunk 1 in flight": ("p", 4), "between": ("pc", 4), "last chunk in flight": ("pcpcp", 4)}
    for moment, (calls, cached) in moments.items():
        driver = drive(page_size=2, num_pages=8, chunk_size=4, overlap_depth=1)
        driver.submit("A", range(1, 11), 3)
        for call in calls:
            driver.plan() if call == "p" else driver.complete()
        driver.abort("A")
        assert driver.finish == {"A": "abort"}
        assert driver.plan() == {}, moment
        while driver.results:
            driver.complete()
        assert (driver.finish, driver.outputs["A"]) == ({"A": "abort"}, [])
        driver.expect_clean(8)
        driver.submit("next", [1, 2, 3, 4, 5])
        driver.run()
        assert (driver.outputs["next"], driver.requests["next"].cached_tokens) == ([70], cached)


def test_b24_abort_while_retracted(drive: Drive) -> None:
    """sgl-project/sglang#18701, #18705: a parked request is found by its abort, fifty times over, and no map grows."""
    # In four pages B (two pages and one in hand for A) is not admitted beside A, so it cannot be retracted; abort finds it.
    driver = drive(page_size=2, num_pages=4)
    driver.submit("A", [1, 2, 3], 6)
    driver.submit("B", [4, 5, 6], 6)
    for _ in range(3):
        assert list(driver.step()) == ["A"]
    driver.abort("B")
    driver.run()
    assert (driver.outputs, driver.finish["B"]) == ({"A": A_TOKENS, "B": []}, "abort")
    # In five B is admitted, and retracted when A needs its third page.
    for prefix_cache in (True, False):
        driver = drive(page_size=2, num_pages=5, prefix_cache=prefix_cache)
        for _ in range(50 if prefix_cache else 10):
            driver.submit("A", [1, 2, 3], 6)
            driver.submit("B", [4, 5, 6], 6)
            while driver.requests["B"].state is not State.RETRACTED:
                driver.step()
            driver.abort("B")
            assert (driver.finish, driver.outputs["B"]) == ({"B": "abort"}, B_TOKENS[:2])
            assert list(driver.step()) == ["A"]
            driver.run()
            assert driver.outputs["A"] == A_TOKENS
            driver.expect_clean(5)
        assert (len(driver.scheduler._waiting._heap), driver.scheduler.num_retracted) == (0, 0)


def test_b25_pages_recycled_while_an_op_is_in_flight(drive: Drive) -> None:
    """sgl-project/mini-sglang#111, sglang#35049, tokenspeed#864, vllm-ascend#14055: released once, reused in stream order."""
    # Pages go back at once, and C gets them: its op is applied after the one in flight has run. D waits for pages alone.
    for how in ("abort", "retract", "stop"):
        driver = drive(page_size=2, num_pages=4, prefix_cache=False, overlap_depth=2)
        stop_ids = [20] if how == "stop" else []  # its first token
        driver.submit("A", [1, 2, 3], 4, stop_ids=stop_ids)
        assert driver.plan()["A"].pages == [1, 2]
        if how == "stop":  # one more op with A in it is in flight when the first result ends it
            assert driver.plan()["A"].pages == [1, 2]
            driver.complete()
            assert driver.finish == {"A": "stop"}
        else:
            getattr(driver, how)("A")
        rows = driver.scheduler.placement.rows
        assert (driver.free, rows.free_rows().count(1), rows.num_free) == ([2, 1, 3, 4], 1, 8)
        driver.submit("C", [9, 9, 9], 2, priority=-1)
        driver.submit("D", [8, 8, 8], 2)
        assert {name: row.pages for name, row in driver.plan().items()} == {"C": [2, 1]}
        driver.complete()
        assert (driver.free, rows.free_rows().count(1)) == ([3, 4], 0)
        driver.run()
        expected = {"abort": [], "retract": A_TOKENS[:4], "stop": [20]}[how]
        assert driver.outputs == {"A": expected, "C": alone([9, 9, 9], 2), "D": alone([8, 8, 8], 2)}
        driver.expect_clean(4)


def test_b26_victim_that_was_chosen_in_the_same_step(drive: Drive) -> None:
    """vllm-project/vllm#23347, #21594: A is in the step until B takes its page; then its place and token are given back."""
    # The prompts are shorter than the report's, so that both are admitted; then the rows are the report's.
    driver = drive(page_size=2, num_pages=4, prefix_cache=False)
    driver.submit("B", [3, 4], 5)
    driver.submit("A", [1], 5, priority=1)
    for _ in range(3):
        driver.step()
    assert (driver.rows, driver.free) == ({"B": [1, 3], "A": [2, 4]}, [])
    computed = driver.scheduler.placement.rows.num_computed
    assert computed[[1, 2]].tolist() == [4, 3]
    assert {name: row.pages for name, row in driver.step().items()} == {"B": [1, 3, 4]}
    assert driver.requests["A"].state is State.RETRACTED
    driver.run()
    assert driver.outputs == {"A": alone([1], 5), "B": alone([3, 4], 5)}
    # With a budget of two tokens, B and A have used it up. The token that A gives back goes to P, in the middle of its prompt.
    driver = drive(page_size=2, num_pages=6, prefix_cache=False, chunk_size=1)
    driver.submit("B", [3], 8)
    driver.submit("P", [5] * 6, 2, priority=1)
    driver.submit("A", [1], 8, priority=2)
    for _ in range(4):
        assert set(driver.step()) == {"A", "B", "P"}
    driver.scheduler.set_token_budget(2)
    planned = driver.step()
    assert {name: (row.input_len, len(row.pages)) for name, row in planned.items()} == {"B": (1, 3), "P": (1, 3)}
    assert not set(planned["B"].pages) & set(planned["P"].pages)
    assert driver.requests["A"].state is State.RETRACTED
    driver.run()
    assert driver.outputs == {"A": alone([1], 8), "B": alone([3], 8), "P": alone([5] * 6, 2)}


def test_b27_duplicate_live_id(drive: Drive) -> None:
    """vllm-project/vllm#10583, #15041: the second is refused, the first is not disturbed, and the id is free afterwards."""
    for overlap_depth in (0, 1, 2):
        driver = drive(overlap_depth=overlap_depth)
        driver.submit("r1", [1, 2, 3], 6)
        driver.step()
        before = driver.state()
        with pytest.raises(DuplicateRequestError) as caught:
            driver.submit("r1", [4, 5, 6], 6)
        assert (caught.value.code, driver.state()) == ("ALREADY_EXISTS", before)
        driver.run()
        assert driver.outputs["r1"] == A_TOKENS
        driver.submit("r1", [4, 5, 6], 6)
        driver.run()
        assert (driver.outputs["r1"], driver.requests["r1"].cached_tokens) == (B_TOKENS, 0)


def test_b28_abort_of_the_old_life(drive: Drive) -> None:
    """vllm-project/vllm#23697, #24382: an id aborted and used again at once belongs to its new life alone."""
    # An abort ends the request before it returns, so the id is free at once; a result in flight knows its request, not its id.
    for overlap_depth, num_rounds in ((0, 100), (1, 100), (2, 800)):
        driver = drive(overlap_depth=overlap_depth)
        for round_no in range(num_rounds):
            driver.submit("r1", [1, 2, 3], 6)
            for _ in range(round_no % 4):
                driver.plan() if len(driver.results) <= overlap_depth else driver.complete()
            driver.abort("r1")
            assert driver.finish == {"r1": "abort"}
        driver.submit("r1", [4, 5, 6], 6)
        driver.run()
        assert (driver.outputs["r1"], driver.finish["r1"]) == (B_TOKENS, "length")
        driver.expect_clean(16)


def test_b29_cancel_after_the_last_chunk_was_sent(drive: Drive) -> None:
    """sgl-project/sglang#34112: no token after the cancel, and no placeholder in a later op."""
    driver = drive(page_size=2, chunk_size=4, overlap_depth=1)
    names = ("one", "two", "three")
    for first, name in enumerate(names):
        driver.submit(name, [first, 2, 3, 4, 5, 6], 4)
    for _ in range(2):
        planned = driver.plan()
        assert tuple(planned) == names
    assert planned["three"].sample, "the last chunk of its prompt is in flight"
    driver.abort("three")
    ids, later = [], set()
    while driver.scheduler.has_work:
        later |= set(driver.step())
        ids += driver.op.input_ids.tolist() if driver.op is not None else []
    assert later == {"one", "two"}
    assert all(0 <= token < 997 for token in ids)
    assert (driver.outputs["three"], driver.finish["three"]) == ([], "abort")
    assert [driver.outputs[name] for name in names[:2]] == [alone([first, 2, 3, 4, 5, 6], 4) for first in (0, 1)]


def test_b30_queue_limit_is_not_for_retracted_requests(drive: Drive) -> None:
    """sgl-project/sglang#37260: A keeps its life when it is retracted, E is refused, and A resumes before C."""
    driver = drive(max_rows=2, max_waiting=2)
    for name in "AB":
        driver.submit(name, [1, 2, 3], 5)
    driver.step()
    for name in "CD":
        driver.submit(name, [4, 5, 6], 2)
    driver.retract("A")
    scheduler = driver.scheduler
    assert (scheduler.num_waiting, scheduler.num_retracted) == (2, 1)
    with pytest.raises(QueueFullError) as caught:
        driver.submit("E", [1], 1)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert "E" not in scheduler.requests
    assert list(driver.step()) == ["B"]
    assert list(driver.step()) == ["A", "B"]
    assert (scheduler.num_waiting, scheduler.num_retracted) == (2, 0)
    driver.run()
    assert driver.finish == dict.fromkeys("ABCD", "length")
    assert driver.outputs["A"] == A_TOKENS[:5]


def test_b31_limit_reached_when_the_next_step_is_planned(drive: Drive) -> None:
    """sgl-project/sglang#18301, #18165: a request whose last token is on its way is neither retracted nor run once more."""
    driver = drive(page_size=2, num_pages=5, overlap_depth=1, chunk_size=3)
    driver.submit("B", [9, 8, 7, 6, 5, 4], 3)
    driver.submit("A", [1, 2, 3], 2)
    driver.plan()
    assert set(driver.plan()) == {"A", "B"}  # B's last chunk, and the step that gives A its last token
    driver.complete()
    assert (driver.rows, driver.free) == ({"B": [1, 2, 5], "A": [3, 4]}, [])
    # B's first decode needs a page. A is behind B and would be the victim, but it is as good as over.
    assert driver.plan() == {}
    assert driver.requests["A"].num_retractions == 0
    driver.complete()
    assert (driver.outputs["A"], driver.finish) == ([20, 104], {"A": "length"})
    assert list(driver.plan()) == ["B"]
    while driver.scheduler.has_work:
        assert "A" not in driver.step()
    assert driver.outputs == {"A": [20, 104], "B": alone([9, 8, 7, 6, 5, 4], 3)}
    driver.expect_clean(5)
