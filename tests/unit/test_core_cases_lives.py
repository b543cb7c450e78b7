"""Public bug reports as small scenarios: lives of requests. Each docstring names the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import DuplicateRequestError, QueueFullError
from scheduler_service.core.states import State

Drive = Callable[..., Any]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])
_A, _B = [20, 104, 629, 421, 384, 473], [38, 194, 172, 213, 714, 452]


# K4: lives of requests


@pytest.mark.parametrize(
    ("moment", "cached"), [("queued", 0), ("chunk 1 in flight", 4), ("between chunks", 4), ("last chunk in flight", 4)]
)
def test_b23_abort_between_chunks(drive: Drive, moment: str, cached: int) -> None:
    """sgl-project/sglang-jax#984, sglang#1858: wherever its prompt stands, the request ends once and leaves nothing behind."""
    driver = drive(page_size=2, num_pages=8, chunk_size=4, overlap_depth=1)
    driver.submit("A", range(1, 11), 3)
    if moment != "queued":
        driver.plan()
    if moment in {"between chunks", "last chunk in flight"}:
        driver.complete()
    if moment == "last chunk in flight":
        driver.plan()
        driver.complete()
        driver.plan()
    driver.abort("A")
    assert driver.plan() == {}
    while driver.results:
        driver.complete()
    assert (driver.finish, driver.outputs["A"]) == ({"A": "abort"}, [])
    driver.expect_clean(8)
    driver.submit("next", [1, 2, 3, 4, 5])
    driver.run()
    assert (driver.outputs["next"], driver.requests["next"].cached_tokens) == ([70], cached)


def test_b24_abort_while_retracted(drive: Drive) -> None:
    """sgl-project/sglang#18701, #18705: a parked request is found by its abort, fifty times over, and no map grows."""
    driver = drive(page_size=2, num_pages=5)
    for _ in range(50):
        driver.submit("A", [1, 2, 3], 6, prefix_cache=False)
        driver.submit("B", [4, 5, 6], 6, prefix_cache=False)
        while driver.requests["B"].state is not State.RETRACTED:
            driver.step()
        driver.abort("B")
        assert driver.finish == {"B": "abort"}
        assert len(driver.outputs["B"]) == 2
        driver.run()
        assert driver.outputs["A"] == _A
        driver.expect_clean(5)
    assert len(driver.scheduler._waiting._heap) == 0


def test_b25_pages_recycled_while_an_op_is_in_flight(drive: Drive) -> None:
    """sgl-project/mini-sglang#111, sglang#35049, tokenspeed#864, vllm-ascend#14055: released once, reused in stream order."""
    driver = drive(page_size=2, num_pages=4, prefix_cache=False, overlap_depth=2)
    driver.submit("A", [1, 2, 3], 4)
    driver.plan()
    driver.abort("A")
    assert (driver.free, driver.scheduler.placement.rows.free_rows().count(1)) == ([2, 1, 3, 4], 1)
    driver.submit("C", [9, 9, 9], 2)
    driver.submit("D", [8, 8, 8], 2)
    assert {name: row.pages for name, row in driver.plan().items()} == {"C": [2, 1]}
    driver.complete()
    assert (driver.free, driver.outputs["A"]) == ([3, 4], [])
    driver.run()
    assert driver.finish == {"A": "abort", "C": "length", "D": "length"}
    driver.expect_clean(4)


def test_b26_victim_that_was_chosen_in_the_same_step(drive: Drive) -> None:
    """vllm-project/vllm#23347, #21594: A needs no page and is in the step, until B takes A's pages: A's place is void."""
    driver = drive(page_size=2, num_pages=6, prefix_cache=False)
    driver.submit("A", [1, 2], 8, priority=1)
    driver.submit("B", [3, 4, 5], 8)
    for _ in range(4):
        driver.step()
    assert (driver.rows, driver.free) == ({"B": [1, 2, 5], "A": [3, 4, 6]}, [])
    planned = driver.step()
    assert list(planned) == ["B"]
    assert planned["B"].pages == [1, 2, 5, 6]
    assert driver.requests["A"].state is State.RETRACTED
    driver.run()


