"""What the runtime refuses, what it answers from memory, and what it remembers of a lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from runtime_service.errors import MAX_DETAIL_LEN, Refusal
from runtime_service.op_checks import sampling_error
from runtime_service.ops import ForwardOp, LeaseStart, RefusalCode, SamplingParams, StepResult
from runtime_service.session import SessionState

PAGE_SIZE = 4
EPOCH = 0xABCDEF


@dataclass(frozen=True)
class Row:
    """One row of an op: an extend row when `ids` is given, else a decode row."""

    row: int
    pages: tuple[int, ...] = ()  # what is sent
    row_len: int = 1
    begin: int = 0
    full: bool = True
    generation: int = 1
    computed: int = 0
    ids: tuple[int, ...] | None = None
    sample: bool = True
    start: str | None = None


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Values as an int32 column."""
    return np.array(values, dtype=np.int32)


def make_op(step: int, *rows: Row, session_no: int = 1, released: tuple[int, ...] = ()) -> ForwardOp:
    """An op of these rows; extend rows must come first."""
    return ForwardOp(
        session_no=session_no,
        step=step,
        req_pool_indices=i32([r.row for r in rows]),
        row_generations=i32([r.generation for r in rows]),
        row_lens=i32([r.row_len for r in rows]),
        begins=i32([r.begin for r in rows]),
        sizes=i32([r.row_len - r.begin for r in rows]),
        full_refresh=np.array([r.full for r in rows], dtype=np.bool_),
        occupied_pages=i32([page for r in rows for page in r.pages]),
        num_computed=i32([r.computed for r in rows]),
        num_extend_rows=sum(r.ids is not None for r in rows),
        input_lens=i32([1 if r.ids is None else len(r.ids) for r in rows]),
        input_ids=i32([token for r in rows if r.ids is not None for token in r.ids]),
        sample=np.array([r.sample for r in rows], dtype=np.bool_),
        released_rows=i32(released),
        lease_starts=[LeaseStart(r.row, r.start) for r in rows if r.start is not None],
    )


def first_chunk(row: int = 1, pages: tuple[int, ...] = (1, 2), ids: tuple[int, ...] = (5, 6, 7, 8, 9), **more: Any) -> Row:
    """The op row that begins a lease."""
    return Row(row, pages, row_len=len(pages), ids=ids, start=f"request-{row}", **more)


def decode(row: int = 1, computed: int = 5, row_len: int = 2, begin: int = 2, **more: Any) -> Row:
    """A decode row after `first_chunk()`'s five tokens."""
    return replace(Row(row, (), row_len=row_len, begin=begin, full=False, computed=computed), **more)


def new_session(*, overlap_depth: int = 1, max_pages_per_row: int = 8, num_pages: int = 64, **more: Any) -> SessionState:
    """A session of four rows, opened as number 1."""
    session = SessionState(4, max_pages_per_row, num_pages, PAGE_SIZE, 100, **more)
    session.open(EPOCH, 1, overlap_depth)
    return session


def answer(op: ForwardOp) -> StepResult:
    """A result whose tokens are the step's number."""
    return StepResult(op.session_no, op.step, np.full(op.num_rows, op.step, np.int32), np.zeros(op.num_rows, np.uint8))


def apply(session: SessionState, op: ForwardOp) -> None:
    """Take an op all the way."""
    assert session.check(op) is None
    session.commit(op)
    session.store(answer(op))


def memory(session: SessionState) -> list[Any]:
    """Everything a session remembers of rows, to compare before and after."""
    view = session._view
    columns = (view.generation, view.live, view.row_len, view.end, view.sampled, session._held, session._released)
    return [column.tolist() for column in columns] + [dict(session.request_ids), session.last_step]


def refused(session: SessionState, op: ForwardOp) -> Refusal:
    """The refusal of an op, after a look that no row has changed."""
    before = memory(session)
    with pytest.raises(Refusal) as caught:
        session.check(op)
    assert memory(session) == before
    return caught.value


