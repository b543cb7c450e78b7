"""RowTable: leases, entries, and what was sent of them."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.journal import Journal
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.row_table import Phase, RowTable


def _ids(*ids: int) -> Int32Array:
    return np.array(ids, dtype=np.int32)


def _view(rows: RowTable) -> tuple[object, ...]:
    public = {name: value for name, value in vars(rows).items() if not name.startswith("_")}
    columns = {name: value.copy().tolist() for name, value in public.items() if isinstance(value, np.ndarray)}
    return columns, rows.free_rows()


@pytest.fixture
def rows() -> RowTable:
    """Three rows of four pages; the last send is kept."""
    return RowTable(max_rows=3, max_pages_per_row=4, page_size=2, keep_sent=True)


def _sent(rows: RowTable, *pages: int) -> int:
    """A lease whose pages were all sent."""
    row = rows.begin_lease()
    rows.append(row, _ids(*pages))
    rows.mark_sent(_ids(row), _ids(0))
    return row


def test_row_zero_is_never_leased(rows: RowTable) -> None:
    """Row numbers begin at 1 and the lowest is granted first."""
    assert [rows.begin_lease() for _ in range(3)] == [1, 2, 3]
    assert rows.num_free == 0


def test_no_row_left_changes_nothing(rows: RowTable) -> None:
    """A lease that cannot be had raises and leaves the table alone."""
    for _ in range(3):
        rows.begin_lease()
    before = _view(rows)
    with pytest.raises(PageAccountingError, match="none is free"):
        rows.begin_lease()
    assert _view(rows) == before


def test_generation_counts_leases_of_the_number(rows: RowTable) -> None:
    """Every lease of a row number raises its generation, also across a reset."""
    row = rows.begin_lease()
    assert (rows.generation[row], rows.live_generation[row]) == (1, 1)
    rows.end_lease(row)
    assert (rows.generation[row], rows.live_generation[row]) == (1, 0)
    assert rows.begin_lease() == row
    rows.reset()
    assert rows.begin_lease() == row
    assert (rows.generation[row], rows.live_generation[row]) == (3, 3)


def test_preferred_row_is_granted_if_free(rows: RowTable) -> None:
    """The row asked for is taken out of the middle of the stack; another is granted when it is in use."""
    assert rows.begin_lease(preferred=2) == 2
    assert rows.begin_lease(preferred=2) == 1
    assert rows.free_rows() == [3]


def test_end_of_lease_clears_every_column(rows: RowTable) -> None:
    """The next tenant of a row number meets nothing of the last one but the generation."""
    fresh, _ = _view(RowTable(3, 4, 2, keep_sent=True))
    row = _sent(rows, 7, 8, 9)
    rows.repoint(row, 0, _ids(5))
    for column in (rows.num_tree, rows.num_computed, rows.num_known, rows.limit_len, rows.num_outstanding):
        column[row] = 3
    rows.phase[row] = Phase.DECODING
    rows.set_stop_ids(row, (4,))
    rows.end_lease(row)
    columns, _ = _view(rows)
    assert isinstance(columns, dict)
    assert isinstance(fresh, dict)
    assert columns.pop("generation") == [0, 1, 0, 0]
    fresh.pop("generation")
    columns.pop("sent_pages")  # read below sent_len only
    fresh.pop("sent_pages")
    assert columns == fresh


def test_ending_a_free_row_changes_nothing(rows: RowTable) -> None:
    """A row given back twice raises."""
    row = rows.begin_lease()
    rows.end_lease(row)
    before = _view(rows)
    with pytest.raises(PageAccountingError, match="row 1 is given back, but is free already"):
        rows.end_lease(row)
    assert _view(rows) == before


def test_row_given_back_last_is_granted_next(rows: RowTable) -> None:
    """Row numbers form a stack."""
    for _ in range(3):
        rows.begin_lease()
    rows.end_lease(3)
    rows.end_lease(1)
    assert [rows.begin_lease(), rows.begin_lease()] == [1, 3]


def test_append_grows_one_row(rows: RowTable) -> None:
    """Entries follow in order and other rows are not touched."""
    first, second = rows.begin_lease(), rows.begin_lease()
    rows.append(first, _ids(5))
    rows.append(second, _ids(6, 7))
    rows.append(first, _ids(8, 9))
    assert rows.row_pages(first).tolist() == [5, 8, 9]
    assert rows.row_pages(second).tolist() == [6, 7]


def test_append_beyond_the_width_changes_nothing(rows: RowTable) -> None:
    """A row cannot become wider than the mirror."""
    row = rows.begin_lease()
    rows.append(row, _ids(1, 2, 3))
    before = _view(rows)
    with pytest.raises(PageAccountingError, match="row 1 would have 5 pages, but is 4 wide"):
        rows.append(row, _ids(4, 5))
    assert _view(rows) == before


def test_append_one_each_places_by_row(rows: RowTable) -> None:
    """The i-th page goes to the i-th row, in whatever order the rows are named."""
    for row, pages in ((1, (5,)), (2, ()), (3, (6, 7))):
        assert rows.begin_lease() == row
        rows.append(row, _ids(*pages))
    rows.append_one_each(_ids(3, 1), _ids(11, 12))
    assert [rows.row_pages(row).tolist() for row in (1, 2, 3)] == [[5, 12], [], [6, 7, 11]]


def test_repoint_below_the_sent_length_marks_the_row(rows: RowTable) -> None:
    """Changing an entry that was sent makes the row dirty, until it is sent again."""
    row = _sent(rows, 5, 6, 7)
    rows.repoint(row, 1, _ids(9))
    assert rows.row_pages(row).tolist() == [5, 9, 7]
    assert rows.dirty[row]
    assert rows.changed_since_sent(row)
    rows.mark_sent(_ids(row), _ids(0))
    assert not rows.dirty[row]
    assert not rows.changed_since_sent(row)


def test_repoint_to_the_same_pages_is_no_change(rows: RowTable) -> None:
    """Writing what stands there already leaves the row clean."""
    row = _sent(rows, 5, 6, 7)
    rows.repoint(row, 0, _ids(5, 6))
    assert not rows.dirty[row]


def test_repoint_beyond_the_sent_length_is_no_change(rows: RowTable) -> None:
    """Entries that no op has carried may change freely: they are sent as a tail."""
    row = _sent(rows, 5, 6)
    rows.append(row, _ids(7, 8))
    rows.repoint(row, 2, _ids(1, 2))
    assert not rows.dirty[row]
    assert rows.row_pages(row).tolist() == [5, 6, 1, 2]


def test_repoint_across_the_sent_length_looks_at_the_sent_part(rows: RowTable) -> None:
    """Only the part below the sent length decides, at either side of the boundary."""
    clean = _sent(rows, 5, 6)
    rows.append(clean, _ids(7))
    rows.repoint(clean, 1, _ids(6, 9))
    dirty = _sent(rows, 1, 2)
    rows.append(dirty, _ids(3))
    rows.repoint(dirty, 1, _ids(9, 3))
    assert rows.dirty.tolist() == [False, False, True, False]


def test_dirty_outlives_a_second_change_back(rows: RowTable) -> None:
    """An entry that changes twice and is back is still marked: dirty may say too much, never too little."""
    row = _sent(rows, 5)
    rows.repoint(row, 0, _ids(6))
    rows.repoint(row, 0, _ids(5))
    assert rows.dirty[row]
    assert not rows.changed_since_sent(row)


def test_repoint_beyond_the_row_changes_nothing(rows: RowTable) -> None:
    """Entries that do not exist cannot be repointed."""
    row = _sent(rows, 5, 6)
    before = _view(rows)
    with pytest.raises(PageAccountingError, match=r"entries \[1, 3\) are repointed, it has 2"):
        rows.repoint(row, 1, _ids(6, 7))
    assert _view(rows) == before


def test_gather_concatenates_tails_in_the_order_named(rows: RowTable) -> None:
    """Each row's entries from its start on, rows in the order given, empty tails included."""
    for pages in ((1, 2, 3), (4, 5), (6,)):
        rows.append(rows.begin_lease(), _ids(*pages))
    gathered = rows.gather(_ids(3, 1, 2), _ids(0, 1, 2))
    assert gathered.tolist() == [6, 2, 3]
    assert gathered.dtype == np.int32
    assert rows.gather(_ids(2), _ids(2)).tolist() == []
    assert rows.gather(_ids(), _ids()).tolist() == []


