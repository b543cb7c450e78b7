"""Sessions, and ops written row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, LeaseStart, StepResult
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


class Ops:
    """Ops and their rows."""

    Row = Row

    @staticmethod
    def make(step: int, *rows: Row, session_no: int = 1, released: tuple[int, ...] = ()) -> ForwardOp:
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

    @staticmethod
    def first_chunk(row: int = 1, pages: tuple[int, ...] = (1, 2), ids: tuple[int, ...] = (5, 6, 7, 8, 9), **more: Any) -> Row:
        """The op row that begins a lease."""
        return Row(row, pages, row_len=len(pages), ids=ids, start=f"request-{row}", **more)

    @staticmethod
    def decode(row: int = 1, computed: int = 5, row_len: int = 2, begin: int = 2, **more: Any) -> Row:
        """A decode row after `first_chunk()`'s five tokens."""
        return replace(Row(row, (), row_len=row_len, begin=begin, full=False, computed=computed), **more)


class HandSession(SessionState):
    """The session under test, and what tests do with it."""

    def take(self, op: ForwardOp) -> None:
        """Take an op all the way; the tokens of its result are the step's number."""
        assert self.check(op) is None
        self.commit(op)
        tokens, row_status = np.full(op.num_rows, op.step, np.int32), np.zeros(op.num_rows, np.uint8)
        self.store(StepResult(op.session_no, op.step, tokens, row_status))

    def memory(self) -> list[Any]:
        """Everything a session remembers of rows, to compare before and after."""
        view = self._view
        columns = (view.generation, view.live, view.row_len, view.end, view.sampled, self._held, self._released)
        return [column.tolist() for column in columns] + [dict(self.request_ids), self.last_step]

    def refused(self, op: ForwardOp) -> Refusal:
        """The refusal of an op, after a look that no row has changed."""
        before = self.memory()
        with pytest.raises(Refusal) as caught:
            self.check(op)
        assert self.memory() == before
        return caught.value


@pytest.fixture
def ops() -> type[Ops]:
    """How ops are written."""
    return Ops


@pytest.fixture
def new_session() -> Callable[..., HandSession]:
    """A session of four rows, opened as number 1."""

    def make(
        *,
        max_rows: int = 4,
        max_pages_per_row: int = 8,
        num_pages: int = 64,
        page_size: int = PAGE_SIZE,
        overlap_depth: int = 1,
        opened: bool = True,
        **more: Any,
    ) -> HandSession:
        session = HandSession(max_rows, max_pages_per_row, num_pages, page_size, 100, **more)
        if opened:
            session.open(EPOCH, 1, overlap_depth)
        return session

    return make


@pytest.fixture
def begun_session(new_session: Callable[..., HandSession]) -> Callable[[], HandSession]:
    """A session in which `first_chunk()` was step 1."""

    def make() -> HandSession:
        session = new_session()
        session.take(Ops.make(1, Ops.first_chunk()))
        return session

    return make
