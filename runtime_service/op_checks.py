"""What can be refused in an op by looking at the op alone: unequal columns, bad ids, bad sampling parameters.

What needs the history of a row (lost updates, stale generations, …) is `runtime_service.session`'s. Everything here is a fixed
number of numpy calls, except that lease starts, which are rare, are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime_service.ops import BoolArray, ForwardOp, LeaseStart, RefusalCode
from runtime_service.sampling_checks import greedy_only_error, sampling_error

Int64Array = npt.NDArray[np.int64]

ROW_COLUMNS = ("row_generations", "row_lens", "begins", "sizes", "full_refresh", "num_computed", "input_lens", "sample")
"""Columns of a `ForwardOp` with one entry a row, besides `req_pool_indices`."""


BIT = np.left_shift(1, np.arange(8)).astype(np.uint8)
"""Where a row has a bit for each page, that of page p in its byte is BIT[p & 7]."""


class Fault(Exception):
    """One thing that is wrong with an op; the session makes a `Refusal` of it, which also names the request.

    `row` is a row number, 0 when no row is to blame.
    """

    def __init__(self, code: RefusalCode, row: int, detail: str) -> None:
        super().__init__(code, row, detail)
        self.code = code
        self.row = row
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runtime can hold: the numbers of its hello."""

    max_rows: int
    max_pages_per_row: int
    num_pages: int
    page_size: int
    vocab_size: int
    greedy_only: bool = False  # the model computes its tokens: it cannot honour sampling parameters


def check_columns(op: ForwardOp, limits: Limits) -> None:
    """Raise a `Fault` unless all per-row columns have R entries and every row number is in [1, max_rows]."""
    num_rows = op.num_rows
    if not (
        len(op.row_generations) == num_rows
        and len(op.row_lens) == num_rows
        and len(op.begins) == num_rows
        and len(op.sizes) == num_rows
        and len(op.full_refresh) == num_rows
        and len(op.num_computed) == num_rows
        and len(op.input_lens) == num_rows
        and len(op.sample) == num_rows
    ):
        unequal = [f"{name} {len(getattr(op, name))}" for name in ROW_COLUMNS if len(getattr(op, name)) != num_rows]
        raise Fault(
            RefusalCode.MALFORMED, 0, f"columns of unequal length: req_pool_indices {num_rows}, {', '.join(unequal)} entries"
        )
    if not 0 <= op.num_extend_rows <= num_rows:
        raise Fault(RefusalCode.MALFORMED, 0, f"num_extend_rows is {op.num_extend_rows}, the op has {num_rows} rows")
    for rows, name in ((op.req_pool_indices, "req_pool_indices"), (op.released_rows, "released_rows")):
        if len(rows) and (rows.min() < 1 or rows.max() > limits.max_rows):
            row = int(rows[(rows < 1) | (rows > limits.max_rows)][0])
            raise Fault(
                RefusalCode.ROW_OUT_OF_RANGE, max(row, 0), f"{name} holds {row}, row numbers are in [1, {limits.max_rows}]"
            )
    if len(op.row_digests) not in {0, num_rows}:
        raise Fault(RefusalCode.MALFORMED, 0, f"row_digests has {len(op.row_digests)} entries, the op {num_rows} rows")
    if num_rows > limits.max_rows:  # more rows than row numbers: one of them comes twice
        numbers, counts = np.unique(op.req_pool_indices, return_counts=True)
        raise Fault(RefusalCode.ROW_REPEATED, int(numbers[counts > 1][0]), "the op names this row twice")


def entry_rows(op: ForwardOp) -> Int64Array:
    """For each entry of `occupied_pages` the index into the op's R rows that it belongs to; lengths must be non-negative.

    Raises a `Fault` when the column is not exactly as long as the rows say.
    """
    counts = np.where(op.full_refresh, op.row_lens, op.sizes)
    total = int(counts.sum())
    if total != len(op.occupied_pages):
        raise Fault(
            RefusalCode.MALFORMED, 0, f"occupied_pages has {len(op.occupied_pages)} entries, row_lens and sizes ask for {total}"
        )
    if total == 0:
        return np.empty(0, dtype=np.int64)
    return np.repeat(np.arange(len(counts)), counts)


