"""Forward ops of tokenspeed-scheduler.

    adapter = TokenSpeedAdapter(max_rows=64)
    op = adapter.forward_op(plan.forward[0])        # a ForwardOp: for ReqToPage.apply, StepRunner.run, or the wire
    adapter.finish("request-7")                     # its row is released with the next op

Two shapes are known, and told apart by what the object has:

- 0.1.0: `occupied_pages` (each row's pages, whole), `begins`, `sizes`. Some builds add `full_refresh`; where there is none the
  adapter finds out by comparing with what it last passed on, since these columns name the appended tail also when pages before
  it have changed.
- 0.1.42: `block_tables_arrays()`, one int32 table per cache group, padded with -1, with 0 for a page that a sliding window has
  left behind. Such *holes* are passed on as 0, the dummy page; `RuntimeService` refuses them, a `ReqToPage` of one's own keeps
  them. Pages to be copied or zeroed (`plan.pages_to_copy`, `pages_to_zero`) are KV, not rows: whoever owns the KV does that
  before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime_service.adapters.errors import UnsupportedPlanError, read
from runtime_service.adapters.leases import RowPlan
from runtime_service.adapters.ops import OpWriter, PlannedRow, SamplingOf, greedy
from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, Int32Array, RefusalCode

PRODUCER = "a forward op of tokenspeed-scheduler"
PADDING = -1


class TokenSpeedAdapter:
    """One scheduler's ops, in order.

    Args:
        max_rows: rows of the mirror; at least the scheduler's `max_batch_size`, whose row numbers start at 1.
        group: the cache group of newer ops whose table is passed on; may be left out where there is one group.
        sampling: request id → sampling parameters, asked once per lease.
    """

    def __init__(self, max_rows: int, *, group: str | None = None, session_no: int = 1, sampling: SamplingOf = greedy) -> None:
        self._writer = OpWriter(max_rows, session_no=session_no, sampling=sampling)
        self._group = group

    def finish(self, request_id: str) -> None:
        """The request has ended or was aborted: its row is released with the next op. Harmless when it has none."""
        self._writer.leases.release(request_id)

    def reset(self, session_no: int | None = None) -> None:
        """After a refusal or a failed step: the next op opens a new session. Its rows must compute anew from token 0."""
        self._writer.reset(session_no)

    def pages(self, row: int) -> Int32Array:
        """What the mirror was last told of a row, int32 [row_len]."""
        return self._writer.leases.pages(row)

    def forward_op(self, batch: Any) -> ForwardOp:
        """The op for one forward op of a plan.

        Raises MissingAttributeError for an object that is none, Refusal for columns that contradict each other or what was
        passed on before; nothing has changed then.
        """
        ids: Sequence[str] = read(batch, "request_ids", PRODUCER)
        rows: Sequence[int] = read(batch, "request_pool_indices", PRODUCER)
        input_lens: Sequence[int] = read(batch, "input_lengths", PRODUCER)
        num_extends = int(read(batch, "num_extends", PRODUCER))
        prefix_lens: Sequence[int] = read(batch, "extend_prefix_lens", PRODUCER)
        prefill_lens: Sequence[int] = read(batch, "prefill_lengths", PRODUCER)
        tokens = np.asarray(read(batch, "input_ids", PRODUCER), dtype=np.int32)
        tables, bits = self._tables(batch)
        for name, column in (("request_pool_indices", rows), ("input_lengths", input_lens), ("the page rows", tables)):
            if len(column) != len(ids):
                raise Refusal(RefusalCode.MALFORMED, detail=f"{name} has {len(column)} entries for {len(ids)} request ids")
        if min(len(prefix_lens), len(prefill_lens)) < num_extends:
            raise Refusal(RefusalCode.MALFORMED, detail=f"{num_extends} extend rows, but fewer prefix or prefill lengths")
        planned, at = [], 0
        for i, request_id in enumerate(ids):
            new, is_extend = int(input_lens[i]), i < num_extends
            plan = RowPlan(
                row=int(rows[i]),
                request_id=request_id,
                pages=tables[i],
                num_computed=int(prefix_lens[i]) if is_extend else None,
                input_len=new,
                sample=not is_extend or prefix_lens[i] + new >= prefill_lens[i],
                full_refresh=None if bits is None else bool(bits[i]),
            )
            if is_extend:
                planned.append(PlannedRow(plan, tokens[at : at + new], int(prefill_lens[i])))
                at += new
            elif new == 1:
                planned.append(PlannedRow(plan, None, 0))
            else:
                raise UnsupportedPlanError(PRODUCER, f"a decode row of request {request_id!r} computes {new} tokens, not 1")
        if at > len(tokens):
            raise Refusal(RefusalCode.MALFORMED, detail=f"input_ids has {len(tokens)} entries, the extend rows ask for {at}")
        return self._writer.write(planned)

    def _tables(self, batch: Any) -> tuple[list[Int32Array], Sequence[bool] | None]:
        """Each row's pages, and the producer's own bits where it has them."""
        if hasattr(batch, "block_tables_arrays"):
            table = self._group_table(read(batch, "block_tables_arrays", PRODUCER))
            lens = (table != PADDING).sum(axis=1).tolist()
            for row, length in zip(table, lens, strict=True):
                if (row[length:] != PADDING).any():
                    raise Refusal(RefusalCode.MALFORMED, detail=f"padding inside of a block table row: {row.tolist()}")
            return [row[:length].copy() for row, length in zip(table, lens, strict=True)], None
        occupied = [np.asarray(row, dtype=np.int32) for row in read(batch, "occupied_pages", PRODUCER)]
        begins, sizes = read(batch, "begins", PRODUCER), read(batch, "sizes", PRODUCER)
        if not len(begins) == len(sizes) == len(occupied):
            detail = f"{len(begins)} begins and {len(sizes)} sizes for {len(occupied)} rows of occupied_pages"
            raise Refusal(RefusalCode.MALFORMED, detail=detail)
        for i, pages in enumerate(occupied):
            if begins[i] < 0 or sizes[i] < 0 or begins[i] + sizes[i] != len(pages):
                detail = f"entry {i}: begin {begins[i]} + size {sizes[i]} is not the row's {len(pages)} pages"
                raise Refusal(RefusalCode.LENGTH_MISMATCH, detail=detail)
        bits = read(batch, "full_refresh", PRODUCER) if hasattr(batch, "full_refresh") else None
        self._check_begins(batch, begins, occupied, bits)
        return occupied, bits

    def _check_begins(self, batch: Any, begins: Sequence[int], occupied: list[Int32Array], bits: Sequence[bool] | None) -> None:
        """A tail must begin where the row that this adapter knows of this request ends, or at 0, where the row begins anew."""
        leases = self._writer.leases
        ids, rows = read(batch, "request_ids", PRODUCER), read(batch, "request_pool_indices", PRODUCER)
        for i, (request_id, row) in enumerate(zip(ids, rows, strict=False)):
            begin, known = begins[i], len(leases.pages(row)) if leases.row_of(request_id) == row else 0
            is_refresh = bits is not None and bits[i]
            if begin > known and not is_refresh:
                word = "leaves a gap after"
            elif 0 < begin < min(known, len(occupied[i])) and not is_refresh:
                word = "overlaps"
            else:
                continue
            detail = f"row {row} of request {request_id!r}: begin {begin} {word} the {known} pages it has"
            raise Refusal(RefusalCode.GAP, row, request_id, detail)

    def _group_table(self, groups: Any) -> Int32Array:
        """The table of our group, int32 [R, W]."""
        if self._group is None and len(groups) == 1:
            return np.asarray(next(iter(groups.values())), dtype=np.int32)
        if self._group is None or self._group not in groups:
            raise UnsupportedPlanError(PRODUCER, f"cache group {self._group!r} is not one of {sorted(groups)}; pass `group=`")
        return np.asarray(groups[self._group], dtype=np.int32)