@_DEPTHS
def test_b27_duplicate_live_id(drive: Drive, overlap_depth: int) -> None:
    """vllm-project/vllm#10583, #15041: the second is refused, the first is not disturbed, and the id is free afterwards."""
    driver = drive(overlap_depth=overlap_depth)
    driver.submit("r1", [1, 2, 3], 6)
    driver.step()
    with pytest.raises(DuplicateRequestError) as caught:
        driver.submit("r1", [4, 5, 6], 6)
    assert caught.value.code == "ALREADY_EXISTS"
    driver.run()
    assert driver.outputs["r1"] == _A
    driver.submit("r1", [4, 5, 6], 6)
    driver.run()
    assert driver.outputs["r1"] == _B


@_DEPTHS
def test_b28_abort_of_the_old_life(drive: Drive, overlap_depth: int) -> None:
    """vllm-project/vllm#23697, #24382: an id aborted and used again at once belongs to its new life alone."""
    driver = drive(overlap_depth=overlap_depth)
    for round_no in range(50):
        driver.submit("r1", [1, 2, 3], 6)
        for _ in range(min(round_no % 3, overlap_depth + 1 - len(driver.results))):
            driver.plan()
        driver.abort("r1")
    driver.submit("r1", [4, 5, 6], 6)
    driver.run()
    assert driver.outputs["r1"] == _B
    driver.expect_clean(16)


def test_b29_cancel_after_the_last_chunk_was_sent(drive: Drive) -> None:
    """sgl-project/sglang#34112: no token after the cancel, and no placeholder in a later op."""
    driver = drive(page_size=2, chunk_size=4, overlap_depth=1)
    for name in ("one", "two", "three"):
        driver.submit(name, [ord(name[0]), 2, 3, 4, 5, 6], 4)
    driver.plan()
    driver.plan()
    driver.abort("three")
    ids = []
    while driver.scheduler.has_work:
        driver.step()
        ids += driver.op.input_ids.tolist() if driver.op is not None else []
    assert all(0 <= token < 997 for token in ids)
    assert (driver.outputs["three"], driver.finish["three"]) == ([], "abort")
    assert {name: len(driver.outputs[name]) for name in ("one", "two")} == {"one": 4, "two": 4}


def test_b30_queue_limit_is_not_for_retracted_requests(drive: Drive) -> None:
    """sgl-project/sglang#37260: A keeps its life when it is retracted, E is refused, and A resumes before C."""
    driver = drive(max_rows=2, max_waiting=2)
    for name in "AB":
        driver.submit(name, [1, 2, 3], 5)
    driver.step()
    for name in "CD":
        driver.submit(name, [4, 5, 6], 2)
    driver.retract("A")
    assert driver.scheduler.num_waiting + driver.scheduler.num_retracted == 3
    with pytest.raises(QueueFullError):
        driver.submit("E", [1], 1)
    assert list(driver.step()) == ["B"]
    assert list(driver.step()) == ["A", "B"]
    driver.run()
    assert set(driver.finish) == set("ABCD")
    assert driver.outputs["A"] == _A[:5]


def test_b31_limit_reached_when_the_next_step_is_planned(drive: Drive) -> None:
    """sgl-project/sglang#18301, #18165: a request whose last token is on its way is neither retracted nor run once more."""
    driver = drive(page_size=1, num_pages=6, overlap_depth=1)
    driver.submit("B", [9], 4)
    driver.submit("A", [1, 2, 3], 2)
    driver.plan()
    driver.plan()
    driver.complete()
    assert driver.free == []
    assert driver.plan() == {}, "B needs a page, and A is no victim"
    driver.complete()
    assert (driver.outputs["A"], driver.finish) == ([20, 104], {"A": "length"})
    assert driver.requests["A"].num_retractions == 0
    driver.run()
    driver.expect_clean(6)
