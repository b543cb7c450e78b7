"""The mirror: refresh, tail, clamp, clearing; every entry that no op names stays bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from runtime_service import req_to_page as req_to_page_module
from runtime_service.kernels.mirror_apply import mirror_apply
from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ColumnTypeError, ColumnValueError, ReqToPage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = tuple[int, int, int, list[int], bool]


def i32(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A column."""
    return np.asarray(values, dtype=np.int32)


def make_op(rows: list[Row], released: list[int] | None = None) -> ForwardOp:
    """An op of rows (row, begin, size, whole row after the transition, full_refresh)."""
    sent = [page for _, begin, size, pages, full in rows for page in (pages if full else pages[begin : begin + size])]
    ones = i32([1] * len(rows))
    return ForwardOp(
        session_no=1,
        step=1,
        req_pool_indices=i32([row for row, *_ in rows]),
        row_generations=ones,
        row_lens=i32([len(pages) for _, _, _, pages, _ in rows]),
        begins=i32([begin for _, begin, *_ in rows]),
        sizes=i32([size for _, _, size, _, _ in rows]),
        full_refresh=np.array([full for *_, full in rows], dtype=np.bool_),
        occupied_pages=i32(sent),
        num_computed=ones,
        num_extend_rows=0,
        input_lens=ones,
        input_ids=i32([]),
        sample=np.ones(len(rows), dtype=np.bool_),
        released_rows=i32(released or []),
    )


def full(row: int, pages: list[int]) -> Row:
    """The row is rewritten as `pages`, with the begin and size of a new lease."""
    return (row, 0, len(pages), pages, True)


def tail(row: int, begin: int, pages: list[int]) -> Row:
    """The row is `pages` afterwards; those from `begin` are new."""
    return (row, begin, len(pages) - begin, pages, False)