def changed(op: ForwardOp, **columns: Any) -> ForwardOp:
    """The op with other columns."""
    return replace(op, **{name: i32(value) if isinstance(value, list) else value for name, value in columns.items()})


def with_column(name: str, index: int, value: int) -> Callable[[ForwardOp], ForwardOp]:
    """An edit that sets one entry of a column."""

    def edit(op: ForwardOp) -> ForwardOp:
        column = getattr(op, name).copy()
        column[index] = value
        return replace(op, **{name: column})

    return edit


def with_sampling(**parameters: Any) -> Callable[[ForwardOp], ForwardOp]:
    """An edit that sets the first lease start's sampling parameters."""

    def edit(op: ForwardOp) -> ForwardOp:
        return replace(op, lease_starts=[replace(op.lease_starts[0], sampling=SamplingParams(**parameters))])

    return edit


def all_decode(op: ForwardOp) -> ForwardOp:
    """The op with its first row made a decode row."""
    return changed(op, num_extend_rows=0, input_lens=[1, 1], input_ids=[])


VALID = make_op(2, first_chunk(2, pages=(3, 4, 5), ids=(1, 2, 3, 4, 5, 6, 7, 8, 9)), decode())
"""A second step of two rows, row 2 beginning a lease and row 1 going on; the first step was `first_chunk()`."""

