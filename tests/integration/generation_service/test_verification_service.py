"""Verification end to end: an entry of the mirror is changed in device memory under a running service.

A starts with tokens 0 1 20 and B with 1 10 69; the model goes on with 68 344 75 531 and with 234 177 70 496. Before both write
their sixth token, the second entry of B's row is made to name A's page: B's 70 would be written over A's 75 in the same step,
and A would get 501 for 531.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import pytest
import structlog

from runtime_service.ops import ForwardOp

StackOf = Callable[..., AbstractAsyncContextManager[Any]]
Continuation = Callable[[Any, int], list[int]]

A, B = [0, 1, 20], [1, 10, 69]


class Damage:
    """Makes the second entry of B's row A's, before the runtime launches an op in which both decode on their second page.

    Steps that append to the row or refresh it are left out: they would put the entry right again.
    """

    def __init__(self, runner: Any, times: int) -> None:
        self.steps: list[tuple[int, int]] = []
        """(session, step) of the ops before which it was done."""
        self.entries: list[tuple[int, int]] = []
        """What the entry was, and what it became."""
        self._runner = runner
        self._launch = runner.launch
        self._times = times
        runner.launch = self.launch

    def launch(self, op: ForwardOp) -> Any:
        if len(self.steps) < self._times and op.num_rows == 2 and op.num_extend_rows == 0 and self._is_on_second_page(op):
            table, (row_a, row_b) = self._runner.mirror.table, op.req_pool_indices.tolist()
            before, after = int(table[row_b, 1]), int(table[row_a, 1])
            if before != after:  # else it was done already
                self.steps.append((op.session_no, op.step))
                self.entries.append((before, after))
                table[row_b, 1] = after
        return self._launch(op)

    @staticmethod
    def _is_on_second_page(op: ForwardOp) -> bool:
        return not op.full_refresh.any() and op.begins.min() >= 2 and op.num_computed.min() >= 5


async def run_both(stack: Any, num_tokens: int, **more: list[int]) -> list[Any]:
    """A and B, and more prompts after them, admitted in one step, each to its end; exceptions in the place of outputs."""
    stack.engine.pause()
    runs = []
    for name, prompt in {"a": A, "b": B, **more}.items():
        runs.append(asyncio.create_task(stack.run(prompt, num_tokens, request_id=name)))
        await stack.until(lambda: stack.engine.core.num_waiting == len(runs))
    stack.engine.resume()
    return await asyncio.gather(*runs, return_exceptions=True)


def counts(stack: Any) -> dict[str, float]:
    """What the metrics say of verification."""
    value = stack.engine.metrics.registry.get_sample_value
    return {
        "mismatches": value("pagemirror_digest_mismatches_total"),
        "resets": value("pagemirror_resets_total", {"cause": "digest"}) or 0,
        "digests": value("pagemirror_digests_total"),
    }


async def test_unnoticed_the_output_is_wrong(stack_of: StackOf, continuation: Continuation) -> None:
    """Without verification A's fourth token is 501 where 531 is right, and nobody is told."""
    async with stack_of() as stack:
        damage = Damage(stack.runner, 1)
        (a, _), (b, _) = await run_both(stack, 8)
        assert continuation(A, 4) == [68, 344, 75, 531]
        assert a[:4] == [68, 344, 75, 501]
        assert b[:3] == continuation(B, 3)
        assert len(damage.steps) == 1
        assert counts(stack) == {"mismatches": 0, "resets": 0, "digests": 0}
        assert stack.executor.violations != []
        stack.executor.violations.clear()


@pytest.mark.parametrize("policy", ["transition", "diff"])
@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
async def test_every_step_verified(stack_of: StackOf, continuation: Continuation, overlap_depth: int, policy: str) -> None:
    """The step is found out, the session reset, both outputs are right, and the log names row, digests and first wrong page."""
    with structlog.testing.capture_logs() as logs:
        async with stack_of(verify="every", overlap_depth=overlap_depth, refresh_policy=policy) as stack:
            damage = Damage(stack.runner, 1)
            (a, a_ending), (b, b_ending) = await run_both(stack, 12)
            assert a == continuation(A, 12)
            assert b == continuation(B, 12)
            assert (a_ending.reason, b_ending.reason) == ("length", "length")
            assert counts(stack) | {"digests": 0} == {"mismatches": 1, "resets": 1, "digests": 0}
            assert counts(stack)["digests"] > 24
            assert stack.engine.connection.session_no == 2
            assert "the digest of row 2 of request 'b' differs" in stack.engine.connection.trouble
    (entry,) = [entry for entry in logs if entry["event"] == "digest_mismatch"]
    assert (entry["log_level"], entry["row"], entry["request_id"], entry["num_rows"]) == ("error", 2, "b", 1)
    assert (entry["session_no"], entry["step"]) == damage.steps[0]
    before, after = damage.entries[0]
    assert entry["first_difference"] == f"logical page 1 is {after}, should be {before}"
    assert entry["expected"] != entry["found"]
    masked = [entry["rows"] for entry in logs if entry["event"] == "rows_masked"]
    assert masked == [[2]] * len(masked)
    assert 1 <= len(masked) <= overlap_depth + 1


