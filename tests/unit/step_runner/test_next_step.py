"""Ops that were foreseen against the same ops looked at from scratch: same answers, same memory, whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemirror.v1 import forward_pb2
from runtime_service import wire
from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp
from runtime_service.step_runner import StepRunner

INT32 = [-(1 << 31), -1, 0, 1, 2, 3, 5, 40, 41, 1 << 30, (1 << 31) - 1]
INT_COLUMNS = (
    *("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "occupied_pages", "num_computed", "input_lens"),
    *("input_ids", "released_rows", "verify_rows"),
)
BOOL_COLUMNS = ("full_refresh", "sample")
BOTH_WAYS = pytest.mark.parametrize("others_between", [False, True])


def message_of(op: ForwardOp) -> forward_pb2.ForwardOp:
    """The op as it travels."""
    message = forward_pb2.ForwardOp(session_no=op.session_no, step=op.step, num_extend_rows=op.num_extend_rows)
    for name in (*INT_COLUMNS, *BOOL_COLUMNS):
        setattr(message, name, getattr(op, name).tobytes())
    for lease in op.lease_starts:
        message.lease_starts.add(req_pool_index=lease.req_pool_index, request_id=lease.request_id)
    return message


class Twins:
    """Two runners; the second one foresees nothing."""

    def __init__(self, make: Callable[..., StepRunner]) -> None:
        self.runners = make(), make()
        self.num_foreseen = 0

    def run(self, message: forward_pb2.ForwardOp, *, read_between: bool = False) -> Any:
        """The answer of both, which must be one, and after which their memory must be one."""
        answers = []
        for runner, foreseen in zip(self.runners, (self.runners[0].foreseen, None), strict=True):
            try:
                op = wire.op_from_proto(message, foreseen)
            except Refusal as refusal:
                answers.append(plain(runner.refuse(refusal)))
                continue
            self.num_foreseen += foreseen is not None and op is foreseen.op
            answers.append(plain(runner.run(op)))
            if read_between:
                assert runner.read_rows().last_step == runner.session.last_step
        self.runners[0].prepare()
        assert answers[0] == answers[1]
        assert memory(self.runners[0]) == memory(self.runners[1])
        return answers[0]


def plain(answer: Any) -> Any:
    """An answer as values."""
    if isinstance(answer, Refusal):
        return answer.code.name, answer.row, answer.request_id, answer.detail, answer.session_no, answer.step
    return answer.session_no, answer.step, answer.tokens.tolist(), answer.row_status.tolist()


def memory(runner: StepRunner) -> Any:
    """Everything that a runner keeps from one op to the next."""
    session, mirror, model = runner.session, runner.mirror, runner.executor
    view = session._view
    columns = (view.generation, view.live, view.row_len, view.end, view.sampled, session._held, mirror.row_lens)
    tensors = (mirror.table, model._tokens, model._hashes, runner._last_tokens)  # type: ignore[attr-defined]
    return (
        [column.tolist() for column in (*columns, mirror.valid_lens, model._chain_lens)],  # type: ignore[attr-defined]
        [tensor.tolist() for tensor in tensors],
        (session.last_step, session.request_ids, model.violations, session.broken_by is None),  # type: ignore[attr-defined]
    )


def begun(ops: Any, make: Callable[..., StepRunner]) -> Twins:
    """Twins with three requests of 2, 3 and 4 tokens in pages of four."""
    twins = Twins(make)
    twins.run(message_of(ops.extend(1, (1, [5], 0, [7, 8]), (2, [6], 0, [7, 8, 9]), (3, [7], 0, [9, 9, 9, 9]))))
    return twins


def decode(ops: Any, step: int) -> forward_pb2.ForwardOp:
    """Their decode step number `step`, from 2 on; row r gets page 10 * r + n as its nth one."""
    rows = []
    for row, prompt_len in ((3, 4), (1, 2), (2, 3)):
        computed = prompt_len + step - 2
        begin = -(-computed // 4)
        rows.append((row, begin, [10 * row + begin] if computed % 4 == 0 else [], computed))
    return message_of(ops.decode(step, *rows))


@BOTH_WAYS
def test_decode_steps_are_foreseen(ops: Any, new_runner: Callable[..., StepRunner], others_between: bool) -> None:
    """From the third on, steps of the same rows are, with and without new pages, and rows may be read between them."""
    twins = begun(ops, new_runner)
    for step in range(2, 24):
        twins.run(decode(ops, step), read_between=others_between)
        assert twins.num_foreseen == max(0, step - 3)
    assert twins.runners[0].mirror.row(3).tolist() == [7, 31, 32, 33, 34, 35, 36][: len(twins.runners[0].mirror.row(3))]


def test_nothing_is_foreseen_past_the_width(ops: Any, new_runner: Callable[..., StepRunner]) -> None:
    """A row that fills the mirror is clamped at the same step, with the same status, as without foresight."""
    twins = begun(ops, lambda: new_runner(width=2))
    answers = [twins.run(decode(ops, step)) for step in range(2, 12)]
    assert answers[-1][3] == [2, 2, 2]
    assert 0 < twins.num_foreseen < 8


def test_repeat_of_a_foreseen_step(ops: Any, new_runner: Callable[..., StepRunner]) -> None:
    """It is answered from what is kept, and the next step is as before."""
    twins = begun(ops, new_runner)
    answers = {step: twins.run(decode(ops, step)) for step in range(2, 8)}
    assert twins.run(decode(ops, 7)) == answers[7]
    assert twins.run(decode(ops, 6)) == answers[6]
    assert twins.run(decode(ops, 8))[1] == 8


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_messages(ops: Any, new_runner: Callable[..., StepRunner], data: st.DataObject) -> None:
    """One entry of one column of one step is changed: refused as without foresight, or carried out like there."""
    twins = begun(ops, new_runner)
    changed_at = data.draw(st.integers(3, 8))
    for step in range(2, 10):
        message = decode(ops, step)
        if step == changed_at:
            name = data.draw(st.sampled_from((*INT_COLUMNS, *BOOL_COLUMNS, "step", "session_no", "num_extend_rows", "bytes")))
            if name in INT_COLUMNS:
                column = np.frombuffer(getattr(message, name), np.int32).copy()
                if len(column) and data.draw(st.booleans()):
                    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.sampled_from(INT32))
                else:
                    column = np.append(column, np.int32(data.draw(st.sampled_from(INT32))))
                setattr(message, name, column.tobytes())
            elif name in BOOL_COLUMNS:
                column = np.frombuffer(getattr(message, name), np.uint8).copy()
                column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.sampled_from((0, 1, 2)))
                setattr(message, name, column.tobytes())
            elif name == "bytes":
                message.occupied_pages += b"\0"
            else:
                setattr(message, name, data.draw(st.integers(0, 12)))
        twins.run(message)
    assert twins.num_foreseen > 0 or changed_at < 5


def test_reset_forgets_what_was_foreseen(ops: Any, new_runner: Callable[..., StepRunner]) -> None:
    """The new session's ops are looked at from scratch, though one of them could be what the old one's next was to be."""
    twins = begun(ops, new_runner)
    for step in range(2, 5):
        twins.run(decode(ops, step))
    for runner in twins.runners:
        runner.reset(2)
        assert runner.foreseen is None
    assert twins.run(decode(ops, 5))[0] == "UNKNOWN_SESSION"
