"""One step, start to end: the order of things, feedback, clamps, failures, and what a refusal leaves untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from runtime_service.errors import Refusal
from runtime_service.executors.base import ExecutionResult, ModelInfo
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import NO_TOKEN, Int32Array, LeaseStart, RefusalCode, RowStatus, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner

PAGE_SIZE = 4
NUM_PAGES = 2000
EPOCH = 77


class RecordingExecutor:
    """Answers each row with its input's last token + 1 and notes every call; `before` runs inside `execute`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.before: Callable[[ForwardBatch], None] = lambda batch: None
        self.row_status = RowStatus.OK

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("recording", "none", 5000, 0, (), None, "cpu", "int32")

    def warm_up(self) -> None:
        self.calls.append(("warm_up", None))

    def start_leases(self, leases: list[LeaseStart]) -> None:
        self.calls.append(("start_leases", [lease.request_id for lease in leases]))

    def release_rows(self, rows: Int32Array) -> None:
        self.calls.append(("release_rows", rows.tolist()))

    def execute(self, batch: ForwardBatch) -> ExecutionResult:
        self.before(batch)
        self.calls.append(("execute", batch.input_ids.tolist()))
        tokens = (batch.input_ids[batch.query_indptr[1:] - 1] + 1).to(torch.int32).numpy()
        return ExecutionResult(tokens, np.full(batch.num_rows, self.row_status, np.uint8))

    def reset(self) -> None:
        self.calls.append(("reset", None))


def new_runner(executor: Any = None, *, width: int = 16, overlap_depth: int = 1) -> StepRunner:
    """A runner of eight rows with an open session."""
    executor = executor or RecordingExecutor()
    session = SessionState(8, width, NUM_PAGES, PAGE_SIZE, executor.info.vocab_size)
    runner = StepRunner(session, ReqToPage(8, width, NUM_PAGES, PAGE_SIZE), executor)
    runner.open(EPOCH, 1, overlap_depth)
    if isinstance(executor, RecordingExecutor):
        executor.calls.clear()
    return runner


def code(answer: StepResult | Refusal) -> RefusalCode:
    """The code of an answer that must be a refusal."""
    assert isinstance(answer, Refusal), answer
    return answer.code


def test_worked_example_is_exact(ops: Any) -> None:
    """Retract, resume on another physical page and reuse of the freed page give the tokens of an undisturbed run."""
    executor = FingerprintExecutor(NUM_PAGES, PAGE_SIZE)
    runner = new_runner(executor)
    first = ops.extend(1, (1, [1, 2], 0, [1, 2, 3, 4, 5, 6, 7]), (2, [3, 4], 0, [1, 2, 3, 4, 9]))
    assert ops.tokens(runner.run(first))[0] == 168
    assert ops.tokens(runner.run(ops.extend(2, (1, [3, 2], 4, [5, 6, 7, 168]), generation=2, released=(1, 2)))) == [523]
    assert ops.tokens(runner.run(ops.decode(3, (1, 2, [1], 8), generation=2))) == [254]
    assert runner.mirror.row(1).tolist() == [3, 2, 1]
    assert executor.violations == []


