"""PageUpdate and PageFeed: page rows from plain columns, and what is refused before anything is written."""

from __future__ import annotations

import copy
import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service import ColumnTypeError, PageFeed, PageUpdate, Refusal, RefusalCode, ReqToPage


@pytest.fixture
def feed() -> PageFeed:
    feed = PageFeed(ReqToPage(max_rows=4, max_pages_per_row=4, num_pages=16, page_size=4))
    feed.apply(PageUpdate([1, 2], [3, 2], [0, 0], [3, 2], [True, True], [7, 9, 4, 5, 6]))
    return feed


def _rows(feed: PageFeed) -> list[list[int]]:
    return [feed.mirror.row(row).tolist() for row in range(1, 5)]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_columns_may_be_lists_arrays_or_tensors(kind: Any) -> None:
    """The same update from each of them makes the same rows."""
    mirror = ReqToPage(4, 4, 16, 4)
    update = PageUpdate(*(kind(column) for column in ([2, 3], [2, 1], [0, 0], [2, 1], [True, True], [5, 6, 8])))
    mirror.apply(update)
    assert [mirror.row(row).tolist() for row in (1, 2, 3)] == [[], [5, 6], [8]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_anything_with_the_columns_is_an_update(kind: Any) -> None:
    """An object of somebody else's with these attributes and plain columns is taken, by the mirror and by the feed."""
    columns = {
        "req_pool_indices": kind([2]),
        "row_lens": kind([2]),
        "begins": kind([0]),
        "sizes": kind([2]),
        "full_refresh": kind([True]),
        "occupied_pages": kind([5, 6]),
        "released_rows": kind([3]),
    }
    mirrors = [ReqToPage(4, 4, 16, 4) for _ in range(2)]
    mirrors[0].apply(SimpleNamespace(**columns))
    PageFeed(mirrors[1]).apply(SimpleNamespace(**columns))
    assert [mirror.row(2).tolist() for mirror in mirrors] == [[5, 6], [5, 6]]


def test_reset_empties_mirror_and_feed(feed: PageFeed) -> None:
    """After it a tail of a row that was there leaves a gap."""
    feed.reset()
    assert _rows(feed) == [[], [], [], []]
    with pytest.raises(Refusal, match="begin 3 leaves a gap after the 0"):
        feed.apply(PageUpdate([1], [4], [3], [1], [False], [8]))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mirror: pickle.loads(pickle.dumps(mirror))])
def test_copy_of_a_mirror_goes_on_by_itself(copied: Any) -> None:
    """What is written to a copy, by `apply` or row by row, can be read from it."""
    mirror = ReqToPage(4, 4, 16, 4)
    mirror.apply(PageUpdate([2], [1], [0], [1], [True], [5]))
    twin = copied(mirror)
    twin.apply(PageUpdate([2], [2], [1], [1], [False], [6]))
    twin.append(np.array([2]), np.array([7], dtype=np.int32))
    assert twin.row(2).tolist() == [5, 6, 7]


def _plain_rows(draw: random.Random, page_size: int) -> None:
    """Random updates, right and wrong, beside rows that are plain lists."""
    max_rows, width, num_pages = 5, draw.choice([1, 6]), 12
    feed = PageFeed(ReqToPage(max_rows, width, num_pages, page_size))
    rows: dict[int, list[int]] = {row: [] for row in range(1, max_rows + 1)}
    num_refused = 0
    for _ in range(150):
        named = draw.sample(range(1, max_rows + 1), draw.randint(0, max_rows))
        released = draw.sample(range(1, max_rows + 1), draw.choice([0, 0, 1, 2]))
        after = {row: ([] if row in released else list(pages)) for row, pages in rows.items()}
        columns: list[list[Any]] = [[], [], [], [], []]
        pages: list[int] = []
        for row in named:
            full = draw.random() < 0.4
            kept = [] if full else after[row]
            free = [page for page in range(1, num_pages + 1) if page not in kept]
            new = draw.sample(free, min(len(free), draw.randint(0, 3)))
            after[row] = kept + new
            begin = draw.randint(0, len(new)) if full else len(kept)
            for column, value in zip(columns, (row, len(after[row]), begin, len(after[row]) - begin, full), strict=True):
                column.append(value)
            pages += new
        wrong = draw.random() < 0.3
        if wrong:  # one number somewhere is another one
            column = draw.choice([column for column in (*columns[:4], pages) if column] or [released])
            if not column:
                continue
            at = draw.randrange(len(column))
            column[at] = draw.choice([-(2**31), -1, 0, num_pages + 1, 2**31 - 1, column[at] + 1])
        table = feed.mirror.table.clone()
        try:
            feed.apply(PageUpdate(*columns, pages, released))
        except Refusal:
            assert wrong
            num_refused += 1
            assert torch.equal(feed.mirror.table, table)
            continue
        if wrong:  # the number happened to be right as well: another page, for instance
            after = {row: feed.row(row).tolist() for row in rows}
        rows = after
        for row, expected in rows.items():
            assert feed.row(row).tolist() == expected
            assert feed.mirror.table[row].tolist() == (expected + [0] * width)[:width]
    assert num_refused > 5


@pytest.mark.parametrize("page_size", [1, 256])
@pytest.mark.parametrize("seed", range(3))
def test_random_updates_right_and_wrong(seed: int, page_size: int) -> None:
    """Right ones make the rows of a plain model, wrong ones are refused and change nothing; also into a narrow mirror."""
    _plain_rows(random.Random(seed), page_size)