def check_pages(op: ForwardOp, limits: Limits, owners: Int64Array) -> None:
    """Raise a `Fault` unless every page id is in [1, num_pages] and none is sent twice for one row.

    `owners` is `entry_rows(op)`.
    """
    pages = op.occupied_pages
    if len(pages) == 0:
        return
    if pages.min() < 1 or pages.max() > limits.num_pages:
        entry = int(np.flatnonzero((pages < 1) | (pages > limits.num_pages))[0])
        raise Fault(
            RefusalCode.PAGE_OUT_OF_RANGE,
            int(op.req_pool_indices[owners[entry]]),
            f"page {pages[entry]} is outside [1, {limits.num_pages}]",
        )
    if not (owners[1:] == owners[:-1]).any():
        return  # no row was sent two pages
    keys = owners * (limits.num_pages + 1) + pages
    keys.sort()
    repeated = keys[1:] == keys[:-1]
    if repeated.any():
        owner, page = divmod(int(keys[1:][repeated][0]), limits.num_pages + 1)
        raise Fault(RefusalCode.PAGE_REPEATED, int(op.req_pool_indices[owner]), f"page {page} is sent twice for one row")


def check_held(op: ForwardOp, held: npt.NDArray[np.uint8], owners: Int64Array) -> None:
    """Raise a `Fault` for a page of a tail update that the row already holds below `begin`.

    `held` [max_rows + 1, bytes] has a bit for each (row, page), `owners` is `entry_rows(op)`.
    """
    full = op.full_refresh
    if full.all():
        return
    pages = op.occupied_pages
    rows = op.req_pool_indices[owners]
    again = (held[rows, pages >> 3] & BIT[pages & 7]) != 0
    again &= ~full[owners]
    if again.any():
        entry = int(np.flatnonzero(again)[0])
        detail = f"page {pages[entry]} is already in the row, below the tail update"
        raise Fault(RefusalCode.PAGE_REPEATED, int(rows[entry]), detail)


def hold_pages(op: ForwardOp, held: npt.NDArray[np.uint8], owners: Int64Array, *, checked: bool) -> None:
    """Set the bits of the op's pages in `held`, after those of refreshed rows were cleared; arguments as of `check_held`.

    `checked`: `check_pages` and `check_held` found nothing.
    """
    rows, pages, full = op.req_pool_indices, op.occupied_pages, op.full_refresh
    if full.any():
        held[rows[full]] = 0
    where = (rows.astype(np.int64) * held.shape[1])[owners]
    where += pages >> 3
    # Two pages of one row may share a byte, which a plain assignment would not survive.
    if checked:  # no bit is set, and none comes twice: adding it sets it, in a fifth of the time
        np.add.at(held.reshape(-1), where, BIT[pages & 7])
    else:
        np.bitwise_or.at(held.reshape(-1), where, BIT[pages & 7])


def check_tokens(op: ForwardOp, limits: Limits) -> None:
    """Raise a `Fault` unless `input_ids` holds exactly the extend rows' tokens, each in [0, vocab_size)."""
    ids = op.input_ids
    lens = op.input_lens[: op.num_extend_rows]
    total = int(lens.sum()) if op.num_extend_rows else 0
    if total != len(ids):
        raise Fault(
            RefusalCode.MALFORMED, 0, f"input_ids has {len(ids)} entries, input_lens of the extend rows ask for {total}"
        )
    if total and (ids.min() < 0 or ids.max() >= limits.vocab_size):
        entry = int(np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[0])
        owner = int(np.searchsorted(np.cumsum(lens), entry, side="right"))
        raise Fault(
            RefusalCode.TOKEN_OUT_OF_RANGE,
            int(op.req_pool_indices[owner]),
            f"token {ids[entry]} is outside [0, {limits.vocab_size})",
        )