def test_order_within_a_step(ops: Any) -> None:
    """Releases, then lease starts, then execution, which already sees the mirror as the op left it."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    runner.run(ops.extend(1, (1, [5], 0, [1])))
    executor.calls.clear()
    seen: list[list[int]] = []
    executor.before = lambda batch: seen.append(batch.req_to_page[1:3, :2].tolist())
    runner.run(ops.extend(2, (2, [7, 5], 0, [3]), released=(1,)))
    assert executor.calls == [("release_rows", [1]), ("start_leases", ["request-2"]), ("execute", [3])]
    assert seen == [[[0, 0], [7, 5]]]


def test_decode_rows_take_their_own_last_token(ops: Any) -> None:
    """Feedback is by row number, in any order of rows, and a chunk that samples nothing does not change it."""
    runner = new_runner()
    assert ops.tokens(runner.run(ops.extend(1, (1, [1], 0, [10]), (2, [2], 0, [20]), (3, [3], 0, [30])))) == [11, 21, 31]
    assert ops.tokens(runner.run(ops.decode(2, (3, 1, [], 1), (1, 1, [], 1)))) == [32, 12]
    unsampled = ops.extend(3, (4, [4, 5], 0, [40]), sample=False)
    assert ops.tokens(runner.run(unsampled)) == [NO_TOKEN]
    assert ops.tokens(runner.run(ops.decode(4, (2, 1, [], 1), (3, 1, [], 2), (1, 1, [], 2)))) == [22, 33, 13]


def test_new_lease_forgets_the_last_token_of_the_row(ops: Any) -> None:
    """A tenant that was asked for a token but got none (clamped) does not feed the former tenant's token."""
    runner = new_runner(width=2)
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    runner.run(ops.extend(1, (1, [1], 0, [10])))
    clamped = runner.run(ops.extend(2, (1, [4, 5, 6], 8, [1]), generation=2, released=(1,)))
    assert ops.tokens(clamped) == [NO_TOKEN]
    runner.run(ops.decode(3, (1, 3, [], 9), generation=2))
    assert executor.calls[-1] == ("execute", [0])


def test_clamped_row_gets_its_status_and_goes_on(ops: Any) -> None:
    """A row past a 513-page mirror: no token, status clamped, other rows unaffected, no second refusal for 1,000 tokens."""
    width = 513
    runner = new_runner(width=width)
    pages = list(range(1, width + 1))
    computed = width * PAGE_SIZE - 1
    assert ops.tokens(runner.run(ops.extend(1, (1, pages, computed, [10]), (2, [1990], 0, [20])))) == [11, 21]
    row_len = width
    for step in range(2, 1002):
        computed += 1
        new = [row_len + 1] if computed // PAGE_SIZE + 1 > row_len else []
        result = runner.run(ops.decode(step, (1, row_len, new, computed)))
        assert isinstance(result, StepResult)
        assert (result.tokens.tolist(), result.row_status.tolist()) == ([NO_TOKEN], [RowStatus.CLAMPED])
        row_len += len(new)
    assert row_len == width + 250
    assert runner.mirror.row(1).tolist() == pages
    mixed = runner.run(ops.decode(1002, (2, 1, [], 1), (1, row_len, [], computed + 1)))
    assert isinstance(mixed, StepResult)
    assert (mixed.tokens.tolist(), mixed.row_status.tolist()) == ([22, NO_TOKEN], [RowStatus.OK, RowStatus.CLAMPED])


def test_row_status_of_the_model_is_kept(ops: Any) -> None:
    """What the model says of a row travels in the result."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    executor.row_status = RowStatus.NON_FINITE
    result = runner.run(ops.extend(1, (1, [1], 0, [10])))
    assert isinstance(result, StepResult)
    assert result.row_status.tolist() == [RowStatus.NON_FINITE]


def test_refused_op_touches_nothing(ops: Any) -> None:
    """Neither the mirror nor the model hears of a refused op."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    runner.run(ops.extend(1, (1, [1, 2], 0, [10])))
    executor.calls.clear()
    table = runner.mirror.table.clone()
    assert code(runner.run(ops.decode(2, (1, 1, [3], 1)))) is RefusalCode.GAP
    assert torch.equal(runner.mirror.table, table)
    assert executor.calls == []
    assert code(runner.run(ops.decode(2, (1, 2, [], 1)))) is RefusalCode.SKIPPED


