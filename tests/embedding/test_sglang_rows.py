"""Writes into a token-level table become page updates; at random, beside a table written in the same way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service import (
    ColumnTypeError,
    ColumnValueError,
    PageFeed,
    Refusal,
    RefusalCode,
    ReqToPage,
    SglangRows,
    req_to_token,
)

MAX_ROWS, WIDTH, NUM_PAGES = 4, 6, 40


def _slots(pages: list[int], size: int, begin: int, end: int) -> list[int]:
    return [pages[t // size] * size + t % size for t in range(begin, end)]


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_mirror_is_the_table_that_was_written(page_size: int, seed: int) -> None:
    """Appends, adopted prefixes, rows freed and taken again: the mirror agrees with a table written token by token."""
    draw = random.Random(seed)
    rows = SglangRows(MAX_ROWS, page_size)
    feed = PageFeed(ReqToPage(MAX_ROWS, WIDTH, NUM_PAGES, page_size))
    table = np.zeros((MAX_ROWS, WIDTH * page_size), dtype=np.int32)
    pages: dict[int, list[int]] = {}
    lens: dict[int, int] = {}
    num_tails = num_refreshed = 0

    def fresh() -> int:
        return draw.choice([page for page in range(1, NUM_PAGES + 1) if page not in sum(pages.values(), [])])

    def write(index: int, begin: int, end: int) -> None:
        slots = _slots(pages[index], page_size, begin, end)
        table[index, begin:end] = slots
        kind: Any = draw.choice([list, np.array, torch.tensor])
        if draw.random() < 0.5:
            rows.write((index, slice(begin, end)), kind(slots))
        else:
            rows.write(index, torch.arange(begin, end), kind(slots))

    for _ in range(250):
        index, action = draw.randrange(MAX_ROWS), draw.random()
        if index not in pages:
            pages[index], lens[index] = [], 0
        if action < 0.1:
            rows.free(index)
            table[index] = 0
            del pages[index], lens[index]
        elif action < 0.3 and lens[index] >= page_size:  # another copy of a whole page
            logical = draw.randrange(lens[index] // page_size)
            pages[index][logical] = fresh()
            write(index, logical * page_size, (logical + 1) * page_size)
        elif lens[index] < WIDTH * page_size:
            begin, end = lens[index], min(WIDTH * page_size, lens[index] + draw.randint(1, 2 * page_size))
            while len(pages[index]) * page_size < end:
                pages[index].append(fresh())
            lens[index] = end
            write(index, begin, end)
        if draw.random() < 0.6:
            update = rows.take()
            feed.apply(update)
            num_refreshed += int(update.full_refresh.sum())
            num_tails += int((~update.full_refresh).sum())
            mirror = req_to_token(feed.mirror).numpy()
            for live, length in lens.items():
                assert mirror[live + 1, :length].tolist() == table[live, :length].tolist()
            assert rows.take().num_rows == 0
    assert num_tails > 10
    assert num_refreshed > 10


def test_update_of_each_kind_of_write() -> None:
    """A first write and a changed page refresh, an append is a tail, more tokens of a page and the same slots say nothing."""
    rows = SglangRows(4, 4)

    def update() -> tuple[list[int], list[int], list[int], list[bool], list[int]]:
        taken = rows.take()
        columns = (taken.req_pool_indices, taken.begins, taken.sizes, taken.full_refresh, taken.occupied_pages)
        return tuple(column.tolist() for column in columns)  # type: ignore[return-value]

    rows.write((0, slice(0, 5)), _slots([7, 9], 4, 0, 5))
    assert update() == ([1], [0], [2], [True], [7, 9])
    rows.write((0, slice(5, 8)), _slots([7, 9], 4, 5, 8))
    rows.write((0, slice(0, 4)), _slots([7], 4, 0, 4))
    assert update() == ([], [], [], [], [])
    rows.write((0, slice(8, 9)), [4 * 4])
    assert update() == ([1], [2], [1], [False], [4])
    rows.write((0, slice(0, 4)), _slots([3], 4, 0, 4))
    assert update() == ([1], [3], [0], [True], [3, 9, 4])
    rows.free(0)
    rows.free(0)
    assert rows.take().released_rows.tolist() == [1]


BAD: dict[str, tuple[Any, list[int], RefusalCode, str]] = {
    "gap": ((0, slice(6, 8)), [9, 10], RefusalCode.GAP, "row 1: a write at token 6 leaves a gap after the 5 it has"),
    "offset": ((0, slice(5, 6)), [9 * 4], RefusalCode.MALFORMED, "token 5 has slot 36, whose offset in a page of 4 is not 1"),
    "torn page": ((0, slice(5, 6)), [8 * 4 + 1], RefusalCode.MALFORMED, "token 5 would be on another page"),
    "torn below": ((0, slice(0, 2)), [8 * 4, 8 * 4 + 1], RefusalCode.MALFORMED, "token 2 would be on another page"),
    "two pages": ((0, slice(0, 2)), [8 * 4, 9 * 4 + 1], RefusalCode.MALFORMED, "token 0 would be on another page"),
    "held page": ((0, slice(5, 9)), [37, 38, 39, 28], RefusalCode.PAGE_REPEATED, "page 7 would be in the row twice"),
    "row": ((4, slice(0, 1)), [4], RefusalCode.ROW_OUT_OF_RANGE, r"req_pool_index 4 is outside \[0, 3\]"),
    "count": ((0, slice(5, 8)), [37], RefusalCode.MALFORMED, "1 slots for slice"),
    "beyond 32 bits": ((0, slice(5, 6)), [2**40 + 1], RefusalCode.MALFORMED, "token 5 would be on another page"),
    "step": ((0, slice(0, 4, 2)), [28, 29, 30, 31], RefusalCode.MALFORMED, "4 slots for slice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_write_changes_nothing(name: str) -> None:
    """Each fault has its code and names the value; the row is as before."""
    key, slots, code, text = BAD[name]
    rows = SglangRows(4, 4)
    rows.write((0, slice(0, 5)), _slots([7, 9], 4, 0, 5))
    rows.take()
    with pytest.raises(Refusal, match=text) as caught:
        rows.write(key, slots)
    assert caught.value.code is code
    assert rows.pages(0).tolist() == [7, 9]
    rows.write((0, slice(5, 6)), [9 * 4 + 1])
    assert rows.take().num_rows == 0


def test_values_that_are_no_slots_are_typed_errors() -> None:
    """Fractions, tables and nothing at all are told apart, and nothing was written."""
    rows = SglangRows(4, 4)
    with pytest.raises(ColumnTypeError, match="values is float64: slots are whole numbers"):
        rows.write(0, slice(0, 1), [4.5])
    with pytest.raises(ColumnValueError, match="values: 2 is outside its limit: one dimension"):
        rows.write(0, slice(0, 1), [[4]])
    with pytest.raises(TypeError, match="takes three arguments"):
        rows.write(0, slice(0, 1))
    assert rows.take().num_rows == 0


def test_reset_tells_every_row_whole_again() -> None:
    """After the mirror was emptied, rows that nobody has written to since are in the next update."""
    rows = SglangRows(4, 4)
    rows.write(0, slice(0, 5), _slots([7, 9], 4, 0, 5))
    rows.take()
    rows.reset()
    update = rows.take()
    assert (update.full_refresh.tolist(), update.occupied_pages.tolist()) == ([True], [7, 9])
