"""Public bug reports as small scenarios: lives of requests, and limits. Each docstring names the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from scheduler_service.core.scheduler import PoolStats
from scheduler_service.core.states import State

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])
_A, _B = [20, 104, 629, 421, 384, 473], [38, 194, 172, 213, 714, 452]


def _is_clean(driver: Any, num_pages: int) -> None:
    """Nobody is left, nothing is private or locked, and every page can be granted."""
    scheduler = driver.scheduler
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_retracted, scheduler.num_in_flight) == (0, 0, 0, 0)
    assert (scheduler.requests, driver.stats.private, scheduler.placement.cache.num_locked) == ({}, 0, 0)
    assert scheduler.placement.num_available == num_pages
    assert sorted(scheduler.placement.rows.free_rows()) == list(range(1, driver.config.max_rows + 1))


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
    _is_clean(driver, 8)
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
        _is_clean(driver, 5)
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
    _is_clean(driver, 4)


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
    _is_clean(driver, 16)


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
    _is_clean(driver, 6)


# K5: capacity, progress, edges of the input


def test_b32_request_that_can_never_fit(drive: Drive) -> None:
    """vllm-project/vllm#39734, #1534: refused at submit with both numbers, so it blocks nobody; a long answer is cut."""
    driver = drive(num_pages=4)
    with pytest.raises(PromptTooLongError) as caught:
        driver.submit("A", [1] * 20)
    assert (caught.value.code, caught.value.prompt_len, caught.value.limit) == ("INVALID_ARGUMENT", 20, 16)
    driver.submit("B", [1, 2, 3])
    driver.run()
    for max_tokens, reason in ((4, "capacity"), (1, "length")):
        driver.submit("C", [1] * 16, max_tokens)
        driver.run()
        assert (len(driver.outputs["C"]), driver.finish["C"]) == (1, reason)


@pytest.mark.parametrize(("length", "count"), [(7, 2), (8, 1)])
def test_b33_row_as_wide_as_the_mirror(drive: Drive, length: int, count: int) -> None:
    """vllm-project/vllm#10730: no page beyond the row's width is taken; the request ends with `length` before."""
    driver = drive(max_pages_per_row=2)
    driver.submit("A", [1] * length, 10)
    driver.run()
    assert (len(driver.outputs["A"]), driver.finish) == (count, {"A": "length"})
    with pytest.raises(PromptTooLongError):
        driver.submit("B", [1] * 9, 10)


@_DEPTHS
def test_b34_no_preemption_livelock(drive: Drive, overlap_depth: int) -> None:
    """inference-sim/inference-sim#297, vllm-project/vllm#25538: two requests that each need the whole pool both end."""
    driver = drive(page_size=2, num_pages=4, overlap_depth=overlap_depth)
    driver.submit("A", [1, 2, 3], 6)
    driver.submit("B", [4, 5, 6], 6)
    driver.run(max_steps=12 + 2 * overlap_depth)
    assert (driver.outputs["A"], driver.outputs["B"]) == (_A, _B)
    assert driver.num_ops == 12
    assert [driver.requests[name].num_retractions for name in "AB"] == [0, 0], "the watermark holds B back"


def test_b34_pressure_retracts_once(drive: Drive) -> None:
    """The same where both fit at first: the newest is retracted once, and both outputs are exact."""
    driver = drive(page_size=2, num_pages=6)
    driver.submit("A", [1, 2, 3], 8)
    driver.submit("B", [4, 5, 6], 8)
    driver.run(max_steps=20)
    assert (driver.outputs["A"][:6], driver.outputs["B"][:6]) == (_A, _B)
    assert [driver.requests[name].num_retractions for name in "AB"] == [0, 1]


@pytest.mark.parametrize("prompt", [[], [-1], [997], [2**31 - 1]])
def test_b35_bad_prompts(drive: Drive, prompt: list[int]) -> None:
    """vllm-project/vllm#7632, #7746: the one call fails, the next request returns 20."""
    driver = drive()
    with pytest.raises(InvalidRequestError) as caught:
        driver.submit("A", prompt)
    assert caught.value.code == "INVALID_ARGUMENT"
    driver.submit("A", [1, 2, 3])
    driver.run()
    assert driver.outputs["A"] == [20]


def test_b36_edges_of_max_tokens(drive: Drive) -> None:
    """vllm-project/vllm#6521: 0 and -1 are refused, a huge number is cut by what the pool holds."""
    driver = drive(num_pages=4)
    for max_tokens in (0, -1):
        with pytest.raises(InvalidRequestError):
            driver.submit("A", [1, 2, 3], max_tokens)
    driver.submit("A", [1, 2, 3], 2**31 - 1)
    driver.run()
    assert (len(driver.outputs["A"]), driver.finish) == (14, {"A": "capacity"})


