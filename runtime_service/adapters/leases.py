"""What a mirror was told of each row, and from it the bit that a producer does not have.

A producer's plan says which pages a request has *now*. The mirror must be told what changed since it was last told, and whether
that is more than a tail. `Leases` remembers, for each row number, the request, its pages and where its last step ended, and
compares:

    another request, or the same one that computes anew           a new lease: the whole row, full_refresh
    an entry below the known length differs, or the row shrank    the whole row, full_refresh
    else                                                          the tail [known length, row length)

Comparing costs O(pages of the row). A producer that knows better says so by its own `full_refresh`, which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runtime_service.errors import Refusal
from runtime_service.ops import Int32Array, RefusalCode


@dataclass(slots=True)
class _Lease:
    request_id: str
    generation: int
    pages: Int32Array
    end: int  # tokens computed by the last step
    sampled: bool


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of a producer's plan. `num_computed` None: it goes on where its last step ended."""

    row: int
    request_id: str
    pages: Int32Array
    num_computed: int | None
    input_len: int
    sample: bool = True
    full_refresh: bool | None = None
    """None: the producer has no such bit."""
    begins_lease: bool = False
    """The producer says so; also without it, a request that is not where it was left begins one."""


class RowColumns(NamedTuple):
    """One row's entries in the columns of an op."""

    row: int
    generation: int
    row_len: int
    begin: int
    size: int
    full_refresh: bool
    pages: Int32Array
    num_computed: int
    is_new: bool


class Leases:
    """Rows as they were last passed on. Rows are counted from 1 to `max_rows`."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._leases: dict[int, _Lease] = {}
        self._row_of: dict[str, int] = {}
        self._generations = [0] * (max_rows + 1)
        self._released: list[int] = []

    def release(self, request_id: str) -> None:
        """The request is over, or has lost its row: the next update says so. Harmless when it has none."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            del self._leases[row]
            self._released.append(row)

    def reset(self) -> None:
        """The mirror was emptied: every row is told whole again. Generations go on."""
        self._leases.clear()
        self._row_of.clear()
        self._released.clear()

    def pages(self, row: int) -> Int32Array:
        """What the mirror has been told of this row, int32 [row_len]."""
        lease = self._leases.get(row)
        return np.empty(0, dtype=np.int32) if lease is None else lease.pages

    def row_of(self, request_id: str) -> int | None:
        """The row that the request holds, as far as was told."""
        return self._row_of.get(request_id)

    def end_of(self, request_id: str) -> int | None:
        """Tokens computed by the request's last step; None where it has no lease."""
        row = self._row_of.get(request_id)
        return None if row is None else self._leases[row].end

    def plan(self, rows: Sequence[RowPlan], over: Iterable[str] = ()) -> list[RowColumns]:
        """Columns of these rows, once the requests that are `over` have lost theirs. Changes nothing. Raises Refusal."""
        columns = []
        seen: set[int] = set()
        names: set[str] = set()
        ended = frozenset(over)
        for plan in rows:
            if not 1 <= plan.row <= self.max_rows:
                raise _refusal(RefusalCode.ROW_OUT_OF_RANGE, plan, f"row numbers are in [1, {self.max_rows}]")
            if plan.row in seen:
                raise _refusal(RefusalCode.ROW_REPEATED, plan, "the plan names this row twice")
            if plan.request_id in names:
                raise _refusal(RefusalCode.MALFORMED, plan, "the plan names this request twice")
            if plan.input_len < 1 or (plan.num_computed or 0) < 0:
                detail = f"it computes {plan.input_len} tokens from token {plan.num_computed} on"
                raise _refusal(RefusalCode.LENGTH_MISMATCH, plan, detail)
            seen.add(plan.row)
            names.add(plan.request_id)
            columns.append(self._columns_of(plan, ended))
        return columns

    def commit(self, rows: Sequence[RowPlan], columns: Sequence[RowColumns], over: Iterable[str] = ()) -> list[int]:
        """Take over what was planned: the mirror is told. Returns the rows to release before: of requests that are `over`, that
        `release` was told of, or that go on in another row.
        """
        for request_id in over:
            self.release(request_id)
        for plan in rows:  # every row that is left before any is taken: they may change places
            if (held := self._row_of.get(plan.request_id)) is not None and held != plan.row:
                self.release(plan.request_id)
        released, self._released = sorted(set(self._released)), []
        for plan, column in zip(rows, columns, strict=True):
            self._commit(plan, column)
        return released

    def _columns_of(self, plan: RowPlan, ended: frozenset[str]) -> RowColumns:
        lease = self._leases.get(plan.row)
        pages, row_len = plan.pages, len(plan.pages)
        is_new = plan.begins_lease or lease is None or lease.request_id != plan.request_id or plan.request_id in ended
        if lease is not None and not is_new and plan.num_computed is not None and plan.num_computed != lease.end:
            is_new = True  # it lost what it had computed and computes again
        if is_new:
            num_computed = plan.num_computed
            if num_computed is None:
                raise _refusal(RefusalCode.NEVER_SAMPLED, plan, "its first step is a decode step")
            if plan.full_refresh is False:
                raise _refusal(RefusalCode.LEASE_NOT_STARTED, plan, "its first update has full_refresh 0")
            generation = self._generations[plan.row] + 1
            return RowColumns(plan.row, generation, row_len, 0, row_len, True, pages, num_computed, True)
        assert lease is not None
        if plan.num_computed is None and not lease.sampled:
            raise _refusal(RefusalCode.NEVER_SAMPLED, plan, "a decode step before its prompt is computed")
        known = lease.pages
        begin = min(len(known), row_len)
        same_head = row_len >= len(known) and bool((pages[:begin] == known).all())
        full = (not same_head) if plan.full_refresh is None else plan.full_refresh
        if not full and row_len < len(known):
            raise _refusal(RefusalCode.GAP, plan, f"a tail update to {row_len} pages overlaps the {len(known)} it has")
        taken = pages if full else pages[begin:]
        return RowColumns(plan.row, lease.generation, row_len, begin, row_len - begin, full, taken, lease.end, False)

    def _commit(self, plan: RowPlan, column: RowColumns) -> None:
        before = self._leases.get(plan.row)
        if before is not None and before.request_id != plan.request_id:
            self._row_of.pop(before.request_id, None)
        sampled = plan.sample or (before is not None and not column.is_new and before.sampled)
        end = column.num_computed + plan.input_len
        if before is None or column.full_refresh:
            pages = plan.pages.copy()  # the producer may go on writing to its own array
        else:  # what the mirror holds, also where a producer's own bit is wrong
            pages = np.concatenate((before.pages, column.pages))
        self._leases[plan.row] = _Lease(plan.request_id, column.generation, pages, end, sampled)
        self._row_of[plan.request_id] = plan.row
        self._generations[plan.row] = column.generation


def _refusal(code: RefusalCode, plan: RowPlan, detail: str) -> Refusal:
    text = f"row {plan.row} of request {plan.request_id!r}: {detail}"
    return Refusal(code, max(0, plan.row), plan.request_id, text)
