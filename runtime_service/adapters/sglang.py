"""Writes into SGLang's token-level `req_to_token`.

    rows = SglangRows(max_rows=64, page_size=16)
    rows.write(index, slice(0, 40), slots)          # as a stack writes into its own table
    rows.write((index, slice(40, 41)), slots)       # its key as one value does as well
    rows.free(index)                                # the row number goes back
    mirror.apply(rows.take())                       # a PageUpdate of everything since the last take()

A slot is `page * page_size + offset`, and token t of a row must have offset `t % page_size`: that makes the table one of pages.
What was written decides the bit: a write that goes on from a row's end is a tail, one that puts another page into what the row
already had rewrites the row. Writing the same slots again changes nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.columns import ColumnTypeError, ColumnValueError
from runtime_service.errors import Refusal
from runtime_service.ops import Int32Array, RefusalCode
from runtime_service.page_update import Column, PageUpdate, refusal_of_row

Key = int | tuple[int, slice]
_EMPTY: Int32Array = np.empty(0, dtype=np.int32)


class SglangRows:
    """The rows that a mirror was told of, and what was written since.

    Args:
        max_rows: rows of the mirror, counted from 1.
        page_size: tokens in a page; 1 where slots are pages.
        row_offset: added to `req_pool_index`: 1 where the stack counts from 0, 0 where it keeps 0 for padding itself.
    """

    def __init__(self, max_rows: int, page_size: int, *, row_offset: int = 1) -> None:
        self.max_rows = max_rows
        self.page_size = page_size
        self._offset = row_offset
        self._pages: dict[int, Int32Array] = {}
        self._num_tokens: dict[int, int] = {}
        self._told: dict[int, Int32Array] = {}
        self._released: set[int] = set()

    def write(self, key: Key, where: slice | Column, values: Column | None = None) -> None:
        """`req_to_token[req_pool_index, where] = values`.

        Raises Refusal, and nothing has changed then: a row number out of range, a slice with a step, a write that leaves a gap
        after the row's tokens, a slot that is not at its token's place in a page, a page of two kinds of tokens. Raises
        ColumnTypeError and ColumnValueError for values that are no slots.
        """
        if isinstance(key, tuple):
            if values is not None:
                raise TypeError("write((index, slice), values) takes two arguments")
            (index, place), values = key, where  # type: ignore[assignment]
        else:
            index, place = key, where  # type: ignore[assignment]
        if values is None:
            raise TypeError("write(index, slice, values) takes three arguments")
        slots = np.atleast_1d(np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values))
        if slots.ndim != 1:
            raise ColumnValueError("values", slots.ndim, "one dimension")
        if slots.size and slots.dtype.kind not in "iu":
            raise ColumnTypeError("values", slots.dtype, "slots are whole numbers")
        slots = slots.astype(np.int64)
        row, begin = self._row(index), self._begin(place, slots)
        num_tokens = self._num_tokens.get(row, 0)
        if begin > num_tokens:
            raise refusal_of_row(RefusalCode.GAP, row, f"a write at token {begin} leaves a gap after the {num_tokens} it has")
        end = begin + len(slots)
        self._num_tokens[row], self._pages[row] = max(num_tokens, end), self._paged(row, begin, slots)

    def free(self, req_pool_index: int) -> None:
        """The row is over; the next write to it begins a new one. Harmless for a row that was never written."""
        row = self._row(req_pool_index)
        self._pages.pop(row, None)
        self._num_tokens.pop(row, None)
        if self._told.pop(row, None) is not None:
            self._released.add(row)

    def reset(self) -> None:
        """The mirror was emptied: the next update tells every row whole."""
        self._told.clear()
        self._released.clear()

    def pages(self, req_pool_index: int) -> Int32Array:
        """The row as written, int32 [row_len]."""
        return self._pages.get(self._row(req_pool_index), _EMPTY)

    def take(self) -> PageUpdate:
        """What the mirror must be told since the last call; an update of no rows when nothing has changed."""
        rows, row_lens, begins, full, parts = [], [], [], [], []
        for row, pages in self._pages.items():
            told = self._told.get(row)
            if told is pages:
                continue
            known = _EMPTY if told is None else told
            is_tail = told is not None and len(pages) >= len(known) and bool((pages[: len(known)] == known).all())
            if is_tail and len(pages) == len(known):
                self._told[row] = pages
                continue
            begin = min(len(known), len(pages))
            rows.append(row)
            row_lens.append(len(pages))
            begins.append(begin)
            full.append(not is_tail)
            parts.append(pages[begin:] if is_tail else pages)
            self._told[row] = pages
        released, self._released = sorted(self._released), set()
        sizes = [row_len - begin for row_len, begin in zip(row_lens, begins, strict=True)]
        pages = np.concatenate(parts) if parts else _EMPTY
        return PageUpdate(rows, row_lens, begins, sizes, full, pages, released)

    def _row(self, req_pool_index: int) -> int:
        row = int(req_pool_index) + self._offset
        if not 1 <= row <= self.max_rows:
            last = self.max_rows - self._offset
            detail = f"req_pool_index {req_pool_index} is outside [{1 - self._offset}, {last}]"
            raise Refusal(RefusalCode.ROW_OUT_OF_RANGE, detail=detail)
        return row

    def _begin(self, where: object, slots: npt.NDArray[np.int64]) -> int:
        """First token of a write."""
        if isinstance(where, slice):
            begin = where.start or 0
            stop = begin + len(slots) if where.stop is None else where.stop
            if where.step not in {None, 1} or begin < 0 or stop - begin != len(slots):
                raise Refusal(RefusalCode.MALFORMED, detail=f"{len(slots)} slots for {where}")
            return int(begin)
        places = np.atleast_1d(np.asarray(where.detach().cpu() if isinstance(where, torch.Tensor) else where))
        if places.shape != slots.shape or not len(places) or (np.diff(places) != 1).any() or places[0] < 0:
            raise Refusal(
                RefusalCode.MALFORMED, detail=f"{slots.size} slots for tokens {places.tolist()[:8]}, not consecutive ones"
            )
        return int(places[0])

    def _paged(self, row: int, begin: int, slots: npt.NDArray[np.int64]) -> Int32Array:
        """The row's pages after a write."""
        size, end = self.page_size, begin + len(slots)
        positions = np.arange(begin, end)
        pages = slots // size
        if len(bad := np.flatnonzero((slots % size != positions % size) | (slots < 0))):
            position, slot = int(positions[bad[0]]), int(slots[bad[0]])
            detail = f"token {position} has slot {slot}, whose offset in a page of {size} is not {position % size}"
            raise refusal_of_row(RefusalCode.MALFORMED, row, detail)
        before = self._pages.get(row, _EMPTY)
        after = np.concatenate((before, np.zeros(max(0, -(-end // size) - len(before)), dtype=np.int32)))
        logical = positions // size
        after[logical] = pages
        # Each page is named by all of its tokens in the write, and by those before it that the write leaves alone.
        torn = positions[after[logical] != pages].tolist()
        if begin % size and len(slots) and after[begin // size] != before[begin // size]:
            torn.append(begin)
        if end % size and end < self._num_tokens.get(row, 0) and after[end // size] != before[end // size]:
            torn.append(end)
        if torn:
            raise refusal_of_row(RefusalCode.MALFORMED, row, f"token {torn[0]} would be on another page than its neighbours")
        if len(after) == len(before) and (after == before).all():
            return before
        if len(np.unique(after)) < len(after):
            numbers, counts = np.unique(after, return_counts=True)
            raise refusal_of_row(RefusalCode.PAGE_REPEATED, row, f"page {numbers[counts > 1][0]} would be in the row twice")
        return after