def test_b37_page_boundary_in_decode(drive: Drive) -> None:
    """MinivLLM#85, nano-vllm#71: a page is asked for by the step that stores into it, and the last token needs none."""
    driver = drive(num_pages=1)
    driver.submit("a", [1, 2, 3], 2)
    driver.run()
    assert (driver.finish, driver.num_ops) == ({"a": "length"}, 2)
    driver = drive(num_pages=2)
    driver.submit("b", [1, 2, 3, 4], 2)
    assert [driver.step()["b"].pages for _ in range(2)] == [[1], [1, 2]]
    assert driver.finish == {"b": "length"}
    driver = drive(num_pages=1)
    driver.submit("c", [1, 2, 3, 4], 2)
    driver.run()
    assert (len(driver.outputs["c"]), driver.finish) == (1, {"c": "capacity"})


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6])
def test_b37_pages_by_length(drive: Drive, count: int) -> None:
    """The same for every length up to three pages and a token: ceil((L + k - 1) / page_size) pages at the end, never more."""
    for length in range(1, 14):
        driver = drive()
        driver.submit("A", [1] * length, count)
        most = 0
        while driver.scheduler.has_work:
            most = max(most, *(len(row.pages) for row in driver.step().values()))
        assert most == -(-(length + count - 1) // 4)


@pytest.mark.parametrize(
    ("page_size", "chunk_size", "token_budget", "length"),
    [(64, 32, 64, 129), (3, 4, 64, 8), (4, 64, 3, 10), (4, 1, 64, 9), (1, 3, 64, 10)],
)
def test_b38_chunks_of_any_size(drive: Drive, page_size: int, chunk_size: int, token_budget: int, length: int) -> None:
    """sgl-project/sglang#36344, sglang-jax#1551: every position is computed exactly once, and the request ends."""
    driver = drive(page_size=page_size, num_pages=16, chunk_size=chunk_size, token_budget=token_budget)
    driver.submit("A", range(1, length + 1), 3)
    position = 0
    while driver.scheduler.has_work:
        row = driver.step()["A"]
        assert row.num_computed == position
        assert 1 <= row.input_len <= min(chunk_size, token_budget)
        position += row.input_len
    assert position == length + 2
    assert driver.finish == {"A": "length"}


@pytest.mark.parametrize("max_pages_per_row", [16, 5])
def test_b39_accepted_means_it_completes(drive: Drive, max_pages_per_row: int) -> None:
    """sgl-project/sglang#29249: one limit decides, so what is accepted ends and what cannot end is refused."""
    longest = 4 * min(8, max_pages_per_row)
    for length in range(1, 71):
        driver = drive(num_pages=8, max_pages_per_row=max_pages_per_row)
        try:
            driver.submit("A", [1] * length)
        except RequestError:
            assert length > longest
        else:
            driver.run(max_steps=5)
            assert driver.finish == {"A": "length"}
            assert length <= longest


def test_b40_last_running_request_cannot_grow(drive: Drive) -> None:
    """sgl-project/sglang#15626: A ends by capacity after three tokens, without a retraction, and B runs."""
    driver = drive(page_size=2, num_pages=3)
    driver.submit("A", [1, 2, 3, 4], 8)
    driver.submit("B", [1, 2], 2)
    driver.run()
    assert (len(driver.outputs["A"]), len(driver.outputs["B"])) == (3, 2)
    assert driver.finish == {"A": "capacity", "B": "length"}
    assert driver.requests["A"].num_retractions == 0


def test_b41_more_requests_than_rows_and_queue(drive: Drive, definition: Definition) -> None:
    """sgl-project/sglang#33858, sglang-jax#1400: the surplus is told so at once, everybody else ends."""
    driver = drive(page_size=16, num_pages=32, max_rows=4, max_waiting=4)
    for index in range(4):
        driver.submit(f"r{index}", [index, index + 1], 40)
    driver.step()
    refused = []
    for index in range(4, 9):
        try:
            driver.submit(f"r{index}", [index, index + 1], 40)
        except QueueFullError as error:
            refused.append((error.request_id, error.code))
    assert refused == [("r8", "RESOURCE_EXHAUSTED")]
    driver.run()
    assert driver.finish == {f"r{index}": "length" for index in range(8)}
    assert driver.outputs["r7"] == definition([7, 8], 40)
    _is_clean(driver, 32)
    assert driver.stats == PoolStats(free=16, cached=16, private=0)