class Launches:
    """Counts launches, and may send them to the Triton kernel, which the interpreter runs where there is no GPU."""

    def __init__(self, kernel: bool) -> None:
        self.count = 0
        self._kernel = kernel

    def __call__(self, mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
        assert num_rows > 0
        assert max_write_len > 0
        self.count += 1
        rows = staged[:num_rows].tolist()
        assert len(set(rows)) == num_rows, "two programs of one launch would race for a row"
        if not self._kernel:
            mirror_apply(mirror, staged, num_rows, max_write_len)
            return
        on_device = mirror.to(DEVICE)
        mirror_apply_triton(on_device, staged.to(DEVICE), num_rows, max_write_len)
        mirror.copy_(on_device)


@pytest.fixture(params=[False, True], ids=["naive", "triton"], autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
    """Every test of this file runs with the twin and with the kernel."""
    patch = pytest.MonkeyPatch()
    counter = Launches(kernel=request.param)
    patch.setattr(req_to_page_module, "mirror_apply", counter)
    yield counter
    patch.undo()


def mirror_of(width: int = 8, max_rows: int = 4, **options: Any) -> ReqToPage:
    """A small mirror with a pool that no test exhausts."""
    return ReqToPage(max_rows, width, 10_000, 4, **options)


def contents(mirror: ReqToPage) -> npt.NDArray[np.int32]:
    """A copy of all entries."""
    return mirror.table.cpu().numpy().copy()


def padded(mirror: ReqToPage, pages: list[int]) -> list[int]:
    """The whole mirror row of a row with these pages."""
    return pages + [0] * (mirror.max_pages_per_row - len(pages))


# ---------------------------------------------------------------------------------------------------------- the clamp


WIDE = 513


def wide_mirror() -> tuple[ReqToPage, npt.NDArray[np.int32]]:
    """Rows 1, 2, 3 of 400, 513 and 100 pages in a mirror of 513, and its contents."""
    mirror = mirror_of(WIDE, max_rows=4)
    mirror.apply(make_op([full(1, list(range(1, 401))), full(2, list(range(1001, 1514))), full(3, list(range(2001, 2101)))]))
    return mirror, contents(mirror)


def test_clamp_copies_what_fits_and_keeps_source_offsets_aligned() -> None:
    """Begins 400, 513, 100 with sizes 2, 1, 3 copy 2, 0 and 3 entries; every other entry stays bit for bit."""
    mirror, before = wide_mirror()
    rows = [
        tail(1, 400, [*range(1, 401), 7001, 7002]),
        tail(2, 513, [*range(1001, 1514), 7003]),
        tail(3, 100, [*range(2001, 2101), 7004, 7005, 7006]),
    ]
    wider = mirror.apply(make_op(rows))
    want = before.copy()
    want[1, 400:402] = [7001, 7002]
    want[3, 100:103] = [7004, 7005, 7006]
    assert np.array_equal(contents(mirror), want)
    assert wider.tolist() == [False, True, False]
    assert mirror.row_lens.tolist() == [0, 402, 514, 103, 0]
    assert mirror.valid_lens.tolist() == [0, 402, 513, 103, 0]


def test_clamp_in_the_middle_of_a_tail() -> None:
    """Begin 512 with size 4 copies one entry, and the next row's pages are its own."""
    mirror = mirror_of(WIDE)
    mirror.apply(make_op([full(1, list(range(1, 513))), full(2, [5])]))
    before = contents(mirror)
    mirror.apply(make_op([tail(1, 512, [*range(1, 513), 701, 702, 703, 704]), tail(2, 1, [5, 6])]))
    want = before.copy()
    want[1, 512] = 701
    want[2, 1] = 6
    assert np.array_equal(contents(mirror), want)


def test_clamp_of_full_refreshes() -> None:
    """Rows refreshed with 516 and 1,026 pages in the middle of a batch keep 513 each, and later rows their own pages."""
    mirror, before = wide_mirror()
    rows = [
        tail(1, 400, [*range(1, 401), 7001, 7002]),
        full(2, list(range(3001, 3517))),
        full(4, list(range(5001, 6027))),
        full(3, [8001, 8002, 8003]),
    ]
    wider = mirror.apply(make_op(rows))
    want = before.copy()
    want[1, 400:402] = [7001, 7002]
    want[2] = range(3001, 3514)
    want[4] = range(5001, 5514)
    want[3] = 0
    want[3, :3] = [8001, 8002, 8003]
    assert np.array_equal(contents(mirror), want)
    assert wider.tolist() == [False, True, True, False]
    assert mirror.num_clamped == 2


def test_tail_update_after_a_clamp_goes_on_from_the_stated_length() -> None:
    """After row_len 514 in a mirror of 513, begin 514 with size 1 is applied: nothing fits, and the length is 515."""
    mirror, _ = wide_mirror()
    pages = [*range(1001, 1514), 7003]
    mirror.apply(make_op([tail(2, 513, pages)]))
    before = contents(mirror)
    mirror.apply(make_op([tail(2, 514, [*pages, 7004])]))
    assert np.array_equal(contents(mirror), before)
    assert (int(mirror.row_lens[2]), int(mirror.valid_lens[2])) == (515, 513)


def test_clamp_warns_with_the_request_and_counts() -> None:
    """Each clamped row of each op is one warning with request, row, length and width, and one on the counter."""
    mirror = mirror_of(width=2)
    op = make_op([full(1, [1, 2, 3]), full(2, [4, 5]), full(3, [6, 7, 8, 9])])
    with capture_logs() as logs:
        mirror.apply(op, request_ids={1: "first", 2: "second"})
        mirror.apply(make_op([tail(2, 2, [4, 5])]), request_ids={2: "second"})
    facts = [(entry["log_level"], entry["request_id"], entry["row"], entry["row_len"], entry["width"]) for entry in logs]
    assert facts == [("warning", "first", 1, 3, 2), ("warning", "", 3, 4, 2)]
    assert mirror.num_clamped == 2


@pytest.mark.parametrize("row", [tail(1, 2, [1, 2, 3]), full(1, [1, 2, 3])], ids=["tail", "full"])
def test_row_wider_than_the_table_never_reaches_the_next_row(row: Row) -> None:
    """Three pages for a mirror of two leave the next row's entries alone (B33)."""
    mirror = mirror_of(width=2)
    mirror.apply(make_op([full(1, [1, 2]), full(2, [77, 78])]))
    mirror.apply(make_op([row]))
    assert contents(mirror).tolist() == [[0, 0], [1, 2], [77, 78], [0, 0], [0, 0]]


# ------------------------------------------------------------------------------------- refresh, tail, tenants


def test_resume_with_a_recycled_page_is_rewritten_from_logical_page_0() -> None:
    """Row [3,1], resumed on cached page 7 with 3 as its new tail, reads [7,1,3] and not [3,1,3] (B01)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [3, 1])]))
    mirror.apply(make_op([(1, 2, 1, [7, 1, 3], True)]))
    assert mirror.row(1).tolist() == [7, 1, 3]


def test_only_the_ops_own_flag_decides_between_append_and_rewrite() -> None:
    """A rewrite to a shorter row, then two appends, each end exactly as the op says (B04)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [10, 1, 2])]))
    mirror.apply(make_op([full(1, [5, 1])]))
    assert contents(mirror)[1].tolist() == padded(mirror, [5, 1])
    mirror.apply(make_op([tail(1, 2, [5, 1, 4])]))
    assert contents(mirror)[1].tolist() == padded(mirror, [5, 1, 4])
    mirror.apply(make_op([tail(1, 3, [5, 1, 4, 6])]))
    assert mirror.row(1).tolist() == [5, 1, 4, 6]


