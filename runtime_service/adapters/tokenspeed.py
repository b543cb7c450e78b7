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

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime_service.adapters.errors import UnsupportedPlanError, read
from runtime_service.adapters.leases import RowPlan
from runtime_service.adapters.ops import OpWriter, PlannedRow, SamplingOf, flags, greedy, whole
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

        Raises MissingAttributeError for an object that is none, ColumnTypeError and ColumnValueError for columns that are not
        of whole numbers, Refusal for those that contradict each other or what was passed on before; nothing has changed then.
        """
        ids: Sequence[str] = read(batch, "request_ids", PRODUCER)
        rows = _column(batch, "request_pool_indices").tolist()
        input_lens = _column(batch, "input_lengths").tolist()
        num_extends = int(read(batch, "num_extends", PRODUCER))
        prefix_lens = _column(batch, "extend_prefix_lens").tolist()
        prefill_lens = _column(batch, "prefill_lengths").tolist()
        tokens = _column(batch, "input_ids")
        tables, bits = self._tables(batch, ids, rows)
        for name, column in (("request_pool_indices", rows), ("input_lengths", input_lens), ("the page rows", tables)):
            if len(column) != len(ids):
                raise Refusal(RefusalCode.MALFORMED, detail=f"{name} has {len(column)} entries for {len(ids)} request ids")
        if not 0 <= num_extends <= len(ids) or min(len(prefix_lens), len(prefill_lens)) < num_extends:
            detail = (
                f"{num_extends} extend rows of {len(ids)}, {len(prefix_lens)} prefix and {len(prefill_lens)} prefill lengths"
            )
            raise Refusal(RefusalCode.MALFORMED, detail=detail)
        planned, at = [], 0
        for i, request_id in enumerate(ids):
            new, is_extend = input_lens[i], i < num_extends
            plan = RowPlan(
                row=rows[i],
                request_id=request_id,
                pages=tables[i],
                num_computed=prefix_lens[i] if is_extend else None,
                input_len=new,
                sample=not is_extend or prefix_lens[i] + new >= prefill_lens[i],
                full_refresh=None if bits is None else bool(bits[i]),
            )
            if is_extend:
                planned.append(PlannedRow(plan, tokens[at : at + new], prefill_lens[i]))
                at += max(0, new)  # fewer than 1 are refused below
            elif new <= 1:
                planned.append(PlannedRow(plan, None, 0))
            else:
                raise UnsupportedPlanError(PRODUCER, f"a decode row of request {request_id!r} computes {new} tokens, not 1")
        if at > len(tokens):
            raise Refusal(RefusalCode.MALFORMED, detail=f"input_ids has {len(tokens)} entries, the extend rows ask for {at}")
        return self._writer.write(planned)

    def _tables(self, batch: Any, ids: Sequence[str], rows: list[int]) -> tuple[list[Int32Array], Sequence[bool] | None]:
        """Each row's pages, and the producer's own bits where it has them."""
        if hasattr(batch, "block_tables_arrays"):
            table = self._group_table(read(batch, "block_tables_arrays", PRODUCER))
            lens = (table != PADDING).sum(axis=1).tolist()
            for row, length in zip(table, lens, strict=True):
                if (row[length:] != PADDING).any():
                    raise Refusal(RefusalCode.MALFORMED, detail=f"padding inside of a block table row: {row.tolist()}")
            return [row[:length] for row, length in zip(table, lens, strict=True)], None
        occupied = [whole("occupied_pages", row) for row in read(batch, "occupied_pages", PRODUCER)]
        begins, sizes = _column(batch, "begins").tolist(), _column(batch, "sizes").tolist()
        bits = flags("full_refresh", read(batch, "full_refresh", PRODUCER)) if hasattr(batch, "full_refresh") else None
        if not len(begins) == len(sizes) == len(occupied) == len(occupied if bits is None else bits):
            detail = f"{len(begins)} begins and {len(sizes)} sizes for {len(occupied)} rows of occupied_pages"
            raise Refusal(RefusalCode.MALFORMED, detail=detail if bits is None else f"{detail}, {len(bits)} of full_refresh")
        for i, pages in enumerate(occupied):
            if begins[i] < 0 or sizes[i] < 0 or begins[i] + sizes[i] != len(pages):
                detail = f"entry {i}: begin {begins[i]} + size {sizes[i]} is not the row's {len(pages)} pages"
                raise Refusal(RefusalCode.LENGTH_MISMATCH, detail=detail)
        found = None if bits is None else bits.tolist()
        self._check_begins(ids, rows, begins, occupied, found)
        return occupied, found

    def _check_begins(
        self,
        ids: Sequence[str],
        rows: list[int],
        begins: list[int],
        occupied: list[Int32Array],
        bits: Sequence[bool] | None,
    ) -> None:
        """A tail must begin where the row that this adapter knows of this request ends, or at 0, where the row begins anew."""
        leases = self._writer.leases
        for i, (request_id, row, begin) in enumerate(zip(ids, rows, begins, strict=False)):
            known = len(leases.pages(row)) if leases.row_of(request_id) == row else 0
            is_refresh = bits is not None and bits[i]
            if begin > known and not is_refresh:
                word = "leaves a gap after"
            elif 0 < begin < min(known, len(occupied[i])) and not is_refresh:
                word = "overlaps"
            else:
                continue
            detail = f"row {row} of request {request_id!r}: begin {begin} {word} the {known} pages it has"
            raise Refusal(RefusalCode.GAP, max(0, row), request_id, detail)

    def _group_table(self, groups: Any) -> Int32Array:
        """The table of our group, int32 [R, W]."""
        if not isinstance(groups, Mapping):
            raise UnsupportedPlanError(
                PRODUCER, f"block_tables_arrays() gives {type(groups).__name__}, not a table per cache group"
            )
        group = next(iter(groups)) if self._group is None and len(groups) == 1 else self._group
        if group is None or group not in groups:
            raise UnsupportedPlanError(PRODUCER, f"cache group {self._group!r} is not one of {sorted(groups)}; pass `group=`")
        table = np.asarray(groups[group])
        if table.ndim != 2:
            raise Refusal(
                RefusalCode.MALFORMED, detail=f"the table of cache group {group!r} has shape {table.shape}, not [R, W]"
            )
        return whole(f"the table of cache group {group!r}", table.reshape(-1)).reshape(table.shape)


def _column(batch: Any, attribute: str) -> Int32Array:
    return whole(attribute, read(batch, attribute, PRODUCER))