REFUSED_OPS: list[tuple[str, Callable[[ForwardOp], ForwardOp], RefusalCode, int, str]] = [
    ("short column", lambda op: changed(op, sizes=[3]), RefusalCode.MALFORMED, 0, "req_pool_indices 2, sizes 1 entries"),
    ("long column", lambda op: changed(op, sample=np.ones(3, np.bool_)), RefusalCode.MALFORMED, 0, "sample 3"),
    ("num_extend_rows", lambda op: replace(op, num_extend_rows=3), RefusalCode.MALFORMED, 0, "num_extend_rows is 3"),
    ("row 0", with_column("req_pool_indices", 1, 0), RefusalCode.ROW_OUT_OF_RANGE, 0, "row numbers are in [1, 4]"),
    ("row too high", with_column("req_pool_indices", 1, 5), RefusalCode.ROW_OUT_OF_RANGE, 5, "holds 5"),
    ("negative row", with_column("req_pool_indices", 1, -7), RefusalCode.ROW_OUT_OF_RANGE, 0, "holds -7"),
    ("released row", lambda op: changed(op, released_rows=[9]), RefusalCode.ROW_OUT_OF_RANGE, 9, "released_rows holds 9"),
    ("row twice", with_column("req_pool_indices", 1, 2), RefusalCode.ROW_REPEATED, 2, "twice"),
    ("negative length", with_column("num_computed", 1, -1), RefusalCode.MALFORMED, 1, "num_computed -1"),
    ("negative begin", with_column("begins", 0, -1), RefusalCode.MALFORMED, 2, "begin -1"),
    ("no tokens", with_column("input_lens", 0, 0), RefusalCode.MALFORMED, 2, "input_len 0 of an extend row"),
    ("two decode tokens", with_column("input_lens", 1, 2), RefusalCode.MALFORMED, 1, "input_len 2 of a decode row"),
    ("sum", with_column("sizes", 0, 2), RefusalCode.LENGTH_MISMATCH, 2, "begin 0 + size 2 is not row_len 3"),
    ("generation 0", with_column("row_generations", 0, 0), RefusalCode.STALE_GENERATION, 2, "generation 0 is lower than 1"),
    ("stale generation", with_column("row_generations", 1, 0), RefusalCode.STALE_GENERATION, 1, "lower than 1"),
    (
        "tail of a new lease",
        with_column("row_generations", 1, 2),
        RefusalCode.LEASE_NOT_STARTED,
        1,
        "generation 2, whose lease was never refreshed",
    ),
    (
        "no lease start",
        lambda op: replace(op, lease_starts=[]),
        RefusalCode.LEASE_NOT_STARTED,
        2,
        "without its lease start",
    ),
    (
        "lost update",
        lambda op: changed(op, row_lens=[3, 3], begins=[0, 3], sizes=[3, 0]),
        RefusalCode.GAP,
        1,
        "begin 3 is not the row_len 2 last applied",
    ),
    ("lost step", with_column("num_computed", 1, 6), RefusalCode.NOT_CONTIGUOUS, 1, "num_computed 6 is not 5"),
    (
        "no page for a token",
        with_column("num_computed", 0, 4),
        RefusalCode.ROW_TOO_SHORT,
        2,
        "num_computed 4 + input_len 9 = 13 tokens, its 3 pages hold 12",
    ),
    ("never sampled", all_decode, RefusalCode.NEVER_SAMPLED, 2, "never asked for a token"),
    ("page 0", with_column("occupied_pages", 1, 0), RefusalCode.PAGE_OUT_OF_RANGE, 2, "page 0 is outside [1, 64]"),
    ("page too high", with_column("occupied_pages", 2, 65), RefusalCode.PAGE_OUT_OF_RANGE, 2, "page 65 is outside"),
    ("page twice", with_column("occupied_pages", 2, 3), RefusalCode.PAGE_REPEATED, 2, "page 3 is sent twice"),
    ("missing pages", lambda op: changed(op, occupied_pages=[3, 4]), RefusalCode.MALFORMED, 0, "has 2 entries"),
    ("surplus pages", lambda op: changed(op, occupied_pages=[3, 4, 5, 6]), RefusalCode.MALFORMED, 0, "ask for 3"),
    ("token", with_column("input_ids", 8, 100), RefusalCode.TOKEN_OUT_OF_RANGE, 2, "token 100 is outside [0, 100)"),
    ("negative token", with_column("input_ids", 0, -1), RefusalCode.TOKEN_OUT_OF_RANGE, 2, "token -1"),
    ("missing tokens", lambda op: changed(op, input_ids=[1, 2]), RefusalCode.MALFORMED, 0, "input_ids has 2 entries"),
    (
        "start of no row",
        lambda op: replace(op, lease_starts=[*op.lease_starts, LeaseStart(4, "x")]),
        RefusalCode.MALFORMED,
        4,
        "the op does not name",
    ),
    ("start twice", lambda op: replace(op, lease_starts=op.lease_starts * 2), RefusalCode.MALFORMED, 2, "two lease starts"),
    (
        "start of a lease that goes on",
        lambda op: replace(op, lease_starts=[*op.lease_starts, LeaseStart(1, "request-1")]),
        RefusalCode.MALFORMED,
        1,
        "whose lease goes on",
    ),
    (
        "stop id",
        lambda op: replace(op, lease_starts=[LeaseStart(2, "request-2", stop_ids=(100,))]),
        RefusalCode.TOKEN_OUT_OF_RANGE,
        2,
        "stop id 100",
    ),
    ("temperature", with_sampling(temperature=100.5), RefusalCode.BAD_SAMPLING, 2, "temperature 100.5 is outside [0, 100]"),
]


def second_step_session() -> SessionState:
    """A session in which `first_chunk()` was step 1."""
    session = new_session()
    apply(session, make_op(1, first_chunk()))
    return session


def test_valid_op_is_accepted() -> None:
    """The op that all refused ones are made from is itself accepted."""
    apply(second_step_session(), VALID)


@pytest.mark.parametrize(("edit", "code", "row", "detail"), [case[1:] for case in REFUSED_OPS], ids=[c[0] for c in REFUSED_OPS])
def test_refused_ops(edit: Callable[[ForwardOp], ForwardOp], code: RefusalCode, row: int, detail: str) -> None:
    """Each wrong op is refused with its code, the row, the request and the value, and no row has changed."""
    session = second_step_session()
    op = edit(VALID)
    refusal = refused(session, op)
    assert (refusal.code, refusal.row, refusal.session_no, refusal.step) == (code, row, 1, 2)
    assert detail in refusal.detail
    if row == 1 or (row == 2 and op.lease_starts):
        assert refusal.request_id == f"request-{row}"
        assert refusal.detail.startswith(f"row {row} of request 'request-{row}': ")