@pytest.mark.parametrize("successor", [[2], [2, 3, 8, 9, 10, 11]], ids=["shorter", "longer"])
@pytest.mark.parametrize("when", ["without release", "released before", "released in the same op"])
def test_nothing_of_a_rows_previous_tenant_stays_readable(successor: list[int], when: str) -> None:
    """After a change of tenant the entries past the new row are 0, however the change was told (B05)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [4, 5, 6, 7]), full(2, [20, 21])]))
    if when == "released before":
        mirror.apply(make_op([], released=[1]))
        assert mirror.row(1).tolist() == []
        assert not contents(mirror)[1].any()
    mirror.apply(make_op([full(1, successor)], released=[1] if when == "released in the same op" else []))
    assert contents(mirror)[1].tolist() == padded(mirror, successor)
    mirror.apply(make_op([tail(1, len(successor), [*successor, 12])]))
    assert mirror.row(1).tolist() == [*successor, 12]
    assert mirror.row(2).tolist() == [20, 21]


def test_released_row_that_is_not_refreshed_keeps_nothing() -> None:
    """A row released and tail-updated in one op, which the session refuses, would still show none of its old entries."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [4, 5, 6, 7])]))
    mirror.apply(make_op([tail(1, 2, [8, 9, 3])], released=[1]))
    assert contents(mirror)[1].tolist() == padded(mirror, [0, 0, 3])


