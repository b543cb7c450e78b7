"""The quick look at ops of decode rows with a few special ones against the rules: same answers, same memory, same refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_service.errors import Refusal
from runtime_service.mixed_decode import MAX_SPECIAL, MixedOp
from runtime_service.ops import ForwardOp, LeaseStart, SamplingParams

NUM_ROWS, PAGE_SIZE, NUM_PAGES, WIDTH = 6, 4, 64, 4
INT32 = [-(1 << 31), -1, 0, 1, 2, 3, 4, 5, 63, 64, 65, 100, 1 << 30, (1 << 31) - 1]
ROW_COLUMNS = ("req_pool_indices", "row_generations", "row_lens", "begins", "sizes", "num_computed", "input_lens")
COLUMNS = (*ROW_COLUMNS, "occupied_pages", "full_refresh", "sample", "released_rows", "input_ids")


class NoLook:
    """Stands for `PlainDecode` and says nothing of any op."""

    def look(self, *args: Any) -> None:
        return None


@dataclass
class Lives:
    """What a scheduler would know of the rows, and ops that follow from it. A page is of one row: 10 · row + place."""

    ops: Any
    generation: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)  # of the rows that have a lease
    num_pages: dict[int, int] = field(default_factory=dict)
    prefilling: set[int] = field(default_factory=set)

    def op(self, step: int, wanted: dict[int, str], released: tuple[int, ...] = ()) -> ForwardOp:
        """One op. `wanted` says of each row whether it goes on, is refreshed as it does, or has a chunk computed."""
        for row in released:
            self.computed.pop(row, None)
            self.prefilling.discard(row)
        extend: list[Any] = []
        decode: list[Any] = []
        for row, what in wanted.items():
            new = row not in self.computed
            if new:
                self.generation[row] = self.generation.get(row, 0) + 1
                self.computed[row] = self.num_pages[row] = 0
            is_chunk = new or row in self.prefilling or what == "chunk"
            ids = (5, 6, 7)[: 1 + row % 3] if is_chunk else None
            computed, begin = self.computed[row], self.num_pages[row]
            self.computed[row] += len(ids or "1")
            self.num_pages[row] = -(-self.computed[row] // PAGE_SIZE)
            full = new or what == "refresh"
            pages = tuple(10 * row + place for place in range(0 if full else begin, self.num_pages[row]))
            sample = what != "chunk"
            (self.prefilling.discard if sample else self.prefilling.add)(row)
            made = self.ops.Row(row, pages, self.num_pages[row], begin, full, self.generation[row], computed, ids, sample)
            (extend if is_chunk else decode).append(replace(made, start=f"r{self.generation[row]}") if new else made)
        made_op: ForwardOp = self.ops.make(step, *extend, *decode, released=released)
        return made_op


def answer(session: Any, op: ForwardOp) -> Any:
    """What became of the op, and everything that is remembered after it."""
    try:
        session.check(op)
    except Refusal as refusal:
        return (refusal.code, refusal.row, refusal.request_id, refusal.detail), session.memory()
    session.commit(op)
    return None, session.memory()


def changed(data: st.DataObject, op: ForwardOp) -> ForwardOp:
    """The op with one thing changed."""
    column = data.draw(st.sampled_from([*COLUMNS, "num_extend_rows", "lease_starts"]))
    if column == "num_extend_rows":
        return replace(op, num_extend_rows=data.draw(st.integers(-1, op.num_rows + 1)))
    if column == "lease_starts":
        kind = data.draw(st.sampled_from(["none", "more", "twice", "bad"]))
        more = [LeaseStart(data.draw(st.integers(0, NUM_ROWS + 1)), "x")]
        bad = [replace(lease, sampling=SamplingParams(temperature=-1.0)) for lease in op.lease_starts]
        return replace(
            op, lease_starts={"none": [], "more": op.lease_starts + more, "twice": op.lease_starts * 2, "bad": bad}[kind]
        )
    values = getattr(op, column).copy()
    what = data.draw(st.sampled_from(["entry", "more", "fewer"] if len(values) else ["more"]))
    if what == "fewer":
        return replace(op, **{column: values[:-1]})
    if values.dtype == np.bool_:
        new: Any = data.draw(st.booleans())
    elif column in {"released_rows", "req_pool_indices"}:
        new = data.draw(st.integers(0, NUM_ROWS + 1))
    elif column == "occupied_pages":
        new = data.draw(st.sampled_from([*INT32, *values.tolist()]))
    else:
        new = data.draw(st.sampled_from(INT32))
    if what == "more":
        return replace(op, **{column: np.append(values, np.array(new, dtype=values.dtype))})
    values[data.draw(st.integers(0, len(values) - 1))] = new
    return replace(op, **{column: values})


def two_sessions(make: Callable[..., Any], **limits: int) -> tuple[Any, Any]:
    """Two sessions, the second one without a quick look."""
    chosen = {"max_rows": NUM_ROWS, "max_pages_per_row": WIDTH, "num_pages": NUM_PAGES + 10, "page_size": PAGE_SIZE} | limits
    quick, slow = make(**chosen), make(**chosen)
    slow._plain = NoLook()
    return quick, slow


# The fixtures hold no state: they make sessions.
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lives_of_rows_are_answered_as_the_rules_answer(data: st.DataObject, ops: Any, new_session: Callable[..., Any]) -> None:
    """Admissions, chunks, refreshes and releases among decode rows, and any one or two changes of such an op."""
    quick, slow = two_sessions(new_session)
    lives = Lives(ops)
    lives_op = lives.op(1, dict.fromkeys(range(1, NUM_ROWS), "go on"))
    assert answer(quick, lives_op) == answer(slow, lives_op)
    for step in range(2, 6):
        rows = data.draw(st.permutations(range(1, NUM_ROWS + 1)))[: data.draw(st.integers(1, NUM_ROWS))]
        wanted = {row: data.draw(st.sampled_from(["go on", "go on", "refresh", "chunk"])) for row in rows}
        op = lives.op(step, wanted, tuple(data.draw(st.sets(st.integers(1, NUM_ROWS), max_size=2))))
        for _ in range(data.draw(st.integers(0, 2)) if step == 5 else 0):
            op = changed(data, op)
        first, second = answer(quick, op), answer(slow, op)
        assert first == second
        if first[0] is not None:
            return


@pytest.mark.parametrize(
    ("wanted", "released"),
    [
        ({1: "go on", 2: "refresh", 3: "go on"}, ()),
        ({4: "go on", 1: "go on", 2: "go on"}, ()),
        ({1: "go on", 2: "go on"}, (3,)),
        ({3: "go on", 1: "chunk", 2: "refresh"}, (3,)),
    ],
    ids=["a refresh", "an admission", "a release", "a row leased anew, a chunk and a refresh"],
)
def test_a_few_special_rows_do_not_lose_the_quick_look(
    ops: Any, new_session: Callable[..., Any], wanted: dict[int, str], released: tuple[int, ...]
) -> None:
    """Refreshed, extended and released rows among decode rows are taken by the look and leave what the rules leave."""
    quick, slow = two_sessions(new_session)
    lives = Lives(ops)
    first = lives.op(1, dict.fromkeys((1, 2, 3), "go on"))
    assert answer(quick, first) == answer(slow, first)
    op = lives.op(2, wanted, released)
    assert isinstance(quick._plain.look(op, quick._view), MixedOp)
    assert answer(quick, op) == answer(slow, op)


def test_many_special_rows_are_looked_at_by_columns(ops: Any, new_session: Callable[..., Any]) -> None:
    """One refreshed row more than the look takes is the rules' to judge, with the same memory afterwards."""
    num_rows = MAX_SPECIAL + 1
    quick, slow = two_sessions(new_session, max_rows=num_rows, num_pages=10 * num_rows + 10)
    lives = Lives(ops)
    for step, what in ((1, "go on"), (2, "refresh")):
        op = lives.op(step, dict.fromkeys(range(1, num_rows + 1), what))
        assert quick._plain.look(op, quick._view) is None
        assert answer(quick, op) == answer(slow, op)
    op = lives.op(3, dict.fromkeys(range(1, num_rows), "refresh") | {num_rows: "go on"})
    assert quick._plain.look(op, quick._view) is not None
    assert answer(quick, op) == answer(slow, op)
