"""The core and log probabilities: what is asked for arrives with its token, and what is missing is no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service.core.errors import UnexpectedResultError
from scheduler_service.core.ops import ForwardOp, RowStatus, SamplingParams, StepResult, TokenLogprobs

Drive = Callable[..., Any]


def asking(count: int | None) -> SamplingParams:
    """Greedy with that many top tokens."""
    return SamplingParams(num_logprobs=count)


def answer(op: ForwardOp, tokens: list[int], width: int = 2, **changes: Any) -> StepResult:
    """A result with log probabilities made from row and column number."""
    rows = op.num_rows
    logprobs = -np.arange(1, rows + 1, dtype=np.float32)
    top_tokens = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    columns = {"logprobs": logprobs, "top_tokens": top_tokens, "top_logprobs": -top_tokens.astype(np.float32)}
    return StepResult(op.session_no, op.step, np.array(tokens, np.int32), **(columns | changes))


def test_tokens_come_with_what_their_request_wants(drive: Drive) -> None:
    """In one batch: none, the token's own, and two more; outputs are parallel, and None when nobody asks."""
    scheduler = drive().scheduler
    for name, count in (("a", None), ("b", 0), ("c", 2)):
        scheduler.submit(name, [1], max_tokens=3, sampling=asking(count))
    op = scheduler.plan()
    assert op.num_logprobs.tolist() == [-1, 0, 2]
    scheduler.complete(answer(op, [7, 8, 9]))
    outputs = scheduler.take_outputs()
    assert outputs.tokens == [7, 8, 9]
    assert outputs.logprobs == [None, TokenLogprobs(-2.0, [], []), TokenLogprobs(-3.0, [4, 5], [-4.0, -5.0])]
    for name in ("b", "c"):
        scheduler.abort(name)
    op = scheduler.plan()
    assert op.num_logprobs is None
    scheduler.complete(StepResult(op.session_no, op.step, np.array([5], np.int32)))
    assert scheduler.take_outputs().logprobs is None


def test_outputs_of_several_steps_stay_parallel(drive: Drive) -> None:
    """Tokens of a step in which nobody asked get None beside those of one in which somebody did, before and after it."""
    scheduler = drive().scheduler
    scheduler.submit("a", [1], max_tokens=5)
    op = scheduler.plan()
    scheduler.complete(StepResult(op.session_no, op.step, np.array([5], np.int32)))
    scheduler.submit("b", [1], max_tokens=1, sampling=asking(0))
    op = scheduler.plan()
    order = [request.request_id for request in op.requests]
    scheduler.complete(answer(op, [6, 6]))
    op = scheduler.plan()
    scheduler.complete(StepResult(op.session_no, op.step, np.array([7], np.int32)))
    outputs = scheduler.take_outputs()
    own = TokenLogprobs(-1.0 - order.index("b"), [], [])
    expected = [None, *(own if name == "b" else None for name in order), None]
    assert [request.request_id for request in outputs.requests] == ["a", *order, "a"]
    assert outputs.logprobs == expected


def test_a_retracted_request_accepts_late_log_probabilities(drive: Drive) -> None:
    """The token of an outstanding step comes with its log probabilities after the row was lost."""
    scheduler = drive().scheduler
    request = scheduler.submit("a", [1, 2], max_tokens=3, sampling=asking(1))
    op = scheduler.plan()
    scheduler.retract("a")
    scheduler.complete(answer(op, [4]))
    outputs = scheduler.take_outputs()
    assert (outputs.requests, outputs.tokens) == ([request], [4])
    assert outputs.logprobs == [TokenLogprobs(-1.0, [0], [0.0])]


def test_a_failed_row_needs_no_log_probability(drive: Drive) -> None:
    """Non-finite logits end the request, and the row's NaN is no reason to refuse the result."""
    scheduler = drive().scheduler
    scheduler.submit("a", [1], max_tokens=2, sampling=asking(0))
    scheduler.submit("b", [1], max_tokens=2, sampling=asking(0))
    op = scheduler.plan()
    status = np.array([RowStatus.NON_FINITE, RowStatus.OK], np.uint8)
    scheduler.complete(answer(op, [-1, 3], logprobs=np.array([np.nan, -0.5], np.float32), row_status=status))
    outputs = scheduler.take_outputs()
    assert (outputs.tokens, outputs.logprobs) == ([3], [TokenLogprobs(-0.5, [], [])])
    assert [request.request_id for request in outputs.finished] == ["a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None},
        {"logprobs": np.zeros(1, np.float32)},
        {"logprobs": np.array([0.0, np.nan], np.float32)},
        {"top_tokens": None},
        {"top_logprobs": None},
        {"top_tokens": np.zeros((2, 1), np.int32), "top_logprobs": np.zeros((2, 1), np.float32)},
        {"top_logprobs": np.zeros((2, 3), np.float32)},
        {"top_tokens": np.zeros((1, 2), np.int32), "top_logprobs": np.zeros((1, 2), np.float32)},
    ],
)
def test_a_result_without_what_was_asked_for_is_none(drive: Drive, changes: dict[str, Any]) -> None:
    """Missing, short or empty columns raise and change nothing; the right result is taken afterwards."""
    scheduler = drive().scheduler
    scheduler.submit("a", [1], max_tokens=2)
    scheduler.submit("b", [1], max_tokens=2, sampling=asking(2))
    op = scheduler.plan()
    with pytest.raises(UnexpectedResultError, match=r"log probabilit|top tokens"):
        scheduler.complete(answer(op, [4, 4], **changes))
    assert scheduler.take_outputs().tokens == []
    scheduler.complete(answer(op, [4, 4]))
    assert scheduler.take_outputs().tokens == [4, 4]
