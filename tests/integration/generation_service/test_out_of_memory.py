"""Steps that run out of the runtime's memory: clients see a pause, later steps are smaller, and a warning says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
import torch

from runtime_service.executors.base import ExecutionResult, PendingResult
from runtime_service.forward_batch import ForwardBatch


class SmallMemory:
    """Makes a model fail every step of more than `limit` tokens."""

    def __init__(self, executor: Any, limit: int) -> None:
        self.sizes: list[int] = []
        self._execute = executor.execute
        self._limit = limit
        executor.execute = self.execute

    def execute(self, batch: ForwardBatch) -> PendingResult:
        self.sizes.append(len(batch.input_ids))
        if self.sizes[-1] > self._limit:
            raise torch.OutOfMemoryError(f"{self.sizes[-1]} tokens")
        result: ExecutionResult = self._execute(batch)
        return result


async def test_budget_is_halved_until_the_step_fits(
    stack_of: Callable[..., Any], continuation: Callable[..., list[int]]
) -> None:
    """Budget 32 and a memory for ten tokens: 32, 16, then chunks of 8; the output is exact and the request saw no error."""
    prompt = list(range(1, 31))
    with structlog.testing.capture_logs() as logs:
        async with stack_of(chunk_size=32) as stack:
            memory = SmallMemory(stack.executor, 10)
            tokens, ending = await stack.run(prompt, 3)
            assert tokens == continuation(prompt, 3)
            assert ending.reason == "length"
            assert (stack.engine.core.token_budget, stack.engine.config.token_budget) == (8, 32)
    assert memory.sizes[:6] == [30, 16, 8, 8, 8, 6]
    halved = [(entry["before"], entry["after"]) for entry in logs if entry["event"] == "token_budget_halved"]
    assert halved == [(32, 16), (16, 8)]
    assert all(entry["log_level"] == "warning" for entry in logs if entry["event"] == "token_budget_halved")


async def test_budget_stops_at_a_page(stack_of: Callable[..., Any]) -> None:
    """The budget is not halved below a page of tokens, and another failure does not lower it."""
    with structlog.testing.capture_logs() as logs:
        async with stack_of(page_size=4, token_budget=8, chunk_size=8) as stack:
            SmallMemory(stack.executor, 2)
            call = stack.client.generate(list(range(1, 9)), max_tokens=1)
            task = asyncio.ensure_future(stack.first_token(call))
            await stack.until(lambda: any(entry["event"] == "token_budget_at_its_least" for entry in logs))
            assert stack.engine.core.token_budget == 4
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await call.aclose()


async def test_other_failures_leave_the_budget_alone(
    stack_of: Callable[..., Any], continuation: Callable[..., list[int]]
) -> None:
    """A step that fails for another reason is repeated at the same size."""
    async with stack_of() as stack:
        execute, failures = stack.executor.execute, [RuntimeError("once")]

        def fail_once(batch: ForwardBatch) -> PendingResult:
            if failures:
                raise failures.pop()
            return execute(batch)

        stack.executor.execute = fail_once
        tokens, _ = await stack.run([1, 2, 3], 2)
        assert tokens == continuation([1, 2, 3], 2)
        assert stack.engine.core.token_budget == 32
