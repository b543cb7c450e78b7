"""Steps launched before earlier ones are read: order, feedback, snapshots, and who is told of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, RefusalCode, RowStatus
from runtime_service.step_runner import PendingStep, StepRunner


def launch(runner: StepRunner, op: ForwardOp) -> PendingStep:
    """Launch an op that must not be refused."""
    step = runner.launch(op)
    assert isinstance(step, PendingStep), step
    return step


def a_life(ops: Any) -> list[ForwardOp]:
    """Two requests; the first is retracted, its row and page go to a third, and it resumes elsewhere."""
    return [
        ops.extend(1, (1, [1, 2], 0, [1, 2, 3, 4, 5, 6]), (2, [3], 0, [9, 8])),
        ops.decode(2, (2, 1, [], 2), (1, 2, [], 6)),
        ops.extend(3, (1, [2, 1], 0, [50, 51, 52, 53, 54]), generation=2, released=(1,)),
        ops.decode(4, (1, 2, [], 5), generation=2),
        ops.decode(5, (2, 1, [], 3)),
        ops.decode(6, released=(2,)),
        ops.decode(7, (1, 2, [], 6), generation=2),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_pipelined_equals_serial(
    depth: int, ops: Any, late: Any, late_runner: StepRunner, new_runner: Callable[..., StepRunner]
) -> None:
    """Results read up to two steps late are those of a serial run, though rows and pages changed hands meanwhile."""
    serial = new_runner()
    expected = [ops.tokens(serial.run(op)) for op in a_life(ops)]
    launched, answers = [], []
    for op in a_life(ops):
        launched.append(launch(late_runner, op))
        if len(launched) > depth:
            answers.append(ops.tokens(late_runner.collect(launched.pop(0))))
    answers += [ops.tokens(late_runner.collect(step)) for step in launched]
    assert answers == expected
    assert late.violations == []
    assert late.log.index("wait 1") == depth + 1


def test_tokens_are_fed_back_without_being_read(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A decode row computes the token of a step that nobody has waited for."""
    steps = [launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))]
    steps += [launch(late_runner, ops.decode(step, (1, 2, [], step + 1))) for step in (2, 3)]
    assert late.log == ["execute 1", "execute 2", "execute 3"]
    assert [ops.tokens(late_runner.collect(step)) for step in steps] == [[20], [104], [629]]
    assert late.log[3:] == ["wait 1", "wait 2", "wait 3"]


