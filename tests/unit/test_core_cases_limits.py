"""Public bug reports as small scenarios: capacity, progress, edges of the input. Each docstring names the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError, RequestError
from scheduler_service.core.page_pool import PoolStats

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])
_A, _B = [20, 104, 629, 421, 384, 473], [38, 194, 172, 213, 714, 452]


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
    driver.expect_clean(32)
    assert driver.stats == PoolStats(free=16, cached=16, private=0)
