"""The usual op, looked at in one pass: decode rows alone, whose leases go on, each with at most one new page.

`PlainDecode.look` says of such an op that nothing in it can be refused, or says nothing. It never names a fault: an op of
which it says nothing goes through `row_rules` and `op_checks`, which are the rules and know which one is broken. What is
accepted here is accepted there; that most ops of an engine are of this kind is the only reason for this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime_service.mixed_decode import MAX_SPECIAL, MixedDecode, MixedOp, are_pages
from runtime_service.op_checks import BIT, Int64Array, Limits
from runtime_service.ops import ForwardOp
from runtime_service.row_rules import RowView

_INT32 = np.dtype(np.int32)


@dataclass(slots=True)
class PlainOp:
    """What was found on the way, for the commit."""

    op: ForwardOp
    rows: npt.NDArray[np.intp]  # [R], the row numbers
    held_bytes: Int64Array  # for each page of the op where its bit is in `held`, seen as one line; all different
    held_bits: npt.NDArray[np.uint8]  # and the bit


class PlainDecode:
    """Looks at ops of one session. `held` [max_rows + 1, bytes] has a bit for each (row, page), see `SessionState`."""

    def __init__(self, limits: Limits, held: npt.NDArray[np.uint8]) -> None:
        size = limits.max_rows + 1
        self._limits = limits
        self._mixed = MixedDecode(limits, held)
        self._held = held.reshape(-1)
        self._row_begins = np.arange(size) * held.shape[1]
        self._seen = np.zeros(size, dtype=np.bool_)  # scratch, all False between calls
        self._ones = np.ones(size, dtype=np.int32).tobytes()
        # The row numbers of the last op, known to be different and in range: most ops name those of the op before.
        self._rows_key = b""
        self._rows = np.empty(0, dtype=np.intp)
        self.repeats = False
        """The last op looked at named the rows of the one before."""

    def look(self, op: ForwardOp, view: RowView) -> PlainOp | MixedOp | None:
        """What `commit` needs, where the op is of the usual kind and keeps every rule; None says nothing about it."""
        num_rows = len(op.req_pool_indices)
        if not (
            0 < num_rows <= self._limits.max_rows
            and not len(op.verify_rows)
            and not len(op.verify_digests)
            and len(op.row_digests) in {0, num_rows}
            and len(op.row_generations) == num_rows
            and len(op.row_lens) == num_rows
            and len(op.begins) == num_rows
            and len(op.sizes) == num_rows
            and len(op.full_refresh) == num_rows
            and len(op.num_computed) == num_rows
            and len(op.input_lens) == num_rows
            and len(op.sample) == num_rows
            and op.req_pool_indices.dtype is _INT32
        ):
            return None
        num_refreshed = np.count_nonzero(op.full_refresh)
        if num_refreshed > MAX_SPECIAL or (rows := self._different_rows(op)) is None:
            return None
        if (
            num_refreshed
            or op.num_extend_rows
            or op.lease_starts
            or len(op.released_rows)
            or len(op.input_ids)
            or op.input_lens.dtype is not _INT32
            or op.input_lens.tobytes() != self._ones[: 4 * num_rows]
        ):
            return self._mixed.look(op, rows, view)
        # In 64 bits, as `view` is: entries of a hostile op may be large.
        row_lens, computed = view.row_len.take(rows), view.end.take(rows)
        good = view.generation.take(rows) == op.row_generations
        good &= view.live.take(rows)
        good &= view.sampled.take(rows)
        good &= row_lens == op.begins
        good &= computed == op.num_computed
        row_lens += op.sizes
        good &= row_lens == op.row_lens
        row_lens *= self._limits.page_size
        good &= computed < row_lens
        if np.count_nonzero(good) != num_rows:
            return None
        if np.count_nonzero(op.sizes >> 1):  # a bit but the lowest: more than a page, or less than none
            return None
        return self.look_at_pages(op, rows, op.sizes.nonzero()[0])

    def commit(self, plain: PlainOp | MixedOp, view: RowView) -> None:
        """The rows are now as the op says: generation, life and having been asked for a token of a plain row stay."""
        if isinstance(plain, MixedOp):
            self._mixed.commit(plain, view)
            return
        op, rows = plain.op, plain.rows
        if len(plain.held_bytes):
            self._held[plain.held_bytes] |= plain.held_bits
            view.row_len[rows] = op.row_lens
        ends = view.end.take(rows)
        ends += 1
        view.end[rows] = ends

    def _different_rows(self, op: ForwardOp) -> npt.NDArray[np.intp] | None:
        """The row numbers, where they are in range and no two are the same."""
        key = op.req_pool_indices.tobytes()
        self.repeats = key == self._rows_key
        if not self.repeats:
            rows = op.req_pool_indices.view(np.uint32).astype(np.intp)  # a negative one is past the end there
            seen = self._seen
            try:
                seen[rows] = True
                num_different = np.count_nonzero(seen) - seen.item(0)  # row 0 is nobody's
            except IndexError:
                num_different = 0
            seen[:] = False
            if num_different != len(rows):
                return None
            self._rows_key, self._rows = key, rows
        return self._rows

    def look_at_pages(self, op: ForwardOp, rows: npt.NDArray[np.intp], growing: npt.NDArray[np.intp]) -> PlainOp | None:
        """The op, where it has a page for each row of `growing`, one that the row does not hold; the rest of it is right."""
        pages = op.occupied_pages
        if len(growing) != len(pages):
            return None
        if not len(pages):
            return PlainOp(op, rows, growing, BIT[:0])
        if not are_pages(pages, self._limits.num_pages):
            return None
        held_bytes = self._row_begins.take(rows.take(growing))
        held_bytes += pages >> 3
        bits = BIT.take(pages & 7)
        if np.count_nonzero(self._held.take(held_bytes) & bits):
            return None
        return PlainOp(op, rows, held_bytes, bits)