def test_rows_without_a_token_keep_their_last_one(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A row that samples nothing in a step still feeds the token before."""
    launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3]), (2, [3], 0, [7])))
    last = late_runner._last_tokens.clone()
    assert last[1] == 20
    mixed = ops.extend(2, (3, [4], 0, [5]), (4, [5], 0, [6]), sample=False)
    step = launch(late_runner, mixed)
    assert torch.equal(late_runner._last_tokens, last)
    assert ops.tokens(late_runner.collect(step)) == [-1, -1]


def test_collecting_a_later_step_collects_the_earlier_ones(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """Whatever is asked for first, steps are waited for in their order, each once."""
    first = launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    second = launch(late_runner, ops.decode(2, (1, 2, [], 3)))
    assert late_runner.num_pending == 2
    assert ops.tokens(late_runner.collect(second)) == [104]
    assert late_runner.num_pending == 0
    assert ops.tokens(late_runner.collect(first)) == [20]
    assert late.log == ["execute 1", "execute 2", "wait 1", "wait 2"]


def test_result_is_formatted_from_its_own_op(ops: Any, late: Any, new_runner: Callable[..., StepRunner]) -> None:
    """Row status and missing tokens of step N come from op N, whatever step N + 1 says of the same rows."""
    runner = new_runner(late, width=2)
    clamped = launch(runner, ops.extend(1, (1, [1, 2, 3], 6, [4, 5, 6]), (2, [4], 0, [9])))
    fits = launch(runner, ops.extend(2, (1, [5], 0, [1, 2, 3]), generation=2, released=(1,)))
    first, second = runner.collect(clamped), runner.collect(fits)
    assert not isinstance(first, Refusal)
    assert (first.tokens.tolist(), first.row_status.tolist()) == ([-1, 10], [RowStatus.CLAMPED, RowStatus.OK])
    assert ops.tokens(second) == [20]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("secret"), RefusalCode.STEP_FAILED),
        (torch.OutOfMemoryError("secret"), RefusalCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory: secret"), RefusalCode.OUT_OF_MEMORY),
    ],
)
def test_failure_at_collect_time_fails_its_own_step(
    error: Exception, code: RefusalCode, ops: Any, late: Any, late_runner: StepRunner
) -> None:
    """The step that fails late is named; the one before keeps its result, those behind are SKIPPED, unread, until a reset."""
    late.fail_late = {2: error}
    first = launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    second = launch(late_runner, ops.decode(2, (1, 2, [], 3)))
    third = launch(late_runner, ops.decode(3, (1, 2, [], 4)))
    assert ops.tokens(late_runner.collect(first)) == [20]
    with structlog.testing.capture_logs() as logs:
        failed = late_runner.collect(second)
    assert isinstance(failed, Refusal)
    assert (failed.code, failed.session_no, failed.step) == (code, 1, 2)
    assert "secret" not in failed.detail
    assert [(entry["event"], entry["step"]) for entry in logs] == [("step failed", 2)]
    skipped = late_runner.collect(third)
    assert ops.code(skipped) == "SKIPPED"
    assert "step 2 was answered" in skipped.detail
    assert ops.code(late_runner.launch(ops.decode(4, (1, 2, [], 5)))) == "SKIPPED"
    assert late.log == ["execute 1", "execute 2", "execute 3", "wait 1", "wait 2"]
    late_runner.reset(2)
    assert ops.tokens(late_runner.run(ops.extend(1, (1, [1], 0, [1, 2, 3]), session_no=2))) == [20]


def test_wrong_number_of_rows_is_found_when_the_result_is_read(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A late result that does not fit its op fails that step."""
    step = launch(late_runner, ops.extend(1, (1, [1], 0, [1, 2, 3])))
    late.results[0]._result.row_status = np.empty(0, np.uint8)
    assert ops.code(late_runner.collect(step)) == "STEP_FAILED"


@pytest.mark.parametrize("earlier_fails", [False, True])
def test_failure_at_launch_with_a_step_pending(earlier_fails: bool, ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A step that cannot be launched fails; if the one before turns out to have failed, it is SKIPPED instead."""
    late.fail_at = {3: RuntimeError("at once")}
    late.fail_late = {2: torch.OutOfMemoryError("late")} if earlier_fails else {}
    launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    second = launch(late_runner, ops.decode(2, (1, 2, [], 3)))
    third = late_runner.launch(ops.decode(3, (1, 2, [], 4)))
    answer = late_runner.collect(second)
    if earlier_fails:
        assert (ops.code(answer), ops.code(third)) == ("OUT_OF_MEMORY", "SKIPPED")
    else:
        assert (ops.tokens(answer), ops.code(third)) == ([104], "STEP_FAILED")


@pytest.mark.parametrize("earlier_fails", [False, True])
def test_refusal_with_a_step_pending(earlier_fails: bool, ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A refused op gets its own code only if every step before it went well."""
    late.fail_late = {1: RuntimeError("late")} if earlier_fails else {}
    first = launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    refused = late_runner.launch(ops.decode(2, (1, 1, [3], 3)))
    answer = late_runner.collect(first)
    assert ops.code(refused) == ("SKIPPED" if earlier_fails else "GAP")
    if earlier_fails:
        assert ops.code(answer) == "STEP_FAILED"
    else:
        assert ops.tokens(answer) == [20]
    assert ops.code(late_runner.launch(ops.decode(2, (1, 2, [], 3)))) == "SKIPPED"
    assert late.num_executed == 1


def test_unreadable_op_behind_a_pending_step(ops: Any, late_runner: StepRunner) -> None:
    """An op that could not be read does not take the result of the step before it away, whatever step it claims to be."""
    first = launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    late_runner.refuse(Refusal(RefusalCode.MALFORMED, detail="three bytes", session_no=1, step=0))
    assert ops.tokens(late_runner.collect(first)) == [20]
    assert ops.code(late_runner.launch(ops.decode(2, (1, 2, [], 3)))) == "SKIPPED"


def test_repeat_of_a_pending_step(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A repeat of a step that was not read yet is answered with its result and executed once."""
    op = ops.extend(1, (1, [1, 2], 0, [1, 2, 3]))
    first = launch(late_runner, op)
    again = launch(late_runner, op)
    assert again.ready()
    assert late_runner.collect(again) is late_runner.collect(first)
    assert late.num_executed == 1
    assert ops.tokens(late_runner.run(ops.decode(2, (1, 2, [], 3)))) == [104]


@pytest.mark.parametrize("begin", ["reset", "open", "close"])
def test_new_session_drops_what_is_pending(begin: str, ops: Any, late: Any, late_runner: StepRunner) -> None:
    """Reset, hello and the end of the stream do not wait for pending steps, whose results are gone."""
    steps = [launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3]))), launch(late_runner, ops.decode(2, (1, 2, [], 3)))]
    match begin:
        case "reset":
            late_runner.reset(2)
        case "open":
            late_runner.open(78, 2, 1)
        case _:
            late_runner.close()
            late_runner.open(77, 2, 1)
    assert late.log == ["execute 1", "execute 2"]
    assert all(step.ready() for step in steps)
    for step in steps:
        with pytest.raises(RuntimeError, match=f"step {step.op.step} of session 1 was dropped"):
            late_runner.collect(step)
    assert ops.tokens(late_runner.run(ops.extend(1, (1, [1], 0, [1, 2, 3]), session_no=2))) == [20]


def test_read_rows_shows_the_launched_steps(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """Rows are read as of the last launched step, and say so, without reading its tokens."""
    launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3, 4, 5, 6, 7])))
    launch(late_runner, ops.decode(2, (1, 2, [7], 7)))
    snapshot = late_runner.read_rows()
    assert (snapshot.last_step, snapshot.pages.tolist()) == (2, [1, 2, 7])
    assert late.log == ["execute 1", "execute 2"]


def test_readiness_is_the_models(ops: Any, late: Any, late_runner: StepRunner) -> None:
    """A step is ready when the model says so, also when asking it fails: collecting then says with what."""
    step = launch(late_runner, ops.extend(1, (1, [1, 2], 0, [1, 2, 3])))
    assert not step.ready()
    late.results[0].is_ready = True
    assert step.ready()

    def broken() -> bool:
        raise RuntimeError("device lost")

    late.results[0].is_ready = False
    late.results[0].ready = broken
    assert step.ready()