@pytest.mark.parametrize(
    ("parameters", "prompt_len", "message"),
    [
        ({"temperature": -0.1}, 0, "temperature -0.1"),
        ({"temperature": float("nan")}, 0, "temperature nan"),
        ({"top_k": 0}, 0, "top_k 0 is below 1"),
        ({"top_p": 0.0}, 0, "top_p 0.0 is outside (0, 1]"),
        ({"top_p": 1.01}, 0, "top_p 1.01"),
        ({"min_p": -0.5}, 0, "min_p -0.5"),
        ({"min_p": 1.5}, 0, "min_p 1.5 is outside [0, 1]"),
        ({"seed": -1}, 0, "seed -1"),
        ({"seed": 2**64}, 0, "seed 18446744073709551616"),
        ({"min_new_tokens": -1}, 0, "min_new_tokens -1"),
        ({"min_new_tokens": 3}, 0, "needs prompt_len"),
        ({"min_new_tokens": 3}, 5, ""),
        ({"temperature": 100.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "seed": 2**64 - 1}, 0, ""),
    ],
)
def test_sampling_ranges(parameters: dict[str, Any], prompt_len: int, message: str) -> None:
    """Each sampling parameter has its range, ends included as the protocol says."""
    found = sampling_error(SamplingParams(**parameters), prompt_len)
    assert message in found
    assert bool(found) == bool(message)


def test_first_refusal_makes_later_ops_skipped_until_reset() -> None:
    """After one refused op even a right one is SKIPPED; a reset starts again at step 1 with no rows."""
    session = second_step_session()
    assert refused(session, make_op(4, decode())).code is RefusalCode.STEP_OUT_OF_ORDER
    skipped = refused(session, make_op(2, decode()))
    assert skipped.code is RefusalCode.SKIPPED
    assert "step 4 was answered STEP_OUT_OF_ORDER" in skipped.detail
    assert (skipped.session_no, skipped.step) == (1, 2)
    session.reset(2)
    assert session.lease_rows().tolist() == []
    assert session.request_ids == {}
    apply(session, make_op(1, first_chunk(), session_no=2))


def test_failed_step_makes_later_ops_skipped() -> None:
    """A failed step breaks the session like a refused op."""
    session = new_session()
    op = make_op(1, first_chunk())
    session.check(op)
    session.commit(op)
    failure = session.fail(op, RefusalCode.OUT_OF_MEMORY, "no memory")
    assert (failure.code, failure.session_no, failure.step, failure.detail) == (RefusalCode.OUT_OF_MEMORY, 1, 1, "no memory")
    assert refused(session, make_op(2, decode())).code is RefusalCode.SKIPPED


def test_refusal_found_elsewhere_breaks_the_session_once() -> None:
    """Unreadable bytes break the session; when it is already broken they are SKIPPED like everything else."""
    session = new_session()
    unreadable = Refusal(RefusalCode.MALFORMED, detail="odd bytes", session_no=1, step=1)
    assert session.refuse(unreadable) is unreadable
    assert session.refuse(unreadable).code is RefusalCode.SKIPPED
    assert refused(session, make_op(1, first_chunk())).code is RefusalCode.SKIPPED


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_repeats_are_answered_from_the_last_results(overlap_depth: int) -> None:
    """Exactly the last overlap_depth + 1 steps are answered again, and nothing is applied twice."""
    session = new_session(overlap_depth=overlap_depth)
    ops = [make_op(1, first_chunk())] + [make_op(step, decode(computed=3 + step)) for step in (2, 3, 4)]
    for op in ops:
        apply(session, op)
    before = memory(session)
    for op in ops[3 - overlap_depth :]:
        stored = session.check(op)
        assert stored is not None
        assert stored.step == op.step
        assert stored.tokens.tolist() == [op.step]
    assert memory(session) == before
    refusal = refused(session, ops[2 - overlap_depth])
    assert refusal.code is RefusalCode.STEP_OUT_OF_ORDER
    assert f"steps {4 - overlap_depth} to 4 are kept" in refusal.detail