def test_mark_sent_keeps_a_copy_of_what_was_sent(rows: RowTable) -> None:
    """A tail send adds to the copy, and later changes are seen against it."""
    row = _sent(rows, 5, 6)
    rows.append(row, _ids(7))
    rows.mark_sent(_ids(row), _ids(2))
    assert rows.sent_pages is not None
    assert rows.sent_pages[row].tolist() == [5, 6, 7, 0]
    assert rows.sent_len[row] == 3
    assert not rows.unsent[row]


def test_without_keep_sent_no_copy_is_kept() -> None:
    """The copy costs memory, so it exists only where it is asked for."""
    rows = RowTable(2, 4, 2)
    row = _sent(rows, 3)
    assert rows.sent_pages is None
    assert rows.sent_len[row] == 1


def test_new_lease_is_unsent(rows: RowTable) -> None:
    """A lease begins unsent, with nothing sent in it."""
    row = _sent(rows, 5)
    rows.end_lease(row)
    assert rows.begin_lease() == row
    assert rows.unsent[row]
    assert rows.sent_len[row] == 0


def test_stop_ids_widen_and_keep_the_others(rows: RowTable) -> None:
    """A longer list widens the column; shorter rows are padded with -1, which is no token."""
    first, second = rows.begin_lease(), rows.begin_lease()
    rows.set_stop_ids(first, (4,))
    rows.set_stop_ids(second, (5, 6, 7))
    assert rows.stop_ids.shape == (4, 3)
    assert rows.stop_ids[first].tolist() == [4, -1, -1]
    assert rows.stop_ids[second].tolist() == [5, 6, 7]
    rows.end_lease(second)
    assert rows.stop_ids[second].tolist() == [-1, -1, -1]


def test_reset_ends_every_lease(rows: RowTable) -> None:
    """After a reset all numbers are free in the first order and no row is live."""
    _sent(rows, 5)
    _sent(rows, 6, 7)
    rows.end_lease(1)
    rows.reset()
    assert rows.free_rows() == [3, 2, 1]
    assert not rows.live_generation.any()
    assert not rows.num_pages.any()
    assert not rows.pages.any()


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_failed_change_appended_is_gone(ends: bool) -> None:
    """Pages that rows were given in a change that fails are in no row after it, also if a row was given back meanwhile."""
    journal = Journal()
    rows = RowTable(max_rows=3, max_pages_per_row=4, page_size=2, journal=journal)
    held = rows.begin_lease()
    rows.append(held, _ids(5))
    before = _view(rows)

    def change() -> None:
        new = rows.begin_lease()
        rows.append(new, _ids(6, 7))
        rows.append_one_each(_ids(held, new), _ids(8, 9))
        if ends:
            rows.end_lease(held)
            rows.end_lease(new)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.run(change)
    assert _view(rows) == before