def test_full_refresh_comes_before_the_nothing_appended_return(launches: Launches) -> None:
    """A row whose size is 0 is rewritten when the bit is set, in a batch and as the only row of a step (B06)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [3, 1]), full(2, [5, 6]), full(3, [2])]))
    mirror.apply(make_op([(1, 2, 0, [7, 1], True), (2, 2, 0, [5, 6], False), (3, 1, 2, [2, 8, 9], False)]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[7, 1], [5, 6], [2, 8, 9]]
    mirror.apply(make_op([(1, 2, 0, [3, 1], True)]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[3, 1], [5, 6], [2, 8, 9]]
    assert launches.count == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_position_in_the_op_is_not_the_row(order: tuple[int, int, int]) -> None:
    """Rows of an op may come in any order, and each finds its own pages (B07, B08)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [10, 11]), full(2, [12]), full(3, [13, 14])]))
    rows = [tail(3, 2, [13, 14, 15]), full(2, [20, 21, 22]), (1, 2, 0, [16, 11], True)]
    mirror.apply(make_op([rows[i] for i in order]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[16, 11], [20, 21, 22], [13, 14, 15]]


def test_released_rows_are_cleared_in_the_same_launch(launches: Launches) -> None:
    """Releases, one of them repeated and one of a row that was empty, and updates are one launch."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [1, 2]), full(2, [3])]))
    mirror.apply(make_op([tail(2, 1, [3, 4])], released=[1, 1, 4]))
    assert contents(mirror).tolist() == [padded(mirror, []) if row != 2 else padded(mirror, [3, 4]) for row in range(5)]
    assert launches.count == 2


def test_steps_with_nothing_to_do_launch_nothing(launches: Launches) -> None:
    """An empty op, rows without new pages, and the release of an empty row leave device and launch count alone (B45)."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [1, 2])]))
    before = contents(mirror)
    mirror.apply(make_op([]))
    mirror.apply(make_op([(1, 2, 0, [1, 2], False)]))
    mirror.apply(make_op([], released=[3]))
    assert launches.count == 1
    assert np.array_equal(contents(mirror), before)


def test_page_0_never_counts_as_a_page() -> None:
    """Rows of any length end in 0, the reserved page, and row 0 is never written (B50)."""
    mirror = mirror_of(width=4)
    mirror.apply(make_op([full(1, [1]), full(2, [2]), full(3, [6, 1]), full(4, [1, 6])]))
    assert contents(mirror).tolist() == [[0] * 4, [1, 0, 0, 0], [2, 0, 0, 0], [6, 1, 0, 0], [1, 6, 0, 0]]
    assert mirror.row(1).tolist() == [1]


@pytest.mark.parametrize("width", [1, 2, 3, 17, 100])
def test_rows_as_long_as_the_width_allows(width: int) -> None:
    """Rows of 0, 1, W-1 and W pages are exact in mirrors of odd width (B49)."""
    mirror = mirror_of(width)
    for num_pages in (width, 0, width - 1, 1, width):
        pages = list(range(1, num_pages + 1))
        mirror.apply(make_op([full(2, pages)]))
        assert contents(mirror)[2].tolist() == padded(mirror, pages)
        assert mirror.row(2).tolist() == pages


def test_without_zero_fill_stale_entries_stay() -> None:
    """The demonstration mode keeps what a release or a shorter row leaves behind, which is the fault it is to show."""
    mirror = mirror_of(zero_fill=False)
    mirror.apply(make_op([full(1, [1, 2])]))
    mirror.apply(make_op([], released=[1]))
    assert mirror.row(1).tolist() == []
    mirror.apply(make_op([(1, 2, 0, [3, 2], False)]))
    assert mirror.row(1).tolist() == [1, 2]
    mirror.apply(make_op([tail(1, 2, [3, 2, 1])]))
    assert mirror.row(1).tolist() == [1, 2, 1]
    mirror.apply(make_op([full(1, [9])]))
    assert contents(mirror)[1].tolist() == padded(mirror, [9, 2, 1])


def test_reset_empties_every_row() -> None:
    """After a reset no row has a length or an entry, and the counter of clamped rows goes on."""
    mirror = mirror_of(width=2)
    mirror.apply(make_op([full(1, [1, 2, 3]), full(2, [4])]))
    mirror.reset()
    assert not contents(mirror).any()
    assert not mirror.row_lens.any()
    assert not mirror.valid_lens.any()
    assert mirror.num_clamped == 1


def test_read_rows_gives_copies_in_the_order_asked_for() -> None:
    """Rows are read as copies, repeated and unordered numbers included, and numbers out of range are refused."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [1, 2]), full(3, [5])]))
    rows = mirror.read_rows([3, 1, 2, 3])
    assert [row.tolist() for row in rows] == [[5], [1, 2], [], [5]]
    rows[0][:] = 99
    assert mirror.row(3).tolist() == [5]
    assert mirror.read_rows([]) == []
    for number in (-1, 5):
        with pytest.raises(IndexError, match=str(number)):
            mirror.row(number)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, ">i4"])
def test_other_integer_widths_are_converted_exactly(dtype: npt.DTypeLike) -> None:
    """Columns of another integer type give [7,1,3], never [7,0,1] (B52)."""
    mirror = mirror_of()
    op = make_op([full(1, [7, 1, 3])])
    for column in ("req_pool_indices", "row_lens", "begins", "sizes", "occupied_pages", "released_rows"):
        setattr(op, column, getattr(op, column).astype(dtype))
    mirror.apply(op)
    assert mirror.row(1).tolist() == [7, 1, 3]


def test_strided_and_read_only_columns_are_read_right() -> None:
    """Every second element of a buffer, and a view of received bytes, are taken for what they are (B48)."""
    mirror = mirror_of()
    op = make_op([full(1, [7, 1, 3])])
    op.occupied_pages = i32([7, 0, 1, 0, 3, 0])[::2]
    op.row_lens = np.frombuffer(i32([3]).tobytes(), dtype=np.int32)
    mirror.apply(op)
    assert mirror.row(1).tolist() == [7, 1, 3]


@pytest.mark.parametrize(
    ("column", "values", "error", "message"),
    [
        ("occupied_pages", np.array([7.0, 1.0, 3.0]), ColumnTypeError, "occupied_pages is float64: int32 is needed"),
        ("occupied_pages", np.array([7, 1, 1 << 31]), ColumnTypeError, "does not fit into int32"),
        ("row_lens", np.array([True]), ColumnTypeError, "row_lens is bool"),
        ("full_refresh", np.array([1]), ColumnTypeError, "full_refresh is int64: bool is needed"),
        ("occupied_pages", i32([7, 1]), ColumnValueError, "occupied_pages: 2 is outside its limit: 3 entries"),
        ("occupied_pages", i32([7, 1, 3, 4]), ColumnValueError, "occupied_pages: 4"),
        ("occupied_pages", i32([[7, 1, 3]]), ColumnValueError, "occupied_pages: 2 is outside its limit: one dimension"),
        ("full_refresh", np.array([[True]]), ColumnValueError, "one dimension"),
        ("begins", i32([0, 0]), ColumnValueError, "begins: 2 is outside its limit: 1 entries"),
        ("full_refresh", np.array([], dtype=np.bool_), ColumnValueError, "full_refresh: 0"),
        ("req_pool_indices", i32([0]), ColumnValueError, r"req_pool_indices: 0 is outside its limit: \[1, 4\]"),
        ("req_pool_indices", i32([5]), ColumnValueError, "req_pool_indices: 5"),
        ("released_rows", i32([1, -1]), ColumnValueError, "released_rows: -1"),
        ("begins", i32([1]), ColumnValueError, r"row_lens: 3 is outside its limit: begin \+ size = 1 \+ 3"),
        ("sizes", i32([-3]), ColumnValueError, r"begin \+ size = 0 \+ -3"),
    ],
)
def test_bad_columns_are_refused_before_anything_is_written(
    column: str, values: npt.NDArray[Any], error: type[Exception], message: str, launches: Launches
) -> None:
    """A column that cannot be read, or would lead out of its row, is named and changes nothing."""
    mirror = mirror_of()
    mirror.apply(make_op([full(1, [4, 5]), full(2, [6])]))
    before, row_lens = contents(mirror), mirror.row_lens.copy()
    op = make_op([full(1, [7, 1, 3])], released=[2])
    setattr(op, column, values)
    with pytest.raises(error, match=message):
        mirror.apply(op)
    assert launches.count == 1
    assert np.array_equal(contents(mirror), before)
    assert np.array_equal(mirror.row_lens, row_lens)


@pytest.mark.parametrize("size", ["max_rows", "max_pages_per_row", "num_pages", "page_size"])
def test_sizes_below_1_are_refused(size: str) -> None:
    """A mirror without rows, width, pages or page size cannot be made."""
    sizes: dict[str, Any] = {"max_rows": 1, "max_pages_per_row": 1, "num_pages": 1, "page_size": 1} | {size: 0}
    with pytest.raises(ColumnValueError, match=size):
        ReqToPage(**sizes)


# ------------------------------------------------------------------------------------------- against a model


@given(data=st.data())
def test_random_ops_match_rows_kept_in_lists(data: st.DataObject) -> None:
    """Any sequence of refreshes, tails and releases, clamped ones too, gives the table that plain lists give (I1, I9)."""
    width, max_rows = data.draw(st.sampled_from([1, 3, 7])), 3
    mirror = ReqToPage(max_rows, width, 10_000, 4)
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
        wider = mirror.apply(make_op(rows, released))
        assert wider.tolist() == [len(pages) > width for _, _, _, pages, _ in rows]
        want = [padded(mirror, model.get(row, [])[:width]) for row in range(max_rows + 1)]
        assert contents(mirror).tolist() == want
        assert mirror.row_lens.tolist() == [len(model.get(row, [])) for row in range(max_rows + 1)]
    assert mirror.num_clamped == num_clamped


@pytest.mark.gpu
def test_a_stalled_stream_gets_every_step_as_it_was_staged() -> None:
    """A thousand steps queued behind random stalls leave the rows of the last one on a GPU (B43)."""
    rng = np.random.default_rng(11)
    mirror = ReqToPage(8, 513, 1 << 20, 16, device="cuda")
    model: dict[int, list[int]] = {}
    for _ in range(1000):
        if rng.random() < 0.02:
            torch.cuda._sleep(int(rng.integers(1, 20_000_000)))  # type: ignore[no-untyped-call]
        rows: list[Row] = []
        for row in np.flatnonzero(rng.random(8) < 0.5) + 1:
            old = model.get(int(row), [])
            if not old or len(old) > 600 or rng.random() < 0.2:
                new = rng.integers(1, 1 << 20, size=int(rng.integers(1, 600))).tolist()
                rows.append(full(int(row), new))
            else:
                new = [*old, *rng.integers(1, 1 << 20, size=int(rng.integers(0, 4))).tolist()]
                rows.append(tail(int(row), len(old), new))
            model[int(row)] = new
        mirror.apply(make_op(rows))
    assert contents(mirror).tolist() == [padded(mirror, model.get(row, [])[:513]) for row in range(9)]
