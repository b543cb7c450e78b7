"""Rows whose digest differs are computed by nobody: no write to a live page, no token, no feedback; the rest is as ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from plain_digest import plain_digest
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import NO_TOKEN, ForwardOp, RowStatus, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import PendingStep, StepRunner

NewRunner = Callable[..., StepRunner]


def digest(pages: list[int], width: int = 8) -> int:
    """Of a row of these pages in a mirror of that width."""
    return plain_digest(pages[:width], len(pages))


def asking(op: ForwardOp, *own: list[int], others: dict[int, list[int]] | None = None, width: int = 8) -> ForwardOp:
    """The op with the digests of its rows, given whole, and of other rows."""
    others = others or {}
    return replace(
        op,
        row_digests=np.array([digest(pages, width) for pages in own], dtype=np.uint64),
        verify_rows=np.array(list(others), dtype=np.int32),
        verify_digests=np.array([digest(pages, width) for pages in others.values()], dtype=np.uint64),
    )


def result(answer: object) -> StepResult:
    """An answer that must be a result."""
    assert isinstance(answer, StepResult), answer
    return answer


A, B = [0, 1, 20], [1, 10, 69]  # the model goes on with 68 344 75 531, and with 234 177 70 496


def bring_both_to_their_second_page(runner: StepRunner, ops: Any) -> None:
    """A in row 1 on pages 1 and 2, B in row 2 on pages 3 and 4, both with two tokens sampled and five in their cells."""
    assert ops.tokens(runner.run(ops.extend(1, (1, [1], 0, A), (2, [3], 0, B)))) == [68, 234]
    assert ops.tokens(runner.run(ops.decode(2, (1, 1, [], 3), (2, 1, [], 3)))) == [344, 177]
    assert ops.tokens(runner.run(ops.decode(3, (1, 1, [2], 4), (2, 1, [4], 4)))) == [75, 70]


def test_unnoticed_two_rows_write_one_cell(new_runner: NewRunner, ops: Any) -> None:
    """What verification is for: B's second entry names A's page, B's token lands in A's cell, and A gets 501 for 531."""
    runner = new_runner()
    bring_both_to_their_second_page(runner, ops)
    runner.mirror.table[2, 1] = 2
    assert ops.tokens(runner.run(ops.decode(4, (1, 2, [], 5), (2, 2, [], 5))))[0] == 501


@pytest.mark.parametrize("entry", [2, 0, 1 << 30, -7])
def test_masked_row_writes_and_samples_nothing(entry: int, new_runner: NewRunner, ops: Any) -> None:
    """With digests A gets 531, B no token; no cell but A's is written; the result tells what was found, and so does the log."""
    runner = new_runner()
    bring_both_to_their_second_page(runner, ops)
    runner.mirror.table[2, 1] = entry
    cells = runner.executor._token_pages.clone()
    with structlog.testing.capture_logs() as logs:
        answer = result(runner.run(asking(ops.decode(4, (1, 2, [], 5), (2, 2, [], 5)), [1, 2], [3, 4])))
    assert answer.tokens.tolist() == [531, NO_TOKEN]
    assert answer.row_status.tolist() == [RowStatus.OK] * 2
    assert answer.digests.tolist() == [digest([1, 2]), digest([3, entry])]
    cells[2, 1] = 75
    assert torch.equal(runner.executor._token_pages, cells)
    assert runner.executor.violations == []
    assert runner._last_tokens.tolist()[:3] == [0, 531, 70]
    assert [(entry["event"], entry["rows"]) for entry in logs if entry["log_level"] == "warning"] == [("rows_masked", [2])]


def test_the_next_op_in_flight_is_masked_as_well(late_runner: StepRunner, late: Any, ops: Any) -> None:
    """Two more ops were launched before the first difference was known: their digests differ too, and A goes on."""
    runner = late_runner
    bring_both_to_their_second_page(runner, ops)
    runner.mirror.table[2, 1] = 2
    cells = late._token_pages.clone()
    launched = []
    for step, computed in ((4, 5), (5, 6), (6, 7)):
        op = asking(ops.decode(step, (1, 2, [], computed), (2, 2, [], computed)), [1, 2], [3, 4])
        launched.append(runner.launch(op))
    assert all(isinstance(step, PendingStep) for step in launched)
    known = [*A, 68, 344, 75, 531]
    for _ in range(2):
        known.append(sum((i + 1) * (token + 1) for i, token in enumerate(known)) % 997)
    answers = [result(runner.collect(step)) for step in launched]
    assert [answer.tokens.tolist() for answer in answers] == [[token, NO_TOKEN] for token in known[6:]]
    assert all(answer.digests.tolist() == [digest([1, 2]), digest([3, 2])] for answer in answers)
    cells[2, 1:] = torch.tensor(known[5:8])
    assert torch.equal(late._token_pages, cells)
    assert late.violations == []


