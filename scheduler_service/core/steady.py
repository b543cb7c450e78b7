"""Rows that decode step after step: what an op says of them, kept from one op to the next.

Most steps are like the one before: the same rows, each one token further, some with a page more. Of such rows everything the
next op needs is here as columns in the order of the op, so that planning it costs a few numpy calls, and none that looks rows
up in the table. `RowTable.version` tells whether anything else has happened to any row since.

Columns are handed to ops as they are and never written again; what changes is replaced.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.core.ops import ForwardOp, Int32Array
from scheduler_service.core.row_table import Phase, RowTable

_NOTHING: Int32Array = np.empty(0, dtype=np.int32)


class SteadyRows:
    """The rows of `op`, the last one, which has decode rows only.

    Args:
        op: as it was planned, with nothing planned since.
        rows: the table, which `op` has advanced.
        budget: of the tokens of a step, under which the rows were chosen.
    """

    def __init__(self, op: ForwardOp, rows: RowTable, budget: int) -> None:
        self._rows = rows
        self.version = rows.version
        self.budget = budget
        places = self._places = op.req_pool_indices.astype(np.intp)
        self.indices, self.generations, self.requests = op.req_pool_indices, op.row_generations, op.requests
        self.num_computed: Int32Array = rows.num_computed.take(places)
        self.steps_left = int((rows.limit_len.take(places) - self.num_computed).min(initial=2**31 - 1)) - 1
        """Steps until one of the rows has its last token planned."""
        self.row_lens: Int32Array = op.row_lens
        self._room: Int32Array = op.row_lens * rows.page_size
        self.begins, self.sizes, self.pages = op.row_lens, np.zeros(len(places), dtype=np.int32), _NOTHING
        self._no_sizes = self.sizes
        self._grown: npt.NDArray[np.intp] | None = None
        self.no_flags = np.zeros(len(places), dtype=np.bool_)
        self.all_flags = ~self.no_flags
        self.ones: Int32Array = np.ones(len(places), dtype=np.int32)
        self.num_logprobs = rows.num_logprobs.take(places) if rows.num_asking else None
        stop_ids = rows.stop_ids.take(places, axis=0)
        stop_ids = stop_ids[:, (stop_ids >= 0).any(axis=0)]
        self.stop_ids: Int32Array | None = stop_ids if stop_ids.shape[1] else None  # [R, S], padded with -1
        self._one_each = np.zeros(len(rows.phase), dtype=np.int32)
        self._one_each[places] = 1
        self._answer = np.stack((-self._one_each, self._one_each))

    def growing(self) -> npt.NDArray[np.intp]:
        """Positions of rows that need a page for their next token."""
        positions: npt.NDArray[np.intp] = (self.num_computed >= self._room).nonzero()[0]
        return positions

    def grow(self, positions: npt.NDArray[np.intp], pages: Int32Array) -> None:
        """Give the rows at `positions` a page each."""
        self._grown = self._places[positions]
        self._rows.append_one_each(self._grown, pages)
        self.begins, self.pages = self.row_lens, pages
        self.sizes = np.zeros(len(self.begins), dtype=np.int32)
        self.sizes[positions] = 1
        self.row_lens = self.begins + self.sizes
        self._room = self.row_lens * self._rows.page_size
        self.version = self._rows.version

    def advance(self) -> None:
        """The op is made: each row has computed one token more, and all its pages are sent."""
        rows = self._rows
        self.num_computed = self.num_computed + 1
        self.steps_left -= 1
        np.add(rows.planned, self._one_each, out=rows.planned)
        if self._grown is not None:
            if rows.sent_pages is None:
                rows.sent_len[self._grown] = rows.num_pages.take(self._grown)
            else:
                rows.mark_sent(self._grown, rows.num_pages.take(self._grown) - 1)
            self._grown = None
            self.begins, self.sizes, self.pages = self.row_lens, self._no_sizes, _NOTHING

    def answer(self) -> None:
        """One token for each row has come; all of them still hold their rows."""
        answered = self._rows.answered
        np.add(answered, self._answer, out=answered)


class Steadiness:
    """Whether the decode rows are those of the last step: finds out, and keeps `SteadyRows` as long as it is so."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._steady: SteadyRows | None = None
        self._last_op: tuple[int, ForwardOp] | None = None  # with the table's version right after it

    def rows_for(self, budget: int) -> SteadyRows | None:
        """The decode rows of the next step, if all of them are known and no row is in the middle of its prompt."""
        steady = self._steady
        if steady is None or steady.version != self._rows.version or steady.steps_left <= 0 or steady.budget != budget:
            return None
        return steady

    def begin(self, chosen: Int32Array, phases: npt.NDArray[np.uint8], budget: int) -> SteadyRows | None:
        """After a step with just the rows `chosen`, and nothing since then: keep them from now on.

        Args:
            chosen: rows of the next step.
            phases: of all rows in use.
            budget: of the tokens of a step, under which they were chosen.
        """
        if self._last_op is None or self._last_op[0] != self._rows.version:
            return None
        op = self._last_op[1]
        if not np.array_equal(op.req_pool_indices, chosen) or (phases == Phase.PREFILLING).any():
            return None
        self._steady = SteadyRows(op, self._rows, budget)
        return self._steady

    def note_op(self, op: ForwardOp) -> None:
        """The op was planned last."""
        self._last_op = None if op.num_extend_rows else (self._rows.version, op)

    def forget(self) -> None:
        """What was planned last is taken back."""
        self._steady = self._last_op = None
