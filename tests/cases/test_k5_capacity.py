"""B32 to B41: capacity, progress, edges of the input."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_driver import DEFAULTS, alone
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError, RequestError
from scheduler_service.core.request import output_limit

Drive = Callable[..., Any]

LIMIT_S = 60.0
A_TOKENS, B_TOKENS = [20, 104, 629, 421, 384, 473], [38, 194, 172, 213, 714, 452]
"""What [1,2,3] and [4,5,6] return."""


def test_b32_request_that_can_never_fit(drive: Drive) -> None:
    """vllm-project/vllm#39734, #1534: refused at submit with both numbers, so it blocks nobody; a long answer is cut."""
    driver = drive(num_pages=4)
    with pytest.raises(
        PromptTooLongError, match="20 tokens, but the pool of num_pages = 4 pages of 4 tokens allows 16"
    ) as caught:
        driver.submit("A", [1] * 20)
    assert (caught.value.code, caught.value.prompt_len, caught.value.limit) == ("INVALID_ARGUMENT", 20, 16)
    driver.submit("B", [1, 2, 3])
    driver.run()
    assert driver.outputs == {"B": [20]}
    # 16 tokens that are to return 4 would store 19 positions in 5 pages: the first token is returned, and the pool is to blame.
    for max_tokens, reason in ((4, "capacity"), (1, "length")):
        driver.submit("C", [1] * 16, max_tokens)
        driver.run()
        assert (driver.outputs["C"], driver.finish["C"]) == (alone([1] * 16, 1), reason)


def test_b33_row_as_wide_as_the_mirror(drive: Drive) -> None:
    """vllm-project/vllm#10730: no page beyond the row's width is granted, and one that is sent all the same is not written."""
    driver = drive(max_pages_per_row=2)
    for length, count in ((7, 2), (8, 1)):
        driver.submit("A", [1] * length, 10)
        driver.run()
        assert (driver.outputs["A"], driver.finish["A"]) == (alone([1] * length, count), "length")
    with pytest.raises(PromptTooLongError, match="max_pages_per_row = 2"):
        driver.submit("B", [1] * 9, 10)
    # Straight to the runtime: a third page, as a tail and as a whole row. Its position is not computed, row 2 is not touched.
    from hand_runtime import HandRuntime, Row
    from runtime_service.ops import NO_TOKEN, RowStatus

    for full in (False, True):
        runtime = HandRuntime(width=2)
        prompts = (list(range(1, 9)), [7] * 7)
        runtime.step(Row(1, [1, 2], 0, prompts[0], full=True), Row(2, [4, 5], 0, prompts[1], full=True))
        assert runtime.step(Row(1, [1, 2, 3], 8, full=full, begin=2)) == [NO_TOKEN]
        assert (runtime.status, runtime.table()[:3].tolist()) == ([RowStatus.CLAMPED], [[0, 0], [1, 2], [4, 5]])
        assert runtime.step(Row(2, [4, 5], 7)) == alone(prompts[1], 2)[1:]


def test_b34_no_preemption_livelock(drive: Drive) -> None:
    """inference-sim/inference-sim#297, vllm-project/vllm#25538: two requests that each need the whole pool both end."""
    # In four pages B is not admitted beside A: two pages and one in hand for A do not fit. Nobody is retracted, twelve steps.
    # In five, one page more, the report's numbers: both run, the newest is retracted once, ten steps, at most twelve with
    # look-ahead.
    for overlap_depth in (0, 1, 2):
        for num_pages, num_retractions, most_ops in ((4, 0, 12), (5, 1, 10 if overlap_depth == 0 else 12)):
            driver = drive(page_size=2, num_pages=num_pages, overlap_depth=overlap_depth)
            driver.submit("A", [1, 2, 3], 6)
            driver.submit("B", [4, 5, 6], 6)
            driver.run(max_steps=most_ops + 2 * overlap_depth)
            assert (driver.outputs["A"], driver.outputs["B"]) == (A_TOKENS, B_TOKENS)
            assert [driver.requests[name].num_retractions for name in "AB"] == [0, num_retractions]
            assert driver.num_ops <= most_ops
            assert overlap_depth or driver.num_ops == most_ops


