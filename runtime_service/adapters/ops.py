"""From planned rows to a `ForwardOp`: the part that all adapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime_service.adapters.leases import Leases, RowColumns, RowPlan
from runtime_service.columns import ColumnTypeError, as_bool, as_int32
from runtime_service.ops import GREEDY, BoolArray, ForwardOp, Int32Array, LeaseStart, SamplingParams

SamplingOf = Callable[[str], SamplingParams]
"""Request id → how its tokens are chosen."""


def greedy(request_id: str) -> SamplingParams:
    """Greedy, whoever asks."""
    return GREEDY


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of a step: its pages and, for an extend row, its tokens. A decode row's token is the runtime's own."""

    plan: RowPlan
    input_ids: Int32Array | None
    prompt_len: int

    @property
    def is_extend(self) -> bool:
        return self.input_ids is not None


class OpWriter:
    """Numbers the steps of one session and writes their ops.

    Starts at session `session_no`; `reset` begins the next one, after a refusal or a failed step.
    """

    def __init__(self, max_rows: int, *, session_no: int = 1, sampling: SamplingOf = greedy) -> None:
        self.leases = Leases(max_rows)
        self.session_no = session_no
        self.last_step = 0
        self._sampling = sampling

    def reset(self, session_no: int | None = None) -> None:
        """Forget all rows; the next op is step 1 of the next session (or of this one)."""
        self.session_no = self.session_no + 1 if session_no is None else session_no
        self.last_step = 0
        self.leases.reset()

    def write(self, rows: Sequence[PlannedRow], over: Iterable[str] = ()) -> ForwardOp:
        """The op of the next step; `rows` are extend rows first, requests that are `over` lose their rows before them.

        Raises Refusal, and what `sampling` raises; nothing has changed then.
        """
        plans, over = [row.plan for row in rows], list(over)
        columns = self.leases.plan(plans, over)
        input_ids = [row.input_ids for row in rows if row.input_ids is not None]
        starts = [self._start(row, column) for row, column in zip(rows, columns, strict=True) if column.is_new]
        released = self.leases.commit(plans, columns, over)
        self.last_step += 1
        return ForwardOp(
            session_no=self.session_no,
            step=self.last_step,
            req_pool_indices=_int32([column.row for column in columns]),
            row_generations=_int32([column.generation for column in columns]),
            row_lens=_int32([column.row_len for column in columns]),
            begins=_int32([column.begin for column in columns]),
            sizes=_int32([column.size for column in columns]),
            full_refresh=np.array([column.full_refresh for column in columns], dtype=np.bool_),
            occupied_pages=_joined([column.pages for column in columns]),
            num_computed=_int32([column.num_computed for column in columns]),
            num_extend_rows=len(input_ids),
            input_lens=_int32([row.plan.input_len for row in rows]),
            input_ids=_joined(input_ids),
            sample=np.array([row.plan.sample for row in rows], dtype=np.bool_),
            released_rows=_int32(released),
            lease_starts=starts,
        )

    def _start(self, row: PlannedRow, column: RowColumns) -> LeaseStart:
        request_id = row.plan.request_id
        return LeaseStart(column.row, request_id, self._sampling(request_id), prompt_len=row.prompt_len)


def whole(column: str, values: object) -> Int32Array:
    """A producer's column (list, tuple, array or tensor) as int32 [n]. Raises ColumnTypeError, ColumnValueError."""
    if isinstance(values, (set, frozenset, dict, str, bytes)) or values is None:
        raise ColumnTypeError(column, np.dtype(object), f"a sequence of whole numbers is needed, not {type(values).__name__}")
    if callable(move := getattr(values, "cpu", None)):  # a tensor, of whatever device
        values = move()
    return as_int32(column, values)  # type: ignore[arg-type]


def flags(column: str, values: object) -> BoolArray:
    """Likewise a column of bools, which may be written as 0 and 1."""
    if callable(move := getattr(values, "cpu", None)):
        values = move()
    array = np.asarray(values)
    is_number = array.size and array.dtype.kind in "iu" and bool(((array == 0) | (array == 1)).all())
    return as_bool(column, array.astype(np.bool_) if is_number else array)


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def _joined(parts: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, dtype=np.int32)