def check_lease_starts(op: ForwardOp, limits: Limits) -> dict[int, str]:
    """Raise a `Fault` for a lease start of no row of the op, a second one of a row, or bad parameters.

    Returns row number → request id of the lease starts.
    """
    if not op.lease_starts:
        return {}
    present = set(op.req_pool_indices.tolist())
    started: dict[int, str] = {}
    for lease in op.lease_starts:
        row = lease.req_pool_index
        if row not in present:
            raise Fault(RefusalCode.MALFORMED, row, "lease start for a row that the op does not name")
        if row in started:
            raise Fault(RefusalCode.MALFORMED, row, "two lease starts for one row")
        started[row] = lease.request_id
        check_lease_start(op, lease, limits)
    return started


def check_lease_start(op: ForwardOp, lease: LeaseStart, limits: Limits) -> None:
    """Raise a `Fault` for bad parameters of one lease start, whose row the op names."""
    row = lease.req_pool_index
    if wrong := sampling_error(lease.sampling, lease.prompt_len, limits.vocab_size):
        raise Fault(RefusalCode.BAD_SAMPLING, row, wrong)
    if limits.greedy_only and (wrong := greedy_only_error(lease.sampling)):
        raise Fault(RefusalCode.BAD_SAMPLING, row, wrong)
    for token in lease.stop_ids:
        if not 0 <= token < limits.vocab_size:
            raise Fault(RefusalCode.TOKEN_OUT_OF_RANGE, row, f"stop id {token} is outside [0, {limits.vocab_size})")
    if lease.history or lease.sampling.has_penalty:
        _check_history(op, lease, limits)


def check_verify_rows(op: ForwardOp, limits: Limits, live: BoolArray) -> None:
    """Raise a `Fault` unless `verify_rows` are different rows that the op does not name and that have a lease after it.

    `live` [max_rows + 1] says which rows have one before it. Row numbers of the op's other columns were checked.
    """
    rows, digests = op.verify_rows, op.verify_digests
    if len(rows) != len(digests):
        raise Fault(RefusalCode.MALFORMED, 0, f"verify_rows has {len(rows)} entries, verify_digests {len(digests)}")
    if not len(rows):
        return
    outside = rows[(rows < 1) | (rows > limits.max_rows)]
    if len(outside):
        row, allowed = int(outside[0]), f"row numbers are in [1, {limits.max_rows}]"
        raise Fault(RefusalCode.ROW_OUT_OF_RANGE, max(row, 0), f"verify_rows holds {row}, {allowed}")
    named = np.bincount(op.req_pool_indices, minlength=limits.max_rows + 1)
    named += np.bincount(rows, minlength=limits.max_rows + 1)
    repeated = rows[named[rows] > 1]
    if len(repeated):
        raise Fault(RefusalCode.ROW_REPEATED, int(repeated[0]), "verify_rows holds it, and the op names it once more")
    without = rows[~live[rows] | np.isin(rows, op.released_rows)]
    if len(without):
        raise Fault(RefusalCode.LEASE_NOT_STARTED, int(without[0]), "verify_rows holds it, but it has no lease")


def _check_history(op: ForwardOp, lease: LeaseStart, limits: Limits) -> None:
    """Raise a `Fault` unless `history` is what it should be: all computed tokens where a penalty is on, else nothing."""
    row = lease.req_pool_index
    tokens = np.frombuffer(lease.history, dtype="<i4")
    expected = int(op.num_computed[op.req_pool_indices == row][0]) if lease.sampling.has_penalty else 0
    if len(tokens) != expected:
        why = f"num_computed is {expected}" if lease.sampling.has_penalty else "no penalty is on"
        raise Fault(RefusalCode.MALFORMED, row, f"history has {len(tokens)} tokens, {why}")
    bad = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    if len(bad):
        raise Fault(RefusalCode.TOKEN_OUT_OF_RANGE, row, f"history token {bad[0]} is outside [0, {limits.vocab_size})")