def test_b35_bad_prompts(drive: Drive) -> None:
    """vllm-project/vllm#7632, #7746: the one call fails, the next request returns 20."""
    driver = drive()
    for prompt in ([], [-1], [997], [2**31 - 1], [1, 2, -1]):
        before = driver.state()
        with pytest.raises(InvalidRequestError) as caught:
            driver.submit("A", prompt)
        assert (caught.value.code, driver.state()) == ("INVALID_ARGUMENT", before)
        driver.submit("A", [1, 2, 3])
        driver.run()
        assert driver.outputs["A"] == [20]


def test_b36_edges_of_max_tokens(drive: Drive) -> None:
    """vllm-project/vllm#6521: 0 and -1 are refused, a huge number is cut by what row, pool and context hold."""
    for options, count, reason in (({"num_pages": 4}, 14, "capacity"), ({"max_context": 9}, 6, "length")):
        driver = drive(**options)
        for max_tokens in (0, -1):
            with pytest.raises(InvalidRequestError) as caught:
                driver.submit("A", [1, 2, 3], max_tokens)
            assert caught.value.code == "INVALID_ARGUMENT"
        driver.submit("A", [1, 2, 3], 2**31 - 1)
        driver.run()
        assert (driver.outputs["A"], driver.finish) == (alone([1, 2, 3], count), {"A": reason})
    # Where row and pool hold more than 2^31 tokens, lengths stay 32-bit numbers.
    huge = SchedulerConfig(**DEFAULTS | {"page_size": 2**20, "num_pages": 2**20, "max_pages_per_row": 2**20})
    assert output_limit(3, 2**31 - 1, huge)[0] + 3 == 2**31 - 1


