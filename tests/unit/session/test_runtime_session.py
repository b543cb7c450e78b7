"""What the runtime answers from memory, and how sessions follow one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, LeaseStart, RefusalCode

NewSession = Callable[..., Any]

EPOCH = 0xABCDEF


def test_first_refusal_makes_later_ops_skipped_until_reset(begun_session: NewSession, ops: Any) -> None:
    """After one refused op even a right one is SKIPPED; a reset starts again at step 1 with no rows."""
    session = begun_session()
    assert session.refused(ops.make(4, ops.decode())).code is RefusalCode.STEP_OUT_OF_ORDER
    skipped = session.refused(ops.make(2, ops.decode()))
    assert skipped.code is RefusalCode.SKIPPED
    assert "step 4 was answered STEP_OUT_OF_ORDER" in skipped.detail
    assert (skipped.session_no, skipped.step) == (1, 2)
    session.reset(2)
    assert session.lease_rows().tolist() == []
    assert session.request_ids == {}
    session.take(ops.make(1, ops.first_chunk(), session_no=2))


def test_failed_step_makes_later_ops_skipped(new_session: NewSession, ops: Any) -> None:
    """A failed step breaks the session like a refused op."""
    session = new_session()
    op = ops.make(1, ops.first_chunk())
    session.check(op)
    session.commit(op)
    failure = session.fail(op, RefusalCode.OUT_OF_MEMORY, "no memory")
    assert (failure.code, failure.session_no, failure.step, failure.detail) == (RefusalCode.OUT_OF_MEMORY, 1, 1, "no memory")
    assert session.refused(ops.make(2, ops.decode())).code is RefusalCode.SKIPPED


def test_refusal_found_elsewhere_breaks_the_session_once(new_session: NewSession, ops: Any) -> None:
    """Unreadable bytes break the session; when it is already broken they are SKIPPED like everything else."""
    session = new_session()
    unreadable = Refusal(RefusalCode.MALFORMED, detail="odd bytes", session_no=1, step=1)
    assert session.refuse(unreadable) is unreadable
    assert session.refuse(unreadable).code is RefusalCode.SKIPPED
    assert session.refused(ops.make(1, ops.first_chunk())).code is RefusalCode.SKIPPED


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_repeats_are_answered_from_the_last_results(new_session: NewSession, ops: Any, overlap_depth: int) -> None:
    """Exactly the last overlap_depth + 1 steps are answered again, and nothing is applied twice."""
    session = new_session(overlap_depth=overlap_depth)
    ops = [ops.make(1, ops.first_chunk())] + [ops.make(step, ops.decode(computed=3 + step)) for step in (2, 3, 4)]
    for op in ops:
        session.take(op)
    before = session.memory()
    for op in ops[3 - overlap_depth :]:
        stored = session.check(op)
        assert stored is not None
        assert stored.step == op.step
        assert stored.tokens.tolist() == [op.step]
    assert session.memory() == before
    refusal = session.refused(ops[2 - overlap_depth])
    assert refusal.code is RefusalCode.STEP_OUT_OF_ORDER
    assert f"steps {4 - overlap_depth} to 4 are kept" in refusal.detail


@pytest.mark.parametrize("session_no", [0, 1, 3])
def test_ops_of_another_session_are_refused(new_session: NewSession, ops: Any, session_no: int) -> None:
    """Only the present session's number is taken: not unset, not an older one, not one to come."""
    session = new_session()
    session.reset(2)
    refusal = session.refused(ops.make(1, ops.first_chunk(), session_no=session_no))
    assert refusal.code is RefusalCode.UNKNOWN_SESSION
    assert f"of session {session_no}, the present one is 2" in refusal.detail


def test_ops_without_a_session_are_refused(new_session: NewSession, ops: Any) -> None:
    """Before open() and after close() nothing is executed."""
    session = new_session(opened=False)
    assert session.refused(ops.make(1, ops.first_chunk())).code is RefusalCode.UNKNOWN_SESSION
    session.open(EPOCH, 1, 0)
    session.take(ops.make(1, ops.first_chunk()))
    session.close()
    assert (session.session_no, session.last_step, session.request_ids) == (0, 0, {})
    assert session.refused(ops.make(1, ops.first_chunk())).code is RefusalCode.UNKNOWN_SESSION


def test_session_numbers_of_one_scheduler_only_rise(new_session: NewSession, ops: Any) -> None:
    """An equal or lower number is refused by open and reset, also after close; another scheduler may begin anywhere."""
    session = new_session()
    session.reset(5)
    session.take(ops.make(1, ops.first_chunk(), session_no=5))
    before = session.memory()
    for attempt in (lambda: session.open(EPOCH, 5, 1), lambda: session.reset(4)):
        with pytest.raises(Refusal, match="not higher than 5"):
            attempt()
        assert session.memory() == before
    session.close()
    with pytest.raises(Refusal, match="not higher than 5"):
        session.open(EPOCH, 3, 1)
    session.open(EPOCH + 1, 1, 1)
    assert session.session_no == 1


@pytest.mark.parametrize(("epoch", "session_no", "depth"), [(0, 1, 0), (EPOCH, 0, 0), (EPOCH, 1, 3), (EPOCH, 1, -1)])
def test_open_refuses_impossible_numbers(new_session: NewSession, epoch: int, session_no: int, depth: int) -> None:
    """No scheduler has epoch 0, session 0 or a depth outside [0, 2]."""
    session = new_session(opened=False)
    with pytest.raises(ValueError, match="must be"):
        session.open(epoch, session_no, depth)
    assert session.session_no == 0
    with pytest.raises(ValueError, match="before any session"):
        session.reset(2)


def test_zero_row_op_only_releases(begun_session: NewSession, ops: Any) -> None:
    """An op without rows is a step like any other."""
    session = begun_session()
    session.take(ops.make(2, released=(1,)))
    assert session.last_step == 2


def test_decode_batches_are_checked_without_work_per_row(new_session: NewSession) -> None:
    """Sixteen times the rows cost far less than sixteen times the time."""

    def seconds(num_rows: int) -> float:
        session = new_session(max_rows=num_rows, max_pages_per_row=64, num_pages=64 * num_rows, page_size=16)
        rows = np.arange(1, num_rows + 1, dtype=np.int32)
        ones, zeros = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
        flags = np.ones(num_rows, np.bool_)
        starts = [LeaseStart(int(row), "") for row in rows]
        nothing = np.empty(0, np.int32)
        prefill = ForwardOp(
            1, 1, rows, ones, ones, zeros, ones, flags, rows, zeros, num_rows, ones, zeros, flags, nothing, starts
        )
        session.take(prefill)
        op = ForwardOp(1, 2, rows, ones, ones, ones, zeros, ~flags, nothing, ones, 0, ones, nothing, flags, nothing)
        samples = []
        for _ in range(50):
            begin = time.perf_counter()
            assert session.check(op) is None
            samples.append(time.perf_counter() - begin)
        return min(samples)

    assert seconds(1024) < 5 * seconds(64)
