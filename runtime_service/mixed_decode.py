"""The next most usual op, looked at in one pass: decode rows, and among them a few that are refreshed, extended or released.

Each admission, each first decode after a prefill and each end of a request makes one such op of a hundred plain rows. The plain
ones are looked at as `PlainDecode` does it, all at once, and the *special* ones, those that are refreshed or extended, one by
one, since a few numbers are read sooner than a column is sliced. As there: what is accepted here is what `row_rules` and
`op_checks` accept, and of an op in which anything is wrong nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime_service.op_checks import BIT, Fault, Int64Array, Limits, check_lease_start
from runtime_service.ops import ForwardOp, Int32Array
from runtime_service.row_rules import RowView

MAX_SPECIAL = 24
"""With more special rows than this, looking at all rows by columns is the shorter way."""

_BOOL = np.dtype(np.bool_)
_INT32 = np.dtype(np.int32)


def are_pages(pages: Int32Array, num_pages: int) -> bool:
    """Whether each entry is in [1, num_pages]; there is one at least."""
    if pages.dtype is not _INT32 or np.count_nonzero(pages) != len(pages):
        return False
    return bool(pages.view(np.uint32).max() <= num_pages)  # a negative one is large there


class SpecialRow(NamedTuple):
    """A row of the op that is refreshed or extended."""

    at: int  # which of the op's rows
    row: int
    generation: int
    full_refresh: bool
    new: bool  # a lease begins
    num_sent: int  # pages


@dataclass(slots=True)
class MixedOp:
    """What was found on the way, for the commit."""

    op: ForwardOp
    rows: npt.NDArray[np.intp]  # [R], the row numbers
    special: list[SpecialRow]
    held_bytes: Int64Array  # for each page of the op where its bit is in `held`, seen as one line
    held_bits: npt.NDArray[np.uint8]  # and the bit; no bit comes twice


class MixedDecode:
    """Looks at ops of one session. `held` [max_rows + 1, bytes] has a bit for each (row, page), see `SessionState`."""

    def __init__(self, limits: Limits, held: npt.NDArray[np.uint8]) -> None:
        self._limits = limits
        self._held = held
        self._held_line = held.reshape(-1)
        self._row_begins = np.arange(len(held)) * held.shape[1]

    def look(self, op: ForwardOp, rows: npt.NDArray[np.intp], view: RowView) -> MixedOp | None:
        """What `commit` needs, where the op keeps every rule; None says nothing about it.

        `rows` are its row numbers, all different and in range; its columns have an entry for each, and it verifies no others.
        """
        num_extend_rows, limits, full, released = op.num_extend_rows, self._limits, op.full_refresh, op.released_rows
        if not 0 <= num_extend_rows <= len(rows) or full.dtype is not _BOOL:
            return None
        is_special = full.copy()
        is_special[:num_extend_rows] = True
        special_at = is_special.nonzero()[0]
        if len(special_at) > MAX_SPECIAL:
            return None
        live = view.live
        if len(released):
            if released.min() < 1 or released.max() > limits.max_rows:
                return None
            live = live.copy()
            live[released] = False
        # In 64 bits, as `view` is: entries of a hostile op may be large.
        row_lens, computed = view.row_len.take(rows), view.end.take(rows)
        good = view.generation.take(rows) == op.row_generations
        good &= live.take(rows)
        good &= view.sampled.take(rows)
        good &= row_lens == op.begins
        good &= computed == op.num_computed
        row_lens += op.sizes
        good &= row_lens == op.row_lens
        row_lens *= limits.page_size
        good &= computed < row_lens
        good &= op.input_lens == 1
        num_sent = op.sizes.copy()
        if len(special_at):
            good[special_at] = True
            num_sent[special_at] = 0
        # No bit but the lowest: a plain row grows by one page or by none.
        if np.count_nonzero(good) != len(rows) or np.count_nonzero(num_sent >> 1):
            return None
        num_pages = np.count_nonzero(num_sent)
        special = list(self._special_rows(op, rows, special_at.tolist(), view, live))
        if len(special) != len(special_at) or not self._leases_are_right(op, special) or not self._tokens_are_right(op):
            return None
        if special:
            sent = [row.num_sent for row in special]
            num_sent[special_at] = sent
            num_pages += sum(sent)
        if num_pages != len(op.occupied_pages):
            return None
        return self._look_at_pages(op, rows, special, num_sent)

    def _special_rows(
        self, op: ForwardOp, rows: npt.NDArray[np.intp], special_at: list[int], view: RowView, live: npt.NDArray[np.bool_]
    ) -> Iterator[SpecialRow]:
        """These rows, up to the first that breaks a rule."""
        for i in special_at:
            row, generation, full = rows.item(i), op.row_generations.item(i), op.full_refresh.item(i)
            row_len, begin, size = op.row_lens.item(i), op.begins.item(i), op.sizes.item(i)
            computed, input_len = op.num_computed.item(i), op.input_lens.item(i)
            last, over, is_decode = view.generation.item(row), not live.item(row), i >= op.num_extend_rows
            new = over or generation > last
            if (
                begin < 0
                or size < 0
                or computed < 0
                or input_len < 1
                or begin + size != row_len
                or generation < last + over
                or computed + input_len > row_len * self._limits.page_size
                or (is_decode and (new or input_len != 1 or not view.sampled.item(row)))
                or (not full and (new or begin != view.row_len.item(row)))
                or (not new and computed != view.end.item(row))
            ):
                return
            yield SpecialRow(i, row, generation, full, new, row_len if full else size)

    def _leases_are_right(self, op: ForwardOp, special: list[SpecialRow]) -> bool:
        """Each lease start is right, there is one for each row whose lease begins, and for no other."""
        missing = {row.row for row in special if row.new}
        try:
            for lease in op.lease_starts:
                if lease.req_pool_index not in missing:
                    return False
                missing.remove(lease.req_pool_index)
                check_lease_start(op, lease, self._limits)
        except Fault:
            return False
        return not missing

    def _tokens_are_right(self, op: ForwardOp) -> bool:
        ids = op.input_ids
        if sum(op.input_lens[: op.num_extend_rows].tolist()) != len(ids):
            return False
        return not len(ids) or bool(ids.min() >= 0 and ids.max() < self._limits.vocab_size)

    def _look_at_pages(
        self, op: ForwardOp, rows: npt.NDArray[np.intp], special: list[SpecialRow], num_sent: Int32Array
    ) -> MixedOp | None:
        """The op, where its pages, `num_sent` [R] of each row, are pages and no row would then have one twice."""
        pages = op.occupied_pages
        if not len(pages):
            return MixedOp(op, rows, special, rows[:0], BIT[:0])
        if not are_pages(pages, self._limits.num_pages):
            return None
        held_bytes = np.repeat(self._row_begins.take(rows), num_sent)
        held_bytes += pages >> 3
        in_byte = pages & 7
        bits = BIT.take(in_byte)
        held = self._held_line.take(held_bytes)
        held &= bits
        if np.count_nonzero(held):
            held[np.repeat(op.full_refresh, num_sent)] = 0  # what these rows hold is forgotten first
            if np.count_nonzero(held):
                return None
        if any(row.num_sent > 1 for row in special):
            keys = held_bytes << 3
            keys |= in_byte
            keys.sort()
            if np.count_nonzero(keys[1:] == keys[:-1]):
                return None
        return MixedOp(op, rows, special, held_bytes, bits)

    def commit(self, mixed: MixedOp, view: RowView) -> None:
        """The rows are now as the op says."""
        op, rows = mixed.op, mixed.rows
        if len(op.released_rows):
            view.live[op.released_rows] = False
        for special in mixed.special:
            row, at = special.row, special.at
            if special.full_refresh:
                self._held[row] = 0
            view.generation[row] = special.generation
            view.live[row] = True
            if special.new or op.sample.item(at):
                view.sampled[row] = op.sample.item(at)
        if len(mixed.held_bytes):
            # None of these bits is set, so that adding them sets them; `bitwise_or.at` takes five times as long.
            np.add.at(self._held_line, mixed.held_bytes, mixed.held_bits)
            view.row_len[rows] = op.row_lens
        view.end[rows] = np.add(op.num_computed, op.input_lens, dtype=np.int64)