class LateOutputs:
    """Copies of digests that arrive when the test says so."""

    def __init__(self) -> None:
        self.started: list[LateOutput] = []

    def start(self, columns: list[torch.Tensor]) -> LateOutput:
        self.started.append(LateOutput([column.numpy().copy() for column in columns]))
        return self.started[-1]


class LateOutput:
    """One of them."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.is_ready = False
        self._arrays = arrays

    def ready(self) -> bool:
        return self.is_ready

    def wait(self) -> list[np.ndarray]:
        return self._arrays


def test_digests_that_arrive_late(late_runner: StepRunner, late: Any, ops: Any) -> None:
    """As on a device: launching waits for no digest, mask and feedback go by the device's own comparison, results have both."""
    runner, outputs = late_runner, LateOutputs()
    bring_both_to_their_second_page(runner, ops)
    runner._digests._outputs = outputs  # type: ignore[assignment]
    runner.mirror.table[2, 1] = 2
    launched = []
    for step, computed in ((4, 5), (5, 6)):
        op = asking(ops.decode(step, (1, 2, [], computed), (2, 2, [], computed)), [1, 2], [3, 4])
        launched.append(runner.launch(op))
    first, second = launched
    assert isinstance(first, PendingStep)
    assert isinstance(second, PendingStep)
    assert (len(outputs.started), runner._last_tokens[2]) == (2, 70)
    late.results[-2].is_ready = True
    assert not first.ready(), "its digests are still on their way"
    outputs.started[0].is_ready = True
    assert first.ready()
    assert not second.ready()
    assert result(runner.collect(first)).tokens.tolist() == [531, NO_TOKEN]
    answer = result(runner.collect(second))
    assert answer.tokens.tolist()[1] == NO_TOKEN
    assert answer.digests.tolist() == [digest([1, 2]), digest([3, 2])]
    runner.mirror.table[2, 1] = 4
    op = asking(ops.decode(6, (1, 2, [], 7), (2, 2, [], 7)), [1, 2], [3, 4])
    last = runner.launch(op)
    assert isinstance(last, PendingStep)
    runner.reset(2)
    with pytest.raises(RuntimeError, match="was dropped"):
        runner.collect(last)


@pytest.mark.gpu
def test_masked_on_a_device(ops: Any) -> None:
    """The same numbers where mirror, cells and digests are on a GPU, with the kernels."""
    limits = (8, 8, 40, 4)
    executor = FingerprintExecutor(40, 4, device="cuda")
    runner = StepRunner(SessionState(*limits, executor.info.vocab_size), ReqToPage(*limits, device="cuda"), executor)
    runner.open(77, 1, 2)
    bring_both_to_their_second_page(runner, ops)
    runner.mirror.table[2, 1] = 2
    answer = result(runner.run(asking(ops.decode(4, (1, 2, [], 5), (2, 2, [], 5)), [1, 2], [3, 4])))
    assert answer.tokens.tolist() == [531, NO_TOKEN]
    assert answer.digests.tolist() == [digest([1, 2]), digest([3, 2])]
    assert executor.violations == []


def test_a_masked_chunk_computes_nothing(new_runner: NewRunner, ops: Any) -> None:
    """In a mixed step of a chunk and a decode row, the masked one is left out whichever it is."""
    for masked in (0, 1):
        runner = new_runner()
        assert ops.tokens(runner.run(ops.extend(1, (1, [1, 2], 0, A)))) == [68]
        chunk, decode = ops.extend(2, (2, [3, 4], 0, [5, 6, 7, 8, 9])), ops.decode(2, (1, 2, [], 3))
        rows = {name: np.concatenate((getattr(chunk, name), getattr(decode, name))) for name in COLUMNS}
        op = asking(replace(chunk, **rows), [3, 4], [1, 2])
        op.row_digests[masked] += np.uint64(1)
        answer = result(runner.run(op))
        expected = [(6 * 1 + 7 * 2 + 8 * 3 + 9 * 4 + 10 * 5) % 997, 344]
        expected[masked] = NO_TOKEN
        assert answer.tokens.tolist() == expected
        assert answer.digests.tolist() == [digest([3, 4]), digest([1, 2])]
        assert runner.executor.violations == []


