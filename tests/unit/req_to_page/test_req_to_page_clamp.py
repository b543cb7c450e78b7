"""The mirror and rows that are wider than it: what is copied, what is left alone, what is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

Row = tuple[int, int, int, list[int], bool]
MirrorOf = Callable[..., Any]
WideMirror = tuple[Any, npt.NDArray[np.int32]]

WIDE = 513


@pytest.fixture
def wide_mirror(mirror_of: MirrorOf, ops: Any) -> WideMirror:
    """Rows 1, 2, 3 of 400, 513 and 100 pages in a mirror of 513, and its contents."""
    mirror = mirror_of(WIDE, max_rows=4)
    mirror.apply(
        ops.make([ops.full(1, list(range(1, 401))), ops.full(2, list(range(1001, 1514))), ops.full(3, list(range(2001, 2101)))])
    )
    return mirror, mirror.contents()


def test_clamp_copies_what_fits_and_keeps_source_offsets_aligned(wide_mirror: WideMirror, ops: Any) -> None:
    """Begins 400, 513, 100 with sizes 2, 1, 3 copy 2, 0 and 3 entries; every other entry stays bit for bit."""
    mirror, before = wide_mirror
    rows = [
        ops.tail(1, 400, [*range(1, 401), 7001, 7002]),
        ops.tail(2, 513, [*range(1001, 1514), 7003]),
        ops.tail(3, 100, [*range(2001, 2101), 7004, 7005, 7006]),
    ]
    wider = mirror.apply(ops.make(rows))
    want = before.copy()
    want[1, 400:402] = [7001, 7002]
    want[3, 100:103] = [7004, 7005, 7006]
    assert np.array_equal(mirror.contents(), want)
    assert wider.tolist() == [False, True, False]
    assert mirror.row_lens.tolist() == [0, 402, 514, 103, 0]
    assert mirror.valid_lens.tolist() == [0, 402, 513, 103, 0]


def test_clamp_in_the_middle_of_a_tail(mirror_of: MirrorOf, ops: Any) -> None:
    """Begin 512 with size 4 copies one entry, and the next row's pages are its own."""
    mirror = mirror_of(WIDE)
    mirror.apply(ops.make([ops.full(1, list(range(1, 513))), ops.full(2, [5])]))
    before = mirror.contents()
    mirror.apply(ops.make([ops.tail(1, 512, [*range(1, 513), 701, 702, 703, 704]), ops.tail(2, 1, [5, 6])]))
    want = before.copy()
    want[1, 512] = 701
    want[2, 1] = 6
    assert np.array_equal(mirror.contents(), want)


def test_clamp_of_full_refreshes(wide_mirror: WideMirror, ops: Any) -> None:
    """Rows refreshed with 516 and 1,026 pages in the middle of a batch keep 513 each, and later rows their own pages."""
    mirror, before = wide_mirror
    rows = [
        ops.tail(1, 400, [*range(1, 401), 7001, 7002]),
        ops.full(2, list(range(3001, 3517))),
        ops.full(4, list(range(5001, 6027))),
        ops.full(3, [8001, 8002, 8003]),
    ]
    wider = mirror.apply(ops.make(rows))
    want = before.copy()
    want[1, 400:402] = [7001, 7002]
    want[2] = range(3001, 3514)
    want[4] = range(5001, 5514)
    want[3] = 0
    want[3, :3] = [8001, 8002, 8003]
    assert np.array_equal(mirror.contents(), want)
    assert wider.tolist() == [False, True, True, False]
    assert mirror.num_clamped == 2


def test_tail_update_after_a_clamp_goes_on_from_the_stated_length(wide_mirror: WideMirror, ops: Any) -> None:
    """After row_len 514 in a mirror of 513, begin 514 with size 1 is applied: nothing fits, and the length is 515."""
    mirror, _ = wide_mirror
    pages = [*range(1001, 1514), 7003]
    mirror.apply(ops.make([ops.tail(2, 513, pages)]))
    before = mirror.contents()
    mirror.apply(ops.make([ops.tail(2, 514, [*pages, 7004])]))
    assert np.array_equal(mirror.contents(), before)
    assert (int(mirror.row_lens[2]), int(mirror.valid_lens[2])) == (515, 513)


def test_clamp_warns_with_the_request_and_counts(mirror_of: MirrorOf, ops: Any) -> None:
    """Each clamped row of each op is one warning with request, row, length and width, and one on the counter."""
    mirror = mirror_of(width=2)
    op = ops.make([ops.full(1, [1, 2, 3]), ops.full(2, [4, 5]), ops.full(3, [6, 7, 8, 9])])
    with capture_logs() as logs:
        mirror.apply(op, request_ids={1: "first", 2: "second"})
        mirror.apply(ops.make([ops.tail(2, 2, [4, 5])]), request_ids={2: "second"})
    facts = [(entry["log_level"], entry["request_id"], entry["row"], entry["row_len"], entry["width"]) for entry in logs]
    assert facts == [("warning", "first", 1, 3, 2), ("warning", "", 3, 4, 2)]
    assert mirror.num_clamped == 2


@pytest.mark.parametrize("row", [(1, 2, 1, [1, 2, 3], False), (1, 0, 3, [1, 2, 3], True)], ids=["tail", "full"])
def test_row_wider_than_the_table_never_reaches_the_next_row(mirror_of: MirrorOf, ops: Any, row: Row) -> None:
    """Three pages for a mirror of two leave the next row's entries alone (B33)."""
    mirror = mirror_of(width=2)
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(2, [77, 78])]))
    mirror.apply(ops.make([row]))
    assert mirror.contents().tolist() == [[0, 0], [1, 2], [77, 78], [0, 0], [0, 0]]
