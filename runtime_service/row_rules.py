"""The rules that every row of an op must keep, evaluated for all rows at once.

`evaluate` fills one line of a bool matrix per rule, so that the usual case costs one `any()` over the matrix; only when it is
true somewhere does anybody ask which rule and which row. `RULES` gives code and wording in the order in which faults are
reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from runtime_service.op_checks import Int64Array, Limits
from runtime_service.ops import BoolArray, ForwardOp, RefusalCode


@dataclass(slots=True)
class RowView:
    """What is remembered of each row number, [max_rows + 1] entries each."""

    generation: Int64Array  # last one seen; 0: none
    live: BoolArray  # that generation's lease has begun and was not released
    row_len: Int64Array  # pages, as stated by the last op of the lease, unclamped
    end: Int64Array  # num_computed + input_len of the last op of the lease
    sampled: BoolArray  # the lease was asked for a token

    def clear(self) -> None:
        """Forget all rows."""
        for column in (self.generation, self.live, self.row_len, self.end, self.sampled):
            column[:] = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to refuse. `strict_only`: it compares with what the lease did before, and `simulate` may turn it off."""

    code: RefusalCode
    strict_only: bool
    describe: Callable[[ForwardOp, int, Limits, RowView], str]


def _row(op: ForwardOp, i: int) -> int:
    return int(op.req_pool_indices[i])


def _input_len(op: ForwardOp, i: int, limits: Limits, view: RowView) -> str:
    kind, needed = ("an extend row", "at least 1") if i < op.num_extend_rows else ("a decode row", "exactly 1")
    return f"input_len {op.input_lens[i]} of {kind} must be {needed}"


def _stale(op: ForwardOp, i: int, limits: Limits, view: RowView) -> str:
    generation, last = op.row_generations[i], view.generation[_row(op, i)]
    if 0 < generation == last:
        return f"generation {generation} was released; the next lease needs a higher one"
    return f"generation {generation} is lower than {max(last, 1)}, the lowest one that may come"


def _too_short(op: ForwardOp, i: int, limits: Limits, view: RowView) -> str:
    end = int(op.num_computed[i]) + int(op.input_lens[i])
    room = int(op.row_lens[i]) * limits.page_size
    added = f"num_computed {op.num_computed[i]} + input_len {op.input_lens[i]}"
    return f"{added} = {end} tokens, its {op.row_lens[i]} pages hold {room}"


RULES: Final = (
    Rule(RefusalCode.ROW_REPEATED, False, lambda op, i, limits, view: "the op names this row twice"),
    Rule(
        RefusalCode.MALFORMED,
        False,
        lambda op, i, limits, view: (
            f"a length is negative: row_len {op.row_lens[i]}, begin {op.begins[i]}, size {op.sizes[i]}, "
            f"num_computed {op.num_computed[i]}"
        ),
    ),
    Rule(RefusalCode.MALFORMED, False, _input_len),
    Rule(
        RefusalCode.LENGTH_MISMATCH,
        False,
        lambda op, i, limits, view: f"begin {op.begins[i]} + size {op.sizes[i]} is not row_len {op.row_lens[i]}",
    ),
    Rule(RefusalCode.STALE_GENERATION, True, _stale),
    Rule(
        RefusalCode.LEASE_NOT_STARTED,
        True,
        lambda op, i, limits, view: (
            f"tail update of generation {op.row_generations[i]}, whose lease was never refreshed (begin {op.begins[i]})"
        ),
    ),
    Rule(
        RefusalCode.GAP,
        True,
        lambda op, i, limits, view: f"begin {op.begins[i]} is not the row_len {view.row_len[_row(op, i)]} last applied",
    ),
    Rule(
        RefusalCode.NOT_CONTIGUOUS,
        True,
        lambda op, i, limits, view: (
            f"num_computed {op.num_computed[i]} is not {view.end[_row(op, i)]}, where the lease's previous step ended"
        ),
    ),
    Rule(RefusalCode.ROW_TOO_SHORT, False, _too_short),
    Rule(
        RefusalCode.NEVER_SAMPLED,
        False,
        lambda op, i, limits, view: "a decode row, but its lease was never asked for a token",
    ),
)
NUM_RULES: Final = len(RULES)
STRICT_ONLY: Final = [number for number, rule in enumerate(RULES) if rule.strict_only]


def evaluate(
    op: ForwardOp,
    limits: Limits,
    view: RowView,
    released: BoolArray | None,
    stamp: Int64Array,
    index: npt.NDArray[np.intp],
    bad: BoolArray,
) -> BoolArray:
    """Fill `bad[:, :R]`, one line per rule of `RULES`; returns the rows, bool [R], whose op begins a new lease.

    Needs what `check_columns` checks: equal lengths, row numbers in range, R at most max_rows. `released` [max_rows + 1] marks
    the rows that the op releases (None: it releases none), `stamp` and `bad` are scratch, `index` counts 0, 1, 2, …
    Sums are taken in 64 bits: entries of a hostile op may be large.
    """
    num_rows = op.num_rows
    rows = op.req_pool_indices.astype(np.intp)  # once: indexing with int32 costs a conversion each time
    full = op.full_refresh
    bad = bad[:, :num_rows]
    index = index[:num_rows]
    # A row number named twice is overwritten by its later entry.
    stamp[rows] = index
    np.not_equal(stamp[rows], index, out=bad[0])
    np.less(op.row_lens | op.begins | op.sizes | op.num_computed, 0, out=bad[1])  # the sign bit of any of them
    np.less(op.input_lens, 1, out=bad[2])
    decode = slice(op.num_extend_rows, num_rows)
    np.not_equal(op.input_lens[decode], 1, out=bad[2, decode])
    np.not_equal(np.add(op.begins, op.sizes, dtype=np.int64), op.row_lens, out=bad[3])

    generation = view.generation[rows]
    over = ~view.live[rows]
    if released is not None:
        over |= released[rows]
    new = (op.row_generations > generation) | over
    tail = ~full
    # A live lease may go on; a row without one needs a higher generation than it has seen.
    np.less(op.row_generations, generation + over, out=bad[4])
    np.logical_and(new, tail, out=bad[5])
    np.logical_and(tail & ~new, op.begins != view.row_len[rows], out=bad[6])
    np.logical_and(~new, op.num_computed != view.end[rows], out=bad[7])
    end = np.add(op.num_computed, op.input_lens, dtype=np.int64)
    short = end > np.multiply(op.row_lens, limits.page_size, dtype=np.int64)
    np.logical_and(short, op.row_lens <= limits.max_pages_per_row, out=bad[8])
    bad[9] = False
    np.logical_or(new[decode], ~view.sampled[rows[decode]], out=bad[9, decode])
    return new