def test_b37_page_boundary_in_decode(drive: Drive) -> None:
    """MinivLLM#85, nano-vllm#71: a page is asked for by the step that stores into it, and the last token needs none."""
    driver = drive(num_pages=1)
    driver.submit("a", [1, 2, 3], 2)
    assert [driver.step()["a"].pages for _ in range(2)] == [[1], [1]]
    assert (driver.finish, driver.requests["a"].num_retractions) == ({"a": "length"}, 0)
    driver = drive(num_pages=2)
    driver.submit("b", [1, 2, 3, 4], 2)
    assert [driver.step()["b"].pages for _ in range(2)] == [[1], [1, 2]]
    assert driver.finish == {"b": "length"}
    driver = drive(num_pages=1)
    driver.submit("c", [1, 2, 3, 4], 2)
    driver.run()
    assert (driver.outputs["c"], driver.finish) == (alone([1, 2, 3, 4], 1), {"c": "capacity"})
    # Every length up to three pages and a token: after each step just the pages for what is stored, at the end
    # ceil((L + k - 1) / page_size).
    driver = drive()
    for count in (1, 2, 4, 5, 6):
        for length in range(1, 14):
            driver.submit("A", [1] * length, count, prefix_cache=False)
            stored = most = 0
            while driver.scheduler.has_work:
                row = driver.step()["A"]
                stored += row.input_len
                most = len(row.pages)
                assert most == -(-stored // 4)
            assert most == -(-(length + count - 1) // 4)


def test_b38_chunks_of_any_size(drive: Drive) -> None:
    """sgl-project/sglang#36344, sglang-jax#1551: every position is computed exactly once, and the request ends."""
    # A chunk need not be a multiple of a page, and one above the step's budget is cut to it.
    for page_size, chunk_size, token_budget, length in (
        (64, 32, 64, 129),
        (3, 4, 64, 8),
        (4, 64, 3, 10),
        (4, 1, 64, 9),
        (1, 3, 64, 10),
    ):
        driver = drive(page_size=page_size, chunk_size=chunk_size, token_budget=token_budget)
        driver.submit("A", range(1, length + 1), 3)
        position = 0
        while driver.scheduler.has_work:
            row = driver.step()["A"]
            assert row.num_computed == position
            assert 1 <= row.input_len <= min(chunk_size, token_budget)
            position += row.input_len
        assert position == length + 2
        assert (driver.outputs["A"], driver.finish) == (alone(range(1, length + 1), 3), {"A": "length"})


def test_b39_accepted_means_it_completes(drive: Drive) -> None:
    """sgl-project/sglang#29249: one limit decides, so what is accepted ends and what cannot end is refused."""
    for max_pages_per_row, longest in ((16, 32), (5, 20)):
        driver = drive(num_pages=8, max_pages_per_row=max_pages_per_row)
        for length in range(1, 71):
            try:
                driver.submit("A", [1] * length)
            except RequestError as error:
                assert (error.code, length > longest) == ("INVALID_ARGUMENT", True)
            else:
                driver.run(max_steps=3)
                assert (driver.finish, length > longest) == ({"A": "length"}, False)


def test_b40_last_running_request_cannot_grow(drive: Drive) -> None:
    """sgl-project/sglang#15626: A ends by capacity after three tokens, without a retraction, and B runs."""
    driver = drive(page_size=2, num_pages=3)
    driver.submit("A", [1, 2, 3, 4], 8)
    driver.submit("B", [1, 2], 2)
    driver.run()
    assert driver.outputs == {"A": alone([1, 2, 3, 4], 3), "B": alone([1, 2], 2)}
    assert driver.finish == {"A": "capacity", "B": "length"}
    assert [driver.requests[name].num_retractions for name in "AB"] == [0, 0]


async def test_b41_more_requests_than_rows_and_queue(drive: Drive) -> None:
    """sgl-project/sglang#33858, sglang-jax#1400: the surplus is told so at once, everybody else ends."""
    driver = drive(page_size=16, num_pages=64, max_rows=4, max_waiting=4)
    for index in range(4):
        driver.submit(f"r{index}", [index, index + 1], 200)
    driver.step()
    for index in range(4, 8):
        driver.submit(f"r{index}", [index, index + 1], 200)
    with pytest.raises(QueueFullError) as caught:
        driver.submit("r8", [8, 9], 200)
    assert (caught.value.code, caught.value.request_id) == ("RESOURCE_EXHAUSTED", "r8")
    driver.run()
    assert driver.finish == {f"r{index}": "length" for index in range(8)}
    assert driver.outputs == {f"r{index}": alone([index, index + 1], 200) for index in range(8)}
    assert driver.scheduler.placement.rows.num_free == 4

    # The same as calls of the service: nine of them, and each one gets its answer.
    from runtime_service import app
    from runtime_service.executors.base import Capacity
    from runtime_service.executors.fingerprint import FingerprintExecutor
    from runtime_service.settings import RuntimeSettings
    from two_services import both_services

    shape = RuntimeSettings(model="fingerprint", page_size=16, num_pages=64, max_rows=4)
    load = functools.partial(app.load, shape, lambda _: (FingerprintExecutor(64, 16), Capacity(64, 16)))
    running = asyncio.Event()
    async with both_services(load, limit_s=LIMIT_S, max_waiting=4) as (engine, client, _):

        async def call(index: int) -> list[int]:
            tokens: list[int] = []
            async for piece in client.generate([index, index + 1], max_tokens=200):
                tokens += piece.tokens
                if engine.core.num_running == 4:
                    running.set()
            return tokens

        calls = [asyncio.create_task(call(index)) for index in range(4)]
        await running.wait()
        calls += [asyncio.create_task(call(index)) for index in range(4, 9)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert [error.code.name for error in refused] == ["RESOURCE_EXHAUSTED"]
        for index, result in enumerate(results):
            assert result in refused or result == alone([index, index + 1], 200)
        assert engine.core.placement.rows.num_free == 4
