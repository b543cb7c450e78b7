"""The mirror: refresh, tail, clearing; every entry that no op names stays bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

Row = tuple[int, int, int, list[int], bool]
MirrorOf = Callable[..., Any]


def test_resume_with_a_recycled_page_is_rewritten_from_logical_page_0(mirror_of: MirrorOf, ops: Any) -> None:
    """Row [3,1], resumed on cached page 7 with 3 as its new tail, reads [7,1,3] and not [3,1,3] (B01)."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [3, 1])]))
    mirror.apply(ops.make([(1, 2, 1, [7, 1, 3], True)]))
    assert mirror.row(1).tolist() == [7, 1, 3]


def test_only_the_ops_own_flag_decides_between_append_and_rewrite(mirror_of: MirrorOf, ops: Any) -> None:
    """A rewrite to a shorter row, then two appends, each end exactly as the op says (B04)."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [10, 1, 2])]))
    mirror.apply(ops.make([ops.full(1, [5, 1])]))
    assert mirror.contents()[1].tolist() == mirror.padded([5, 1])
    mirror.apply(ops.make([ops.tail(1, 2, [5, 1, 4])]))
    assert mirror.contents()[1].tolist() == mirror.padded([5, 1, 4])
    mirror.apply(ops.make([ops.tail(1, 3, [5, 1, 4, 6])]))
    assert mirror.row(1).tolist() == [5, 1, 4, 6]


@pytest.mark.parametrize("successor", [[2], [2, 3, 8, 9, 10, 11]], ids=["shorter", "longer"])
@pytest.mark.parametrize("when", ["without release", "released before", "released in the same op"])
def test_nothing_of_a_rows_previous_tenant_stays_readable(
    mirror_of: MirrorOf, ops: Any, successor: list[int], when: str
) -> None:
    """After a change of tenant the entries past the new row are 0, however the change was told (B05)."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [4, 5, 6, 7]), ops.full(2, [20, 21])]))
    if when == "released before":
        mirror.apply(ops.make([], released=[1]))
        assert mirror.row(1).tolist() == []
        assert not mirror.contents()[1].any()
    mirror.apply(ops.make([ops.full(1, successor)], released=[1] if when == "released in the same op" else []))
    assert mirror.contents()[1].tolist() == mirror.padded(successor)
    mirror.apply(ops.make([ops.tail(1, len(successor), [*successor, 12])]))
    assert mirror.row(1).tolist() == [*successor, 12]
    assert mirror.row(2).tolist() == [20, 21]


