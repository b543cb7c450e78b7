"""`req_to_page`: the runtime's mirror of the scheduler's page rows, in device memory.

Row r holds the physical page of each logical page of the request that leases row r. The mirror decides nothing: it applies what
an op says, once per step, with one staged copy and one launch. Row 0 is the padding sink and page 0 the dummy page; neither
is ever granted, so an entry of 0 always means "no page here".

Two lengths are kept per row. `row_lens` is what the scheduler stated, `valid_lens` what fits into the mirror; the next tail
update is compared with the first, readers go by the second. All entries from the valid length on are 0 at all times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from runtime_service.columns import (
    ColumnTypeError,
    ColumnValueError,
    are_plain_int32,
    as_bool,
    as_int32,
    check_lengths,
    check_rows,
    is_plain_bool,
    marked,
    row_index,
)
from runtime_service.kernels.mirror_apply import NUM_META_COLUMNS, mirror_apply
from runtime_service.ops import BoolArray, Int32Array, PageColumns
from runtime_service.staging import StagingRing

# Staging for ops of up to this many entries is there from the start; larger ones grow it once.
_INITIAL_STAGING = 1 << 18

__all__ = ["ColumnTypeError", "ColumnValueError", "ReqToPage"]

log = structlog.get_logger(__name__)


class ReqToPage:
    """The mirror: int32 [max_rows + 1, max_pages_per_row] on `device`, and its row lengths on the host.

    `zero_fill=False` leaves stale entries where they are when a row is released or shrinks. It exists only to show what goes
    wrong then; with it nothing may rely on entries past the valid length.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages_per_row: int,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        zero_fill: bool = True,
    ) -> None:
        sizes = {"max_rows": max_rows, "max_pages_per_row": max_pages_per_row, "num_pages": num_pages, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise ColumnValueError(name, size, "at least 1")
        self.max_rows = max_rows
        self.max_pages_per_row = max_pages_per_row
        self.num_pages = num_pages
        self.page_size = page_size
        self.zero_fill = zero_fill
        self.table = torch.zeros((max_rows + 1, max_pages_per_row), dtype=torch.int32, device=device)
        self.device = self.table.device  # with its number, also where "cuda" was asked for
        self.host_table: Int32Array | None = self.table.numpy() if self.table.is_cpu else None
        """The same memory, on the CPU."""
        self.row_lens: Int32Array = np.zeros(max_rows + 1, dtype=np.int32)
        self.valid_lens: Int32Array = np.zeros(max_rows + 1, dtype=np.int32)
        self.num_clamped = 0
        self._no_rows: Int32Array = np.empty(0, dtype=np.int32)
        self._last_key = b""
        self._last_rows = np.empty(0, dtype=np.intp)
        self._counts: Int32Array = np.arange(max_rows + 1, dtype=np.int32)
        self._zeros: Int32Array = np.zeros(max_rows + 1, dtype=np.int32)
        capacity = min(NUM_META_COLUMNS * 2 * max_rows + max_rows * max_pages_per_row, _INITIAL_STAGING)
        self._staging = StagingRing(self.device, torch.int32, capacity, kept_on_host=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: its two names for one memory stay that."""
        self.__dict__.update(state)
        self.host_table = self.table.numpy() if self.table.is_cpu else None

    def apply(self, op: PageColumns, *, request_ids: Mapping[int, str] | None = None) -> BoolArray:
        """Bring the mirror to the state after `op`; returns per row of the op whether it is wider than the mirror, bool [R].

        Rows of `released_rows` are emptied first. A row with `full_refresh` is rewritten from logical page 0 with its whole
        `row_len` pages, whatever its size says; another takes its `size` pages at `begin`. What a row held beyond its new
        length is cleared. A row wider than the mirror keeps the part that fits: a warning names it when it becomes so (with its
        request id from `request_ids`, where there is one), `num_clamped` counts it every time, and its surplus pages are
        skipped, so that the pages of later rows are still found where they are.

        The caller has checked what the op means (session, leases, gaps, page ids, each row at most once). Checked here, before
        anything is written, is what would corrupt memory: ColumnTypeError for a column that is no exact int32 (64-bit columns
        are converted), ColumnValueError for unequal lengths and row numbers or lengths out of range.
        """
        if self._apply_tails(op):
            return np.zeros(len(op.req_pool_indices), dtype=np.bool_)
        columns = ("req_pool_indices", "row_lens", "begins", "sizes")
        rows, row_lens, begins, sizes = (as_int32(column, getattr(op, column)) for column in columns)
        pages = as_int32("occupied_pages", op.occupied_pages)
        released = as_int32("released_rows", op.released_rows)
        full = as_bool("full_refresh", op.full_refresh)
        num_rows = len(rows)
        for column, array in (("row_lens", row_lens), ("begins", begins), ("sizes", sizes), ("full_refresh", full)):
            if len(array) != num_rows:
                raise ColumnValueError(column, len(array), f"{num_rows} entries, one per row of the op")
        index = self._index_of(rows)
        check_rows("released_rows", released, self.max_rows)
        check_lengths(row_lens, begins, sizes)

        # What each row brings, before any clamp: this alone decides where the next row's pages start.
        num_sent = np.where(full, row_lens, sizes)
        src_ends = num_sent.cumsum(dtype=np.int64)
        total = int(src_ends[-1]) if num_rows else 0
        if total != len(pages):
            raise ColumnValueError("occupied_pages", len(pages), f"{total} entries, the sum over the rows of the op")

        width = self.max_pages_per_row
        valid_lens = np.minimum(row_lens, width)
        # full_refresh first: a row with size 0 is nothing to do only when its head was not rewritten either.
        copy_begins = np.minimum(begins, width)
        copy_begins[full] = 0
        copy_lens = valid_lens - copy_begins
        write_begins, write_ends = copy_begins, valid_lens
        cleared = released[:0]
        if self.zero_fill:
            write_ends = np.maximum(valid_lens, self.valid_lens.take(index))
            if len(released):
                is_released = marked(released, self.max_rows)
                write_begins = np.where(is_released.take(index), np.int32(0), copy_begins)
                cleared = self._to_clear(is_released, index)

        active = (write_ends > write_begins).nonzero()[0]
        if len(active) or len(cleared):
            meta: tuple[npt.NDArray[Any], ...] = (rows, src_ends - num_sent, copy_begins, copy_lens, write_begins, write_ends)
            if len(active) < num_rows:
                meta = tuple(column[active] for column in meta)
            self._launch(cleared, meta, len(active), pages)

        if len(released):
            self.row_lens[released] = 0
            self.valid_lens[released] = 0
        wider = row_lens > width
        if np.count_nonzero(wider):
            self.num_clamped += int(wider.sum())
            newly = wider & (self.row_lens[rows] <= width)  # a row that goes on growing is not worth a line a token
            self._warn_of_clamped(rows[newly], row_lens[newly], request_ids or {})
        self.row_lens[index] = row_lens
        self.valid_lens[index] = valid_lens
        return wider

    def _apply_tails(self, op: PageColumns) -> bool:
        """Apply an op of a usual kind: every row goes on from its length here or is rewritten, and none is too wide.

        False, and nothing was done, for any other op, among them all that must be refused.
        """
        rows, row_lens, begins, sizes, pages = op.req_pool_indices, op.row_lens, op.begins, op.sizes, op.occupied_pages
        num_rows, full = len(rows), op.full_refresh
        if not (
            are_plain_int32(rows, row_lens, begins, sizes, pages, op.released_rows)
            and 0 < num_rows == len(row_lens) == len(begins) == len(sizes) == len(full)
            and is_plain_bool(full)
            and row_lens.view(np.uint32).max() <= self.max_pages_per_row  # a negative one is large there
        ):
            return False
        index = self._index_of(rows)
        if len(op.released_rows) or np.count_nonzero(full):
            return self._apply_some(op, index)
        lens = self.row_lens.take(index)
        if lens.tobytes() != begins.tobytes():
            return False
        lens += sizes
        if lens.tobytes() != row_lens.tobytes():  # past 2^31 a sum would be negative
            return False
        growing = sizes.nonzero()[0]
        num_growing = len(growing)
        if not num_growing:
            return not len(pages)
        sizes = sizes.take(growing)
        largest = int(sizes.max())
        if sizes.min() < 0:
            return False
        # What `cumsum` finds, too, and of one page a row is known without it.
        src_ends = self._counts[1 : num_growing + 1] if largest == 1 else sizes.cumsum()
        if src_ends[-1] != len(pages):
            return False
        index, begins, row_lens = index.take(growing), begins.take(growing), row_lens.take(growing)
        meta = (index, src_ends - sizes, begins, sizes, begins, row_lens)
        self._launch(self._no_rows, meta, num_growing, pages, largest)
        self.row_lens[index] = row_lens
        self.valid_lens[index] = row_lens
        return True

    def _apply_some(self, op: PageColumns, index: npt.NDArray[np.intp]) -> bool:
        """`_apply_tails` where rows are rewritten or released, too; the types of the other columns have been looked at."""
        row_lens, begins, pages, released, full = op.row_lens, op.begins, op.occupied_pages, op.released_rows, op.full_refresh
        cleared = self._no_rows
        if len(released):
            check_rows("released_rows", released, self.max_rows)
            is_released = marked(released, self.max_rows)
            again = is_released.take(index)
            if np.count_nonzero(again > full):  # goes on although it was released
                return False
            if self.zero_fill:
                cleared = self._to_clear(is_released, index)
        lens, num_sent = self.row_lens.take(index), op.sizes
        if np.count_nonzero(full):
            np.copyto(lens, begins, where=full)
            num_sent = np.where(full, row_lens, num_sent)
        if lens.tobytes() != begins.tobytes():
            return False
        lens += op.sizes
        active = num_sent.nonzero()[0]
        num_sent = num_sent.take(active)
        src_ends = num_sent.cumsum()
        if (
            lens.tobytes() != row_lens.tobytes()
            or np.count_nonzero((begins | op.sizes) < 0)  # the sign bit of either
            or np.count_nonzero(full.take(active)) != np.count_nonzero(full)  # one is rewritten as nothing
            or (src_ends[-1] if len(active) else 0) != len(pages)
        ):
            return False
        index, row_lens = index.take(active), row_lens.take(active)
        if len(active) or len(cleared):
            copy_begins = row_lens - num_sent  # 0 of a row that is rewritten
            # A row is written as far as it was, and that is never past the new length of one that goes on.
            write_ends = np.maximum(row_lens, self.valid_lens.take(index)) if self.zero_fill else row_lens
            meta = (index, src_ends - num_sent, copy_begins, num_sent, copy_begins, write_ends)
            self._launch(cleared, meta, len(active), pages)
        if len(released):
            self.row_lens[released] = 0
            self.valid_lens[released] = 0
        self.row_lens[index] = row_lens
        self.valid_lens[index] = row_lens
        return True

    def append(self, index: npt.NDArray[np.intp], pages: Int32Array) -> None:
        """Append a page to each of these rows; on the CPU only. They are different, in range and not yet of full width."""
        assert self.host_table is not None
        row_lens = self.row_lens.take(index)
        self.host_table[index, row_lens] = pages
        row_lens += 1
        self.row_lens[index] = row_lens
        self.valid_lens[index] = row_lens

    def _index_of(self, rows: Int32Array) -> npt.NDArray[np.intp]:
        """The row numbers as an index; raises ColumnValueError for one out of range."""
        # Most ops name the rows of the op before.
        if (key := rows.tobytes()) != self._last_key:
            self._last_key, self._last_rows = key, row_index("req_pool_indices", rows, self.max_rows)
        return self._last_rows

    def _to_clear(self, is_released: BoolArray, index: npt.NDArray[np.intp]) -> Int32Array:
        """Released rows to clear in the launch; `index` are the op's rows, `is_released` is used up."""
        # Released and leased anew in one op: the row's own entry clears it, since a launch may name a row only once.
        is_released[index] = False
        return (is_released & (self.valid_lens > 0)).nonzero()[0].astype(np.int32)

    def _launch(
        self,
        cleared: Int32Array,
        meta: tuple[npt.NDArray[Any], ...],
        num_rows: int,
        pages: Int32Array,
        max_write_len: int | None = None,
    ) -> None:
        """Stage the rows to clear, the rows of the op and all pages of the op; copy once, launch once."""
        num_cleared = len(cleared)
        num_staged = num_cleared + num_rows
        num_meta = NUM_META_COLUMNS * num_staged
        packed = self._staging.begin(num_meta + len(pages))
        if num_cleared:
            zeros = self._zeros[:num_cleared]
            firsts = (cleared, zeros, zeros, zeros, zeros, self.valid_lens.take(cleared))
            parts = [part for column in zip(firsts, meta, strict=True) for part in column]
            np.concatenate((*parts, pages), out=packed, casting="same_kind")
        else:
            np.concatenate((*meta, pages), out=packed, casting="same_kind")
        if max_write_len is None:
            columns = packed[:num_meta].reshape(NUM_META_COLUMNS, num_staged)
            max_write_len = int((columns[5] - columns[4]).max())
        mirror_apply(self.table, self._staging.upload(), num_staged, max_write_len)

    def _warn_of_clamped(self, rows: Int32Array, row_lens: Int32Array, request_ids: Mapping[int, str]) -> None:
        for row, row_len in zip(rows.tolist(), row_lens.tolist(), strict=True):
            log.warning(
                "row is wider than the mirror, its surplus pages are left out",
                request_id=request_ids.get(row, ""),
                row=row,
                row_len=row_len,
                width=self.max_pages_per_row,
            )

    def row(self, row: int) -> Int32Array:
        """A copy of the valid part of one row, int32 [valid_len]; IndexError for a number outside [0, max_rows]."""
        return self.read_rows([row])[0]

    def read_rows(self, rows: npt.ArrayLike) -> list[Int32Array]:
        """Copies of the valid parts of these rows, in the order asked for, with one device read.

        Waits for the work queued on the current stream. IndexError for a row number outside [0, max_rows].
        """
        numbers = np.array(rows, dtype=np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() <= self.max_rows):
            raise IndexError(f"row numbers {numbers.tolist()} are not all within [0, {self.max_rows}]")
        entries = self.table[torch.from_numpy(numbers).to(self.device)].cpu().numpy()
        return [entries[i, :valid_len] for i, valid_len in enumerate(self.valid_lens[numbers].tolist())]

    def reset(self) -> None:
        """Empty every row, as at the start; `num_clamped` goes on counting."""
        self.table.zero_()
        self.row_lens[:] = 0
        self.valid_lens[:] = 0