@pytest.mark.parametrize("session_no", [0, 1, 3])
def test_ops_of_another_session_are_refused(session_no: int) -> None:
    """Only the present session's number is taken: not unset, not an older one, not one to come."""
    session = new_session()
    session.reset(2)
    refusal = refused(session, make_op(1, first_chunk(), session_no=session_no))
    assert refusal.code is RefusalCode.UNKNOWN_SESSION
    assert f"of session {session_no}, the present one is 2" in refusal.detail


def test_ops_without_a_session_are_refused() -> None:
    """Before open() and after close() nothing is executed."""
    session = SessionState(4, 8, 64, PAGE_SIZE, 100)
    assert refused(session, make_op(1, first_chunk())).code is RefusalCode.UNKNOWN_SESSION
    session.open(EPOCH, 1, 0)
    apply(session, make_op(1, first_chunk()))
    session.close()
    assert (session.session_no, session.last_step, session.request_ids) == (0, 0, {})
    assert refused(session, make_op(1, first_chunk())).code is RefusalCode.UNKNOWN_SESSION


def test_session_numbers_of_one_scheduler_only_rise() -> None:
    """An equal or lower number is refused by open and reset, also after close; another scheduler may begin anywhere."""
    session = new_session()
    session.reset(5)
    apply(session, make_op(1, first_chunk(), session_no=5))
    before = memory(session)
    for attempt in (lambda: session.open(EPOCH, 5, 1), lambda: session.reset(4)):
        with pytest.raises(Refusal, match="not higher than 5"):
            attempt()
        assert memory(session) == before
    session.close()
    with pytest.raises(Refusal, match="not higher than 5"):
        session.open(EPOCH, 3, 1)
    session.open(EPOCH + 1, 1, 1)
    assert session.session_no == 1


@pytest.mark.parametrize(("epoch", "session_no", "depth"), [(0, 1, 0), (EPOCH, 0, 0), (EPOCH, 1, 3), (EPOCH, 1, -1)])
def test_open_refuses_impossible_numbers(epoch: int, session_no: int, depth: int) -> None:
    """No scheduler has epoch 0, session 0 or a depth outside [0, 2]."""
    session = SessionState(4, 8, 64, PAGE_SIZE, 100)
    with pytest.raises(ValueError, match="must be"):
        session.open(epoch, session_no, depth)
    assert session.session_no == 0
    with pytest.raises(ValueError, match="before any session"):
        session.reset(2)


def test_first_op_of_a_lease_may_start_anywhere_and_later_ones_not() -> None:
    """A cached prefix was computed by others, so a lease begins at any num_computed; from then on steps are contiguous."""
    session = new_session()
    apply(session, make_op(1, first_chunk(pages=(1, 2, 3), computed=8, ids=(1,))))
    refusal = refused(session, make_op(2, decode(computed=8, row_len=3, begin=3)))
    assert refusal.code is RefusalCode.NOT_CONTIGUOUS


def test_refreshed_rows_of_a_lease_must_be_contiguous_too() -> None:
    """A refresh rewrites pages; it does not excuse a lost step."""
    session = second_step_session()
    refusal = refused(session, make_op(2, Row(1, (1, 2), 2, begin=2, computed=6)))
    assert refusal.code is RefusalCode.NOT_CONTIGUOUS


def test_refresh_within_a_lease_does_not_compare_begin() -> None:
    """full_refresh overrides begin, so a row that shrank or flipped below begin is taken as it is sent."""
    session = second_step_session()
    apply(session, make_op(2, Row(1, (7, 8), 2, begin=2, computed=5)))
    apply(session, make_op(3, decode(computed=6, row_len=3, pages=(1,))))


