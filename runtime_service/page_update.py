"""Page rows alone: what a scheduler of somebody else's tells a mirror when there is no model step to describe.

    mirror = ReqToPage(max_rows=64, max_pages_per_row=512, num_pages=4096, page_size=16, device="cuda")
    feed = PageFeed(mirror)
    feed.apply(PageUpdate([3], [2], [0], [2], [True], [7, 9]))       # row 3 is [7, 9]
    feed.apply(PageUpdate([3], [3], [2], [1], [False], [4]))         # row 3 is [7, 9, 4]

`ReqToPage.apply` itself takes an update, too, and believes what it says; `PageFeed` compares it first with what the row holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.columns import as_bool, as_int32
from runtime_service.errors import Refusal
from runtime_service.ops import BoolArray, Int32Array, PageColumns, RefusalCode
from runtime_service.req_to_page import ReqToPage

Column = npt.ArrayLike | torch.Tensor


class PageUpdate:
    """What becomes of R rows: the columns of a `ForwardOp` that concern pages, from arrays, tensors or lists.

    Args:
        req_pool_indices: [R], row numbers from 1, each at most once.
        row_lens: [R], pages of the row after the update.
        begins, sizes: [R]; `begin + size == row_len`. Of a tail update `begin` is the length that the row had before.
        full_refresh: [R], bool; the row is rewritten from logical page 0, also where its size is 0.
        occupied_pages: concatenated: the whole row where `full_refresh`, else its entries `[begin, begin + size)`.
        released_rows: rows that are over; emptied first.

    A tensor on a device is copied to the host, which waits for it. Raises ColumnTypeError where a column is not made of whole
    numbers (or of bools), ColumnValueError where it has more than one dimension.
    """

    __slots__ = ("begins", "full_refresh", "occupied_pages", "released_rows", "req_pool_indices", "row_lens", "sizes")

    def __init__(
        self,
        req_pool_indices: Column,
        row_lens: Column,
        begins: Column,
        sizes: Column,
        full_refresh: Column,
        occupied_pages: Column,
        released_rows: Column = (),
    ) -> None:
        self.req_pool_indices = as_int32("req_pool_indices", _on_host(req_pool_indices))
        self.row_lens = as_int32("row_lens", _on_host(row_lens))
        self.begins = as_int32("begins", _on_host(begins))
        self.sizes = as_int32("sizes", _on_host(sizes))
        self.full_refresh = as_bool("full_refresh", _on_host(full_refresh))
        self.occupied_pages = as_int32("occupied_pages", _on_host(occupied_pages))
        self.released_rows = as_int32("released_rows", _on_host(released_rows))

    @property
    def num_rows(self) -> int:
        return len(self.req_pool_indices)


_COLUMNS = ("req_pool_indices", "row_lens", "begins", "sizes", "full_refresh", "occupied_pages", "released_rows")
"""In the order of the constructor."""


def _on_host(column: Column) -> npt.ArrayLike:
    return column.detach().cpu().numpy() if isinstance(column, torch.Tensor) else column


class PageFeed:
    """The way into a mirror for updates that nobody has checked yet.

    Whatever is wrong with an update is a `Refusal` that names row, value and limit, and then nothing of it was applied: a tail
    update that overlaps the row or leaves a gap, a length or a page id out of range, a page or a row named twice. The code is
    the one that `RuntimeService` would answer. A column that cannot be read as what it must be is the error of `PageUpdate`. An
    entry of 0 is a *hole*, a page that the producer no longer keeps (of a
    sliding window, for instance); `allow_holes` says whether they may come. Nothing else may write to
    the mirror.
    """

    def __init__(self, mirror: ReqToPage, *, allow_holes: bool = False) -> None:
        self.mirror = mirror
        self._lowest_page = 0 if allow_holes else 1
        # Host copies of the rows, so that a tail can be compared with what is there without asking the device.
        self._rows: dict[int, Int32Array] = {}

    def apply(self, update: PageColumns, *, request_ids: Mapping[int, str] | None = None) -> BoolArray:
        """Check, then apply; returns per row whether it is wider than the mirror, bool [R].

        `update` is anything with the attributes of a `PageUpdate`, a `ForwardOp` for instance. Raises Refusal.
        """
        if not isinstance(update, PageUpdate):
            update = PageUpdate(*(getattr(update, name) for name in _COLUMNS))
        rows = self._check(update)
        wider = self.mirror.apply(update, request_ids=request_ids)
        for row in update.released_rows.tolist():
            self._rows.pop(row, None)
        self._rows.update(rows)
        return wider

    def reset(self) -> None:
        """Empty every row, of the mirror too."""
        self.mirror.reset()
        self._rows.clear()

    def row(self, row: int) -> Int32Array:
        """The whole row as it was given, int32 [row_len], also where the mirror is narrower."""
        return self._rows.get(row, np.empty(0, dtype=np.int32))

    def _check(self, update: PageUpdate) -> dict[int, Int32Array]:
        """The rows as they will be. Raises Refusal."""
        num_rows = len(update.req_pool_indices)
        for name in ("row_lens", "begins", "sizes", "full_refresh"):
            if (length := len(getattr(update, name))) != num_rows:
                raise Refusal(RefusalCode.MALFORMED, detail=f"{name} has {length} entries, the update {num_rows} rows")
        max_rows = self.mirror.max_rows
        for row in (*update.req_pool_indices.tolist(), *update.released_rows.tolist()):
            if not 1 <= row <= max_rows:
                raise Refusal(RefusalCode.ROW_OUT_OF_RANGE, detail=f"row {row}: row numbers are in [1, {max_rows}]")
        released = set(update.released_rows.tolist())
        after: dict[int, Int32Array] = {}
        at = 0
        columns = (update.req_pool_indices, update.row_lens, update.begins, update.sizes, update.full_refresh)
        for row, row_len, begin, size, full in zip(*(column.tolist() for column in columns), strict=True):
            if row in after:
                raise refusal_of_row(RefusalCode.ROW_REPEATED, row, "the update names this row twice")
            if min(begin, size) < 0 or begin + size != row_len:
                raise refusal_of_row(RefusalCode.LENGTH_MISMATCH, row, f"begin {begin} + size {size} is not row_len {row_len}")
            taken = update.occupied_pages[at : at + (row_len if full else size)]
            at += row_len if full else size
            before = self._rows.get(row, taken[:0]) if row not in released else taken[:0]
            if not full and begin != len(before):
                word = "overlaps" if begin < len(before) else "leaves a gap after"
                raise refusal_of_row(RefusalCode.GAP, row, f"begin {begin} {word} the {len(before)} pages that the row has")
            pages = taken.copy() if full else np.concatenate((before, taken))
            if len(pages) == row_len:  # else the column is too short, which is told below
                self._check_pages(row, pages)
            after[row] = pages
        if at != len(update.occupied_pages):
            detail = f"occupied_pages has {len(update.occupied_pages)} entries, row_lens and sizes ask for {at}"
            raise Refusal(RefusalCode.MALFORMED, detail=detail)
        return after

    def _check_pages(self, row: int, pages: Int32Array) -> None:
        num_pages = self.mirror.num_pages
        if not len(pages):
            return
        if pages.min() < self._lowest_page or pages.max() > num_pages:
            page = int(pages[(pages < self._lowest_page) | (pages > num_pages)][0])
            raise refusal_of_row(
                RefusalCode.PAGE_OUT_OF_RANGE, row, f"page {page} is outside [{self._lowest_page}, {num_pages}]"
            )
        numbers, counts = np.unique(pages, return_counts=True)
        repeated = numbers[(counts > 1) & (numbers > 0)]
        if len(repeated):
            raise refusal_of_row(RefusalCode.PAGE_REPEATED, row, f"page {repeated[0]} would be in the row twice")


def refusal_of_row(code: RefusalCode, row: int, detail: str) -> Refusal:
    """A refusal whose text names the row."""
    return Refusal(code, row, detail=f"row {row}: {detail}")
