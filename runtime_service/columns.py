"""What the mirror asks of the columns of an op before it addresses memory by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from runtime_service.errors import RuntimeServiceError
from runtime_service.ops import BoolArray, Int32Array

_INT32 = np.iinfo(np.int32)
_INT32_DTYPE = np.dtype(np.int32)
_BOOL_DTYPE = np.dtype(np.bool_)


class ColumnTypeError(RuntimeServiceError, TypeError):
    """A column of an op that cannot be read as what it must be without changing a value."""

    def __init__(self, column: str, dtype: np.dtype[Any], reason: str) -> None:
        super().__init__(f"{column} is {dtype}: {reason}")
        self.column = column
        self.dtype = dtype
        self.reason = reason


class ColumnValueError(RuntimeServiceError, ValueError):
    """A column of an op whose shape or values would make the mirror address memory that is not the row's."""

    def __init__(self, column: str, value: int, limit: str) -> None:
        super().__init__(f"{column}: {value} is outside its limit: {limit}")
        self.column = column
        self.value = value
        self.limit = limit


def are_plain_int32(*columns: object) -> bool:
    """Whether each is an int32 array [n] as it is."""
    for column in columns:
        if type(column) is not np.ndarray or column.dtype is not _INT32_DTYPE or column.ndim != 1:
            return False
    return True


def is_plain_bool(column: object) -> bool:
    """Whether it is a bool array [n] as it is."""
    return type(column) is np.ndarray and column.dtype is _BOOL_DTYPE and column.ndim == 1


def as_int32(column: str, values: npt.ArrayLike) -> Int32Array:
    """`values` as int32 [n], equal value for value; raises ColumnTypeError, or ColumnValueError for several dimensions."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ColumnValueError(column, array.ndim, "one dimension")
    if array.dtype == np.int32:
        return array
    if array.dtype.kind not in "iu":
        if array.size == 0:  # the dtype of an empty list is float64
            return np.empty(0, dtype=np.int32)
        raise ColumnTypeError(column, array.dtype, "int32 is needed")
    if array.size and (int(array.min()) < _INT32.min or int(array.max()) > _INT32.max):
        raise ColumnTypeError(column, array.dtype, "a value does not fit into int32")
    return array.astype(np.int32)


def as_bool(column: str, values: npt.ArrayLike) -> BoolArray:
    """`values` as bool [n]; only bools are taken, because 2 or 0.5 would have to be guessed at."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ColumnValueError(column, array.ndim, "one dimension")
    if array.dtype != np.bool_:
        if array.size == 0:
            return np.empty(0, dtype=np.bool_)
        raise ColumnTypeError(column, array.dtype, "bool is needed")
    return array


def check_rows(column: str, rows: Int32Array, max_rows: int) -> None:
    """Raise ColumnValueError unless every row number is in [1, max_rows]."""
    if len(rows):
        lowest, highest = rows.min(), rows.max()
        if lowest < 1 or highest > max_rows:
            raise ColumnValueError(column, int(lowest if lowest < 1 else highest), f"[1, {max_rows}]")


def row_index(column: str, rows: Int32Array, max_rows: int) -> npt.NDArray[np.intp]:
    """The row numbers as an index; raises ColumnValueError unless every one is in [1, max_rows]."""
    index = rows.view(np.uint32).astype(np.intp)  # a negative one is large there
    if len(rows) and (np.count_nonzero(index) != len(rows) or index.max() > max_rows):
        check_rows(column, rows, max_rows)
    return index


def check_lengths(row_lens: Int32Array, begins: Int32Array, sizes: Int32Array) -> None:
    """Raise ColumnValueError unless begin + size is row_len, and neither is negative, in every row."""
    # In 64 bits, where the sum of two int32 cannot wrap back into agreement.
    sums = begins.astype(np.int64)
    sums += sizes
    bad = sums != row_lens
    bad |= (begins | sizes) < 0  # the sign bit of either
    if np.count_nonzero(bad):
        i = int(bad.argmax())
        raise ColumnValueError(
            "row_lens", int(row_lens[i]), f"begin + size = {int(begins[i])} + {int(sizes[i])}, neither of them negative"
        )


def marked(rows: Int32Array, max_rows: int) -> BoolArray:
    """For each row number whether it is one of `rows`, bool [max_rows + 1]."""
    marks = np.zeros(max_rows + 1, dtype=np.bool_)
    marks[rows] = True
    return marks