def test_repeat_is_not_executed(ops: Any) -> None:
    """A repeated step is answered with the very result it had, and the model is not asked again."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    op = ops.extend(1, (1, [1], 0, [10]))
    result = runner.run(op)
    executor.calls.clear()
    assert runner.run(op) is result
    assert executor.calls == []
    assert ops.tokens(runner.run(ops.decode(2, (1, 1, [], 1)))) == [12]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("secret: /home/user/model"), RefusalCode.STEP_FAILED),
        (torch.OutOfMemoryError("secret"), RefusalCode.OUT_OF_MEMORY),
        (MemoryError("secret"), RefusalCode.OUT_OF_MEMORY),
    ],
)
def test_failed_step(ops: Any, error: Exception, expected: RefusalCode) -> None:
    """An exception in a step becomes a refusal without its text, with the traceback in the log; a reset helps."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    runner.run(ops.extend(1, (1, [1], 0, [10])))

    def fail(batch: ForwardBatch) -> None:
        raise error

    executor.before = fail
    with structlog.testing.capture_logs() as logs:
        answer = runner.run(ops.decode(2, (1, 1, [], 1)))
    assert code(answer) is expected
    assert isinstance(answer, Refusal)
    assert (answer.session_no, answer.step) == (1, 2)
    assert "secret" not in answer.detail
    assert "step 2 of 1 rows" in answer.detail
    assert [(entry["event"], entry["exc_info"], entry["step"]) for entry in logs] == [("step failed", True, 2)]
    executor.before = lambda batch: None
    assert code(runner.run(ops.decode(3, (1, 1, [], 2)))) is RefusalCode.SKIPPED
    executor.calls.clear()
    runner.reset(2)
    assert executor.calls == [("reset", None)]
    assert not runner.mirror.table.any()
    assert ops.tokens(runner.run(ops.extend(1, (1, [2], 0, [50]), session_no=2))) == [51]


def test_model_that_answers_too_few_rows_is_a_failed_step(ops: Any) -> None:
    """A result that does not fit the op is never delivered."""
    runner = new_runner()

    class Short(RecordingExecutor):
        def execute(self, batch: ForwardBatch) -> ExecutionResult:
            return ExecutionResult(np.array([], dtype=np.int32), np.empty(0, np.uint8))

    runner.executor = Short()
    assert code(runner.run(ops.extend(1, (1, [1], 0, [10])))) is RefusalCode.STEP_FAILED


def test_zero_row_op_releases_and_does_not_execute(ops: Any) -> None:
    """An op without rows frees rows and is answered with an empty result."""
    runner = new_runner()
    executor = runner.executor
    assert isinstance(executor, RecordingExecutor)
    runner.run(ops.extend(1, (1, [1], 0, [10])))
    executor.calls.clear()
    assert ops.tokens(runner.run(ops.decode(2, released=(1,)))) == []
    assert executor.calls == [("release_rows", [1])]
    assert runner.mirror.row(1).tolist() == []


def test_read_rows(ops: Any) -> None:
    """Rows are read with generation, both lengths and session position; without a list, those that have a lease."""
    runner = new_runner(width=2)
    runner.run(ops.extend(1, (3, [7, 8, 9], 0, [1]), (1, [4], 0, [1]), generation=5))
    snapshot = runner.read_rows()
    assert (snapshot.session_no, snapshot.last_step) == (1, 1)
    assert snapshot.rows.tolist() == [1, 3]
    assert snapshot.row_generations.tolist() == [5, 5]
    assert snapshot.row_lens.tolist() == [1, 3]
    assert snapshot.valid_lens.tolist() == [1, 2]
    assert snapshot.pages.tolist() == [4, 7, 8]
    chosen = runner.read_rows(np.array([3, 2], dtype=np.int32))
    assert (chosen.rows.tolist(), chosen.row_generations.tolist(), chosen.pages.tolist()) == ([3, 2], [5, 0], [7, 8])
    for row in (0, 9, -1):
        with pytest.raises(IndexError, match=rf"row {row} is outside \[1, 8\]"):
            runner.read_rows(np.array([row], dtype=np.int32))


def test_close_drops_everything(ops: Any) -> None:
    """When the scheduler is gone no row is left and its session takes no op."""
    runner = new_runner()
    runner.run(ops.extend(1, (1, [1], 0, [10])))
    runner.close()
    assert runner.read_rows().rows.tolist() == []
    assert not runner.mirror.table.any()
    assert code(runner.run(ops.decode(2, (1, 1, [], 1)))) is RefusalCode.UNKNOWN_SESSION


def test_open_that_is_refused_keeps_the_session(ops: Any) -> None:
    """A hello that is too old changes nothing."""
    runner = new_runner()
    runner.run(ops.extend(1, (1, [1], 0, [10])))
    with pytest.raises(Refusal, match="not higher than 1"):
        runner.open(EPOCH, 1, 1)
    assert ops.tokens(runner.run(ops.decode(2, (1, 1, [], 1)))) == [12]
