"""The quick look at ops of decode rows against the rules themselves: same answers, same memory, whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp
from runtime_service.session import SessionState

NUM_ROWS, PAGE_SIZE, NUM_PAGES, WIDTH = 6, 4, 64, 4
INT32 = [-(1 << 31), -1, 0, 1, 2, 3, 4, 5, 63, 64, 65, 1 << 30, (1 << 31) - 1]
COLUMNS = ("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "num_computed", "input_lens")

Pair = tuple[SessionState, SessionState]


class NoLook:
    """Stands for `PlainDecode` and says nothing of any op."""

    def look(self, *args: Any) -> None:
        return None


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A column."""
    return np.array(values, dtype=np.int32)


def begun(ops: Any, make: Callable[..., Any]) -> Pair:
    """Two sessions, the second one without the quick look, in which every row has a lease of one page and 3 tokens."""
    sessions = tuple(make(max_rows=NUM_ROWS, max_pages_per_row=WIDTH, num_pages=NUM_PAGES, page_size=PAGE_SIZE) for _ in "ab")
    sessions[1]._plain = NoLook()
    for session in sessions:
        session.take(ops.make(1, *(ops.first_chunk(row, (row,), (5, 6, 7)) for row in range(1, NUM_ROWS + 1))))
    return sessions


def decode_op(step: int, rows: list[int], computed: int, lens: dict[int, int]) -> ForwardOp:
    """Decode rows after `computed` tokens each, with the pages they need now; `lens` is brought up to date."""
    num_pages = -(-(computed + 1) // PAGE_SIZE)
    begins = [lens[row] for row in rows]
    lens |= dict.fromkeys(rows, num_pages)
    sizes = [num_pages - begin for begin in begins]
    count = len(rows)
    return ForwardOp(
        session_no=1,
        step=step,
        req_pool_indices=i32(rows),
        row_generations=i32([1] * count),
        row_lens=i32([num_pages] * count),
        begins=i32(begins),
        sizes=i32(sizes),
        full_refresh=np.zeros(count, dtype=np.bool_),
        occupied_pages=i32([row + NUM_ROWS * begin for row, begin, size in zip(rows, begins, sizes, strict=True) if size]),
        num_computed=i32([computed] * count),
        num_extend_rows=0,
        input_lens=i32([1] * count),
        input_ids=i32([]),
        sample=np.ones(count, dtype=np.bool_),
        released_rows=i32([]),
    )


def answer(session: Any, op: ForwardOp) -> Any:
    """What became of the op, and everything that is remembered after it."""
    try:
        session.check(op)
    except Refusal as refusal:
        return (refusal.code, refusal.row, refusal.request_id, refusal.detail), session.memory()
    session.commit(op)
    return None, session.memory()


def test_quick_look_takes_ordinary_decode_steps(ops: Any, new_session: Callable[..., Any]) -> None:
    """Nine steps of changing rows, with and without new pages, are all taken by the look and leave what the rules leave."""
    quick, slow = begun(ops, new_session)
    lens = dict.fromkeys(range(1, NUM_ROWS + 1), 1)
    order = np.random.default_rng(3)
    for step in range(2, 11):
        rows = order.permutation(np.arange(1, NUM_ROWS + 1)).tolist()
        op = decode_op(step, rows, step + 1, lens)
        taken = quick._plain.look(op, quick._view)
        assert taken is not None
        assert answer(quick, op) == answer(slow, op)
    assert set(lens.values()) == {3}


# The fixtures hold no state: they make sessions.
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_an_entry_is_answered_as_the_rules_answer(
    data: st.DataObject, ops: Any, new_session: Callable[..., Any]
) -> None:
    """One or two entries of any column, an added or lost entry, another order: the look never takes what is refused."""
    quick, slow = begun(ops, new_session)
    lens = dict.fromkeys(range(1, NUM_ROWS + 1), 1)
    rows = data.draw(st.lists(st.integers(1, NUM_ROWS), unique=True, min_size=1))
    for step in (2, 3):
        op = decode_op(step, rows, step + 1, lens)
        for _ in range(data.draw(st.integers(0, 2)) if step == 3 else 0):
            op = changed(data, op)
        first, second = answer(quick, op), answer(slow, op)
        assert first == second


def changed(data: st.DataObject, op: ForwardOp) -> ForwardOp:
    """The op with one thing changed."""
    column = data.draw(st.sampled_from([*COLUMNS, "occupied_pages", "full_refresh", "sample", "released_rows", "input_ids"]))
    values = getattr(op, column).copy()
    what = data.draw(st.sampled_from(["entry", "more", "fewer"] if len(values) else ["more"]))
    if what == "fewer":
        return replace(op, **{column: values[:-1]})
    if values.dtype == np.bool_:
        new: Any = data.draw(st.booleans())
    elif column in {"released_rows", "req_pool_indices"}:
        new = data.draw(st.integers(0, NUM_ROWS + 1))
    else:
        new = data.draw(st.sampled_from(INT32))
    if what == "more":
        return replace(op, **{column: np.append(values, np.array(new, dtype=values.dtype))})
    values[data.draw(st.integers(0, len(values) - 1))] = new
    return replace(op, **{column: values})


def test_faults_that_only_look_like_an_ordinary_step_are_refused(ops: Any, new_session: Callable[..., Any]) -> None:
    """A released row, a missing page, and two pages announced where one is sent are refused as the rules refuse them."""

    def released(op: ForwardOp, sessions: Pair) -> ForwardOp:
        for session in sessions:
            session.take(ops.make(2, released=(1,)))  # type: ignore[attr-defined]
        # Its generation, its length and where it ended are still known, and are what the op says.
        return replace(op, step=3)

    def two_for_one(op: ForwardOp, sessions: Pair) -> ForwardOp:
        return replace(op, sizes=i32([2, 0]), row_lens=i32([3, 1]), occupied_pages=i32([20]))

    for change in (released, two_for_one):
        sessions = begun(ops, new_session)
        op = change(decode_op(2, [1, 2], 3, dict.fromkeys((1, 2), 1)), sessions)
        first, second = (answer(session, op) for session in sessions)
        assert first == second
        assert first[0] is not None
    sessions = begun(ops, new_session)
    lens = dict.fromkeys((1, 2), 1)
    for session in sessions:
        session.take(decode_op(2, [1, 2], 3, dict(lens)))
    full_pages = decode_op(3, [1, 2], 4, dict(lens))
    short = replace(full_pages, sizes=i32([0, 0]), row_lens=i32([1, 1]), occupied_pages=i32([]))
    first, second = (answer(session, short) for session in sessions)
    assert first == second
    assert first[0][0].name == "ROW_TOO_SHORT"