def test_column_of_fractions_is_a_typed_error() -> None:
    """A column that is not made of whole numbers names itself."""
    with pytest.raises(ColumnTypeError, match="begins is float64"):
        PageUpdate([1], [1], [0.5], [1], [True], [3])


def test_tails_refreshes_and_releases(feed: PageFeed) -> None:
    """A tail is appended, a refresh of size 0 rewrites the head, a released row is empty."""
    feed.apply(PageUpdate([1, 2], [4, 2], [3, 2], [1, 0], [False, True], [8, 9, 6]))
    assert _rows(feed) == [[7, 9, 4, 8], [9, 6], [], []]
    feed.apply(PageUpdate([2], [1], [0], [1], [True], [3], released_rows=[1]))
    assert _rows(feed) == [[], [3], [], []]
    assert feed.row(1).tolist() == []


def test_row_wider_than_the_mirror_goes_on(feed: PageFeed) -> None:
    """What does not fit is left out, the tail after it begins where the row ended, not where the mirror did."""
    wide = feed.apply(PageUpdate([1], [6], [3], [3], [False], [8, 10, 11]))
    assert wide.tolist() == [True]
    feed.apply(PageUpdate([1], [7], [6], [1], [False], [12]))
    assert _rows(feed)[0] == [7, 9, 4, 8]
    assert feed.row(1).tolist() == [7, 9, 4, 8, 10, 11, 12]


BAD: dict[str, tuple[PageUpdate, RefusalCode, str]] = {
    "gap": (
        PageUpdate([3, 1], [1, 5], [0, 4], [1, 1], [True, False], [3, 8]),
        RefusalCode.GAP,
        "begin 4 leaves a gap after the 3",
    ),
    "overlap": (PageUpdate([1], [3], [2], [1], [False], [8]), RefusalCode.GAP, "begin 2 overlaps the 3 pages"),
    "tail of nothing": (PageUpdate([3], [2], [1], [1], [False], [8]), RefusalCode.GAP, "begin 1 leaves a gap after the 0"),
    "released before": (
        PageUpdate([1], [4], [3], [1], [False], [8], released_rows=[1]),
        RefusalCode.GAP,
        "begin 3 leaves a gap after the 0",
    ),
    "lengths": (
        PageUpdate([1], [5], [3], [1], [False], [8]),
        RefusalCode.LENGTH_MISMATCH,
        r"begin 3 \+ size 1 is not row_len 5",
    ),
    "negative": (PageUpdate([1], [2], [3], [-1], [False], []), RefusalCode.LENGTH_MISMATCH, "size -1"),
    "row twice": (PageUpdate([1, 1], [4, 5], [3, 4], [1, 1], [False, False], [8, 10]), RefusalCode.ROW_REPEATED, "twice"),
    "row 0": (PageUpdate([0], [1], [0], [1], [True], [8]), RefusalCode.ROW_OUT_OF_RANGE, r"row 0: .* \[1, 4\]"),
    "released row": (PageUpdate([], [], [], [], [], [], [9]), RefusalCode.ROW_OUT_OF_RANGE, r"row 9: .* \[1, 4\]"),
    "page range": (
        PageUpdate([1], [4], [3], [1], [False], [17]),
        RefusalCode.PAGE_OUT_OF_RANGE,
        r"page 17 is outside \[1, 16\]",
    ),
    "hole": (PageUpdate([1], [4], [3], [1], [False], [0]), RefusalCode.PAGE_OUT_OF_RANGE, r"page 0 is outside \[1, 16\]"),
    "page held": (PageUpdate([1], [4], [3], [1], [False], [9]), RefusalCode.PAGE_REPEATED, "page 9 would be in the row twice"),
    "page twice": (
        PageUpdate([3], [2], [0], [2], [True], [8, 8]),
        RefusalCode.PAGE_REPEATED,
        "page 8 would be in the row twice",
    ),
    "too few": (
        PageUpdate([1, 2], [4, 3], [3, 2], [1, 1], [False, False], [8]),
        RefusalCode.MALFORMED,
        "has 1 entries, .* for 2",
    ),
    "too many": (PageUpdate([1], [4], [3], [1], [False], [8, 10]), RefusalCode.MALFORMED, "has 2 entries, .* for 1"),
    "unequal": (
        PageUpdate([1, 2], [4], [3], [1], [False], [8]),
        RefusalCode.MALFORMED,
        "row_lens has 1 entries, the update 2 rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_update_changes_nothing(feed: PageFeed, name: str) -> None:
    """Each fault has its code and names the value; the rows, those of the good part included, are as before."""
    update, code, text = BAD[name]
    before = feed.mirror.table.clone()
    with pytest.raises(Refusal, match=text) as caught:
        feed.apply(update)
    assert caught.value.code is code
    assert torch.equal(feed.mirror.table, before)
    feed.apply(PageUpdate([1], [4], [3], [1], [False], [8]))  # goes on as if nothing had come
    assert _rows(feed)[:2] == [[7, 9, 4, 8], [5, 6]]


def test_holes_come_where_they_are_allowed() -> None:
    """With `allow_holes` entries of 0 are kept, and several of them are no repetition."""
    feed = PageFeed(ReqToPage(2, 8, 16, 4), allow_holes=True)
    feed.apply(PageUpdate([1], [4], [0], [4], [True], [0, 0, 5, 6]))
    assert feed.mirror.row(1).tolist() == [0, 0, 5, 6]
