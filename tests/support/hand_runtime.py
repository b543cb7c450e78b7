"""The runtime alone, given ops that a test has written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime_service.errors import Refusal
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import ForwardOp, LeaseStart, RowStatus
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner


@dataclass
class Row:
    """One row of an op: `pages` is the whole row after the transition, `ids` are the tokens of an extend row.

    `begin` defaults to the row's whole length for a tail update and to 0 for a refresh; `size` is the rest. A higher
    `generation` than the row number had begins a lease.
    """

    row: int
    pages: list[int]
    computed: int
    ids: list[int] | None = None
    full: bool = False
    begin: int | None = None
    generation: int = 1
    name: str = ""


class HandRuntime:
    """Session checks, mirror and fingerprint model. Each step also looks whether anything that its op does not name changed."""

    def __init__(
        self, *, page_size: int = 4, num_pages: int = 16, width: int = 16, max_rows: int = 8, lenient: bool = False
    ) -> None:
        limits = (max_rows, width, num_pages, page_size)
        self.page_size = page_size
        self.model = FingerprintExecutor(num_pages, page_size)
        self.mirror = ReqToPage(*limits, zero_fill=not lenient)
        session = SessionState(*limits, self.model.info.vocab_size, lenient=lenient)
        self.runner = StepRunner(session, self.mirror, self.model)
        self.runner.open(1, 1, 2)
        self.lenient = lenient
        self.status: list[RowStatus] = []
        self._generations: dict[int, int] = {}
        self._step = 0

    def step(self, *rows: Row, released: tuple[int, ...] = ()) -> list[int]:
        """Run one op; its tokens, in the order of its rows."""
        table, cells = self.table(), self.cells()
        answer = self.runner.run(self._op(rows, released))
        assert not isinstance(answer, Refusal), answer
        named = {row.row for row in rows} | set(released)
        others = [row for row in range(len(table)) if row not in named]
        assert self.table()[others].tolist() == table[others].tolist()
        written = {self.slot(row, position) for row in rows for position in self._positions(row)}
        untouched = [slot for slot in range(len(cells)) if slot not in written]
        assert self.cells()[untouched].tolist() == cells[untouched].tolist()
        if not self.lenient:
            assert self.model.violations == []
        self.status = [RowStatus(status) for status in answer.row_status.tolist()]
        return answer.tokens.tolist()

    def refused(self, *rows: Row) -> str:
        """Run one op that must be refused and change nothing; the code's name."""
        table, cells = self.table(), self.cells()
        answer = self.runner.run(self._op(rows, ()))
        assert isinstance(answer, Refusal), answer
        assert (self.table().tolist(), self.cells().tolist()) == (table.tolist(), cells.tolist())
        return answer.code.name

    def row(self, row: int) -> list[int]:
        """The valid part of a mirror row."""
        return self.mirror.row(row).tolist()

    def table(self) -> npt.NDArray[np.int32]:
        """A copy of the whole mirror."""
        return self.mirror.table.numpy().copy()

    def cells(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens of all KV cells."""
        return self.model._tokens.numpy().copy()

    def poison(self, *pages: int) -> None:
        """Make these pages ones whose contents no request may read."""
        for page in pages:
            self.model._tokens[page * self.page_size : (page + 1) * self.page_size] = -(1 << 30)

    def slot(self, row: Row, position: int) -> int:
        """Where a token lies."""
        return row.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _positions(self, row: Row) -> range:
        end = row.computed + (1 if row.ids is None else len(row.ids))
        return range(row.computed, min(end, self.mirror.max_pages_per_row * self.page_size))

    def _op(self, rows: tuple[Row, ...], released: tuple[int, ...]) -> ForwardOp:
        self._step += 1
        starts = []
        for row in rows:
            if row.generation > self._generations.get(row.row, 0):
                self._generations[row.row] = row.generation
                starts.append(LeaseStart(row.row, row.name or f"request-{row.row}"))
        extends = [row for row in rows if row.ids is not None]
        assert list(rows[: len(extends)]) == extends, "extend rows come first"
        lens = _i32([len(row.pages) for row in rows])
        begins = _i32([(0 if row.full else len(row.pages)) if row.begin is None else row.begin for row in rows])
        sent = [row.pages if row.full else row.pages[begin:] for row, begin in zip(rows, begins.tolist(), strict=True)]
        return ForwardOp(
            session_no=1,
            step=self._step,
            req_pool_indices=_i32([row.row for row in rows]),
            row_generations=_i32([row.generation for row in rows]),
            row_lens=lens,
            begins=begins,
            sizes=lens - begins,
            full_refresh=np.array([row.full for row in rows], dtype=np.bool_),
            occupied_pages=_i32([page for pages in sent for page in pages]),
            num_computed=_i32([row.computed for row in rows]),
            num_extend_rows=len(extends),
            input_lens=_i32([1 if row.ids is None else len(row.ids) for row in rows]),
            input_ids=_i32([token for row in extends for token in row.ids or []]),
            sample=np.ones(len(rows), dtype=np.bool_),
            released_rows=_i32(released),
            lease_starts=starts,
        )


def _i32(values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