COLUMNS = (
    *("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "full_refresh", "occupied_pages", "num_computed"),
    *("input_lens", "sample"),
)


def test_all_rows_masked(new_runner: NewRunner, ops: Any) -> None:
    """A step of masked rows alone has no token and leaves every cell."""
    runner = new_runner()
    bring_both_to_their_second_page(runner, ops)
    cells = runner.executor._token_pages.clone()
    answer = result(runner.run(asking(ops.decode(4, (1, 2, [], 5), (2, 2, [], 5)), [1, 5], [3, 5])))
    assert answer.tokens.tolist() == [NO_TOKEN, NO_TOKEN]
    assert torch.equal(runner.executor._token_pages, cells)


def test_clamped_rows_are_compared_as_far_as_they_fit(new_runner: NewRunner, ops: Any) -> None:
    """A row of three pages in a mirror of two: its digest covers two entries and the length 3, and it is not masked."""
    runner = new_runner(width=2)
    ids = list(range(1, 10))
    op = asking(ops.extend(1, (1, [1, 2, 3], 0, ids), (2, [4], 0, [7])), [1, 2, 3], [4], width=2)
    answer = result(runner.run(op))
    assert (answer.tokens.tolist(), answer.row_status.tolist()) == ([NO_TOKEN, 8], [RowStatus.CLAMPED, RowStatus.OK])
    assert answer.digests.tolist() == op.row_digests.tolist() == [digest([1, 2, 3], 2), digest([4])]
    wider = asking(ops.decode(2, (1, 3, [5], 9), (2, 1, [], 1)), [1, 2, 3, 5], [4], width=2)
    answer = result(runner.run(wider))
    assert answer.digests.tolist() == wider.row_digests.tolist()
    assert answer.row_status.tolist() == [RowStatus.CLAMPED, RowStatus.OK]
    runner.mirror.table[1, 0] = 7
    answer = result(runner.run(asking(ops.decode(3, (1, 4, [], 10), (2, 1, [], 2)), [1, 2, 3, 5], [4], width=2)))
    assert answer.digests.tolist() != wider.row_digests.tolist()
    assert answer.row_status.tolist() == [RowStatus.OK, RowStatus.OK]


def test_other_rows_are_compared_and_left_alone(new_runner: NewRunner, ops: Any) -> None:
    """Digests of rows that the op does not name come after its own, also where it names none or states none of its own."""
    runner = new_runner()
    bring_both_to_their_second_page(runner, ops)
    runner.mirror.table[2, 0] = 9
    op = asking(ops.decode(4, (1, 2, [], 5)), [1, 2], others={2: [3, 4]})
    answer = result(runner.run(op))
    assert answer.tokens.tolist() == [531]
    assert answer.digests.tolist() == [digest([1, 2]), digest([9, 4])]
    again = runner.run(op)
    assert result(again).digests.tolist() == answer.digests.tolist(), "a repeat is answered with the same"
    idle = replace(asking(ops.extend(5), others={2: [3, 4], 1: [1, 2]}), num_extend_rows=0)
    answer = result(runner.run(idle))
    assert (answer.tokens.tolist(), answer.digests.tolist()) == ([], [digest([9, 4]), digest([1, 2])])
    unstated = replace(asking(ops.decode(6, (1, 2, [], 6)), others={2: [3, 4]}))
    assert result(runner.run(unstated)).digests.tolist() == [digest([9, 4])]


def test_without_being_asked_nothing_is_computed(new_runner: NewRunner, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op without digest columns starts no digest, and its result has none."""
    runner = new_runner()
    monkeypatch.setattr(runner._digests, "start", lambda op: pytest.fail("a digest was started"))
    answer = result(runner.run(ops.extend(1, (1, [1], 0, A))))
    assert answer.digests.tolist() == []