@pytest.mark.parametrize("mode", ["every", "sample"])
async def test_undisturbed_service(stack_of: StackOf, continuation: Continuation, mode: str) -> None:
    """With retractions, shared prefixes, growth and chunks nothing differs, at any interval."""
    async with stack_of(verify=mode, verify_interval=2, num_pages=24, max_rows=4) as stack:
        prompts = [[n, 1, 2, 3, 4, 5, 6, 7, 8, 9] for n in (1, 1, 2, 3, 1, 2)]
        outputs = await asyncio.gather(*(stack.run(prompt, 30) for prompt in prompts))
        assert [tokens for tokens, _ in outputs] == [continuation(prompt, 30) for prompt in prompts]
        assert counts(stack) | {"digests": 0} == {"mismatches": 0, "resets": 0, "digests": 0}
        assert counts(stack)["digests"] > 30
        assert stack.engine.connection.session_no == 1


@pytest.mark.parametrize("overlap_depth", [0, 2])
async def test_samples_find_it_within_the_interval(stack_of: StackOf, continuation: Continuation, overlap_depth: int) -> None:
    """Samples every 8 steps: the damage of a running row is found in the next one, and later requests are served rightly."""
    with structlog.testing.capture_logs() as logs:
        async with stack_of(verify="sample", verify_interval=8, overlap_depth=overlap_depth) as stack:
            damage = Damage(stack.runner, 1)
            await run_both(stack, 30)
            assert counts(stack) | {"digests": 0} == {"mismatches": 1, "resets": 1, "digests": 0}
            assert (await stack.run([5, 6], 12))[0] == continuation([5, 6], 12)
            stack.executor.violations.clear()  # of the steps before it was found
    (entry,) = [entry for entry in logs if entry["event"] == "digest_mismatch"]
    (session_no, step) = damage.steps[0]
    assert (entry["session_no"], entry["step"]) == (session_no, -(-step // 8) * 8)


async def test_samples_look_at_rows_that_do_not_run(stack_of: StackOf, continuation: Continuation) -> None:
    """B waits for its turn while its row is damaged; a sample in A's step finds it, and B's output is right."""
    with structlog.testing.capture_logs() as logs:
        async with stack_of(verify="sample", verify_interval=4) as stack:
            core, launch, steps = stack.engine.core, stack.runner.launch, []

            def damage(op: ForwardOp) -> Any:
                if op.req_pool_indices.tolist() == [1] and op.num_extend_rows == 0 and not steps:
                    steps.append(op.step)
                    stack.runner.mirror.table[2, 0] = 7
                elif op.num_rows == 2:
                    core.set_token_budget(1)  # from the next plan on one row a step: A's, which is first in order
                return launch(op)

            stack.runner.launch = damage
            (a, _), (b, _) = await run_both(stack, 12)
            assert a == continuation(A, 12)
            assert b == continuation(B, 12)
            assert counts(stack) | {"digests": 0} == {"mismatches": 1, "resets": 1, "digests": 0}
    (entry,) = [entry for entry in logs if entry["event"] == "digest_mismatch"]
    assert (entry["row"], entry["request_id"], entry["step"]) == (2, "b", -(-steps[0] // 4) * 4)
    assert entry["first_difference"].startswith("logical page 0 is 7, should be ")


async def test_second_time_within_the_window_is_data_loss(stack_of: StackOf, continuation: Continuation) -> None:
    """Every live request ends with DATA_LOSS, the waiting one too; requests that come afterwards are served."""
    async with stack_of(verify="every", max_rows=2) as stack:
        damage = Damage(stack.runner, 2)
        errors = await run_both(stack, 30, waits=[4])
        assert [error.code for error in errors] == [grpc.StatusCode.DATA_LOSS] * 3
        assert all("twice within 600 s (--verify-window)" in error.details for error in errors)
        assert counts(stack) | {"digests": 0} == {"mismatches": 2, "resets": 2, "digests": 0}
        assert [session_no for session_no, _ in damage.steps] == [1, 2]
        assert (await stack.run(A, 9))[0] == continuation(A, 9)
        assert stack.engine.connection.session_no == 3


@pytest.mark.parametrize("window", [0, 1e-9])
async def test_later_than_the_window_is_a_reset(stack_of: StackOf, continuation: Continuation, window: float) -> None:
    """Damage that comes again after the window, or with no window at all, is repaired again."""
    async with stack_of(verify="every", verify_window=window) as stack:
        damage = Damage(stack.runner, 3)
        (a, _), (b, _) = await run_both(stack, 20)
        assert a == continuation(A, 20)
        assert b == continuation(B, 20)
        assert counts(stack) | {"digests": 0} == {"mismatches": 3, "resets": 3, "digests": 0}
        assert len(damage.steps) == 3


async def test_missing_digests_are_a_broken_protocol(stack_of: StackOf, continuation: Continuation) -> None:
    """A result without the digests that were asked for is not believed: a reset, but no damage."""
    async with stack_of(verify="every") as stack:
        collect = stack.runner.collect

        def forgetful(step: Any) -> Any:
            answer = collect(step)
            if answer.session_no < 3:
                answer.digests = answer.digests[:-1]
            return answer

        stack.runner.collect = forgetful
        assert (await stack.run(A, 5))[0] == continuation(A, 5)
        assert "was answered with 0 digests, 1 were asked for" in stack.engine.connection.trouble
        assert counts(stack)["mismatches"] == 0
        assert stack.engine.connection.session_no == 3