def test_released_row_needs_a_higher_generation() -> None:
    """A release ends the lease: its generation is refused from then on, the next one is a new lease."""
    session = second_step_session()
    apply(session, make_op(2, released=(1,)))
    assert session.request_ids == {}
    assert session.lease_rows().tolist() == []
    other = second_step_session()
    apply(other, make_op(2, released=(1,)))
    apply(other, make_op(3, first_chunk(generation=2)))
    assert other.generations(np.array([1, 2])).tolist() == [2, 0]
    refusal = refused(session, make_op(3, first_chunk()))
    assert refusal.code is RefusalCode.STALE_GENERATION
    assert "generation 1 was released" in refusal.detail


def test_row_may_be_released_and_leased_again_in_one_op() -> None:
    """Releases come before everything else of an op; the same generation does not survive one."""
    session = second_step_session()
    apply(session, make_op(2, first_chunk(pages=(9,), ids=(1,), generation=2), released=(1, 1, 3)))
    assert session.request_ids == {1: "request-1"}
    refusal = refused(session, make_op(3, decode(computed=1, row_len=1, begin=1, generation=2), released=(1,)))
    assert refusal.code is RefusalCode.STALE_GENERATION


def test_higher_generation_ends_a_lease_without_a_release() -> None:
    """A new lease forgets what the old one sampled, computed and held."""
    session = second_step_session()
    apply(session, make_op(2, first_chunk(pages=(2,), ids=(1,), sample=False, generation=7)))
    refusal = refused(session, make_op(3, decode(computed=1, row_len=1, begin=1, generation=7)))
    assert refusal.code is RefusalCode.NEVER_SAMPLED


def test_decode_needs_a_sampled_lease() -> None:
    """A chunk without sampling gives no last token; the chunk that ends the prompt does."""
    session = new_session()
    apply(session, make_op(1, first_chunk(sample=False)))
    apply(session, make_op(2, Row(1, (1, 2), 2, begin=2, computed=5, ids=(3,), sample=True)))
    apply(session, make_op(3, decode(computed=6)))


def test_tail_page_that_the_row_already_holds_is_refused() -> None:
    """The aliased row of a tail-only mirror, [1, 2] + [1], is a page twice in a row and refused without reading the mirror."""
    session = second_step_session()
    refusal = refused(session, make_op(2, decode(computed=5, row_len=3, pages=(1,))))
    assert refusal.code is RefusalCode.PAGE_REPEATED
    assert "page 1 is already in the row" in refusal.detail


def test_pages_that_a_refresh_took_away_may_come_back() -> None:
    """After the row was rewritten to [3, 2] its former page 1 is an ordinary page again."""
    session = second_step_session()
    apply(session, make_op(2, Row(1, (3, 2), 2, begin=2, computed=5)))
    apply(session, make_op(3, decode(computed=6, row_len=3, pages=(1,))))
    refusal = refused(session, make_op(4, decode(computed=7, row_len=4, begin=3, pages=(2,))))
    assert refusal.code is RefusalCode.PAGE_REPEATED


def test_clamped_row_goes_on_without_a_second_refusal() -> None:
    """A row wider than a 513-page mirror goes on for 1,000 tokens: begin is compared with the stated length."""
    width = 513
    session = new_session(max_pages_per_row=width, num_pages=1000)
    pages = tuple(range(1, width + 1))
    tokens = width * PAGE_SIZE
    apply(session, make_op(1, first_chunk(pages=pages, computed=tokens - 1, ids=(1,))))
    row_len, computed = width, tokens
    for step in range(2, 1002):
        needed = computed // PAGE_SIZE + 1
        new = tuple(range(row_len + 1, needed + 1))
        apply(session, make_op(step, decode(computed=computed, row_len=needed, begin=row_len, pages=new)))
        row_len, computed = needed, computed + 1
    assert row_len == width + 250
    refusal = refused(session, make_op(1002, decode(computed=computed, row_len=width, begin=width)))
    assert refusal.code is RefusalCode.GAP