def test_released_row_that_is_not_refreshed_keeps_nothing(mirror_of: MirrorOf, ops: Any) -> None:
    """A row released and tail-updated in one op, which the session refuses, would still show none of its old entries."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [4, 5, 6, 7])]))
    mirror.apply(ops.make([ops.tail(1, 2, [8, 9, 3])], released=[1]))
    assert mirror.contents()[1].tolist() == mirror.padded([0, 0, 3])


def test_full_refresh_comes_before_the_nothing_appended_return(mirror_of: MirrorOf, ops: Any, launches: Any) -> None:
    """A row whose size is 0 is rewritten when the bit is set, in a batch and as the only row of a step (B06)."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [3, 1]), ops.full(2, [5, 6]), ops.full(3, [2])]))
    mirror.apply(ops.make([(1, 2, 0, [7, 1], True), (2, 2, 0, [5, 6], False), (3, 1, 2, [2, 8, 9], False)]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[7, 1], [5, 6], [2, 8, 9]]
    mirror.apply(ops.make([(1, 2, 0, [3, 1], True)]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[3, 1], [5, 6], [2, 8, 9]]
    assert launches.count == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_position_in_the_op_is_not_the_row(mirror_of: MirrorOf, ops: Any, order: tuple[int, int, int]) -> None:
    """Rows of an op may come in any order, and each finds its own pages (B07, B08)."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [10, 11]), ops.full(2, [12]), ops.full(3, [13, 14])]))
    rows = [ops.tail(3, 2, [13, 14, 15]), ops.full(2, [20, 21, 22]), (1, 2, 0, [16, 11], True)]
    mirror.apply(ops.make([rows[i] for i in order]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[16, 11], [20, 21, 22], [13, 14, 15]]


def test_released_rows_are_cleared_in_the_same_launch(mirror_of: MirrorOf, ops: Any, launches: Any) -> None:
    """Releases, one of them repeated and one of a row that was empty, and updates are one launch."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(2, [3])]))
    mirror.apply(ops.make([ops.tail(2, 1, [3, 4])], released=[1, 1, 4]))
    assert mirror.contents().tolist() == [mirror.padded([]) if row != 2 else mirror.padded([3, 4]) for row in range(5)]
    assert launches.count == 2


def test_without_zero_fill_stale_entries_stay(mirror_of: MirrorOf, ops: Any) -> None:
    """The demonstration mode keeps what a release or a shorter row leaves behind, which is the fault it is to show."""
    mirror = mirror_of(zero_fill=False)
    mirror.apply(ops.make([ops.full(1, [1, 2])]))
    mirror.apply(ops.make([], released=[1]))
    assert mirror.row(1).tolist() == []
    mirror.apply(ops.make([(1, 2, 0, [3, 2], False)]))
    assert mirror.row(1).tolist() == [1, 2]
    mirror.apply(ops.make([ops.tail(1, 2, [3, 2, 1])]))
    assert mirror.row(1).tolist() == [1, 2, 1]
    mirror.apply(ops.make([ops.full(1, [9])]))
    assert mirror.contents()[1].tolist() == mirror.padded([9, 2, 1])


def test_reset_empties_every_row(mirror_of: MirrorOf, ops: Any) -> None:
    """After a reset no row has a length or an entry, and the counter of clamped rows goes on."""
    mirror = mirror_of(width=2)
    mirror.apply(ops.make([ops.full(1, [1, 2, 3]), ops.full(2, [4])]))
    mirror.reset()
    assert not mirror.contents().any()
    assert not mirror.row_lens.any()
    assert not mirror.valid_lens.any()
    assert mirror.num_clamped == 1


def test_read_rows_gives_copies_in_the_order_asked_for(mirror_of: MirrorOf, ops: Any) -> None:
    """Rows are read as copies, repeated and unordered numbers included, and numbers out of range are refused."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(3, [5])]))
    rows = mirror.read_rows([3, 1, 2, 3])
    assert [row.tolist() for row in rows] == [[5], [1, 2], [], [5]]
    rows[0][:] = 99
    assert mirror.row(3).tolist() == [5]
    assert mirror.read_rows([]) == []
    for number in (-1, 5):
        with pytest.raises(IndexError, match=str(number)):
            mirror.row(number)


# ------------------------------------------------------------------------------------------- against a model


@given(data=st.data())
def test_random_ops_match_rows_kept_in_lists(mirror_of: MirrorOf, ops: Any, data: st.DataObject) -> None:
    """Any sequence of refreshes, tails and releases, clamped ones too, gives the table that plain lists give (I1, I9)."""
    width, max_rows = data.draw(st.sampled_from([1, 3, 7])), 3
    mirror = mirror_of(width, max_rows)
    model: dict[int, list[int]] = {}
    num_clamped = 0
    for _ in range(data.draw(st.integers(1, 6))):
        released = data.draw(st.lists(st.integers(1, max_rows), max_size=3))
        for row in released:
            model.pop(row, None)
        rows: list[Row] = []
        for row in data.draw(st.lists(st.integers(1, max_rows), unique=True)):
            new = data.draw(st.lists(st.integers(1, 10_000), max_size=2 * width))
            old = model.get(row)
            if old is None or data.draw(st.booleans()):
                begin = min(len(old or []), len(new))
                rows.append((row, begin, len(new) - begin, new, True))
                model[row] = new
            else:
                model[row] = old + new
                rows.append((row, len(old), len(new), model[row], False))
        num_clamped += sum(len(pages) > width for _, _, _, pages, _ in rows)
        wider = mirror.apply(ops.make(rows, released))
        assert wider.tolist() == [len(pages) > width for _, _, _, pages, _ in rows]
        want = [mirror.padded(model.get(row, [])[:width]) for row in range(max_rows + 1)]
        assert mirror.contents().tolist() == want
        assert mirror.row_lens.tolist() == [len(model.get(row, [])) for row in range(max_rows + 1)]
    assert mirror.num_clamped == num_clamped
