"""The mirror and its input: other types and layouts, columns and sizes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runtime_service.req_to_page import ColumnTypeError, ColumnValueError, ReqToPage

MirrorOf = Callable[..., Any]


def i32(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A column."""
    return np.asarray(values, dtype=np.int32)


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
    mirror_of: MirrorOf, ops: Any, column: str, values: npt.NDArray[Any], error: type[Exception], message: str, launches: Any
) -> None:
    """A column that cannot be read, or would lead out of its row, is named and changes nothing."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [4, 5]), ops.full(2, [6])]))
    before, row_lens = mirror.contents(), mirror.row_lens.copy()
    op = ops.make([ops.full(1, [7, 1, 3])], released=[2])
    setattr(op, column, values)
    with pytest.raises(error, match=message):
        mirror.apply(op)
    assert launches.count == 1
    assert np.array_equal(mirror.contents(), before)
    assert np.array_equal(mirror.row_lens, row_lens)


@pytest.mark.parametrize("size", ["max_rows", "max_pages_per_row", "num_pages", "page_size"])
def test_sizes_below_1_are_refused(size: str) -> None:
    """A mirror without rows, width, pages or page size cannot be made."""
    sizes: dict[str, Any] = {"max_rows": 1, "max_pages_per_row": 1, "num_pages": 1, "page_size": 1} | {size: 0}
    with pytest.raises(ColumnValueError, match=size):
        ReqToPage(**sizes)