def test_row_too_short_is_not_refused_when_it_is_clamped() -> None:
    """Past the mirror's width tokens are not computed anyway; within it every token needs a page."""
    width = 3
    for row_len, accepted in ((width, False), (width + 1, True)):
        session = new_session(max_pages_per_row=width)
        op = make_op(1, first_chunk(pages=tuple(range(1, row_len + 1)), computed=40, ids=(1,)))
        if accepted:
            apply(session, op)
        else:
            assert refused(session, op).code is RefusalCode.ROW_TOO_SHORT


def test_sums_of_hostile_lengths_do_not_wrap() -> None:
    """Lengths whose 32-bit sums would wrap into agreement are refused."""
    top = 2**31 - 1
    session = new_session(overlap_depth=0)
    op = changed(make_op(1, first_chunk()), num_computed=[top])
    assert refused(session, op).code is RefusalCode.ROW_TOO_SHORT
    session.reset(2)
    op = changed(make_op(1, first_chunk(), session_no=2), begins=[top], sizes=[top])
    assert refused(session, op).code is RefusalCode.LENGTH_MISMATCH
    session.reset(3)
    op = changed(make_op(1, first_chunk(), session_no=3), row_lens=[top], sizes=[top])
    assert refused(session, op).code is RefusalCode.MALFORMED


def test_more_rows_than_row_numbers_is_a_repeat() -> None:
    """Five rows on four row numbers: one comes twice."""
    session = new_session()
    refusal = refused(session, make_op(1, *(first_chunk(row, pages=(row,), ids=(1,)) for row in (1, 2, 3, 4, 3))))
    assert (refusal.code, refusal.row) == (RefusalCode.ROW_REPEATED, 3)


def test_lenient_session_lets_stale_updates_pass_and_nothing_else() -> None:
    """`tail_only` needs gaps, generations and aliased tails to pass; impossible ids are refused all the same."""
    session = new_session(lenient=True)
    apply(session, make_op(1, first_chunk(pages=(1, 2))))
    apply(session, make_op(2, released=(1,)))
    resumed = Row(1, (1,), row_len=3, begin=2, full=False, computed=4, ids=(8, 9), generation=2, start="request-1")
    apply(session, make_op(3, resumed))
    apply(session, make_op(4, decode(computed=9, row_len=3, begin=3, generation=1)))
    assert refused(session, make_op(5, decode(row_len=4, begin=3, pages=(65,)))).code is RefusalCode.PAGE_OUT_OF_RANGE


def test_zero_row_op_only_releases() -> None:
    """An op without rows is a step like any other."""
    session = second_step_session()
    apply(session, make_op(2, released=(1,)))
    assert session.last_step == 2


def test_detail_is_bounded() -> None:
    """A refusal about a request with an endless id still fits the limit."""
    session = new_session()
    op = make_op(1, replace(first_chunk(), start="x" * 5000))
    refusal = refused(session, with_column("occupied_pages", 0, 0)(op))
    assert len(refusal.detail) == MAX_DETAIL_LEN
    assert str(refusal).startswith("PAGE_OUT_OF_RANGE: row 1 of request 'xxx")


def test_decode_batches_are_checked_without_work_per_row() -> None:
    """Sixteen times the rows cost far less than sixteen times the time."""

    def seconds(num_rows: int) -> float:
        session = SessionState(num_rows, 64, 64 * num_rows, 16, 100)
        session.open(EPOCH, 1, 1)
        rows = np.arange(1, num_rows + 1, dtype=np.int32)
        ones, zeros = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
        flags = np.ones(num_rows, np.bool_)
        starts = [LeaseStart(int(row), "") for row in rows]
        nothing = i32([])
        prefill = ForwardOp(
            1, 1, rows, ones, ones, zeros, ones, flags, rows, zeros, num_rows, ones, zeros, flags, nothing, starts
        )
        apply(session, prefill)
        op = ForwardOp(1, 2, rows, ones, ones, ones, zeros, ~flags, nothing, ones, 0, ones, nothing, flags, nothing)
        samples = []
        for _ in range(50):
            begin = time.perf_counter()
            assert session.check(op) is None
            samples.append(time.perf_counter() - begin)
        return min(samples)

    assert seconds(1024) < 5 * seconds(64)
