"""`SchedulerOutput` of vLLM v1.

    adapter = VllmAdapter(max_rows=64)
    op, request_ids = adapter.forward_op(scheduler_output)      # rows of the op in the order of request_ids

vLLM names requests, not rows: the adapter gives each a row number while it has blocks. What the parts of an output mean here:

    scheduled_new_reqs                              a new lease: the whole row, full_refresh
    scheduled_cached_reqs, id in resumed_req_ids    `new_block_ids` replace the row: a new lease, full_refresh
    scheduled_cached_reqs, others                   `new_block_ids` are appended: a tail update
    finished_req_ids, preempted_req_ids             the row is released with the next op

Older outputs say `resumed_from_preemption`, one bool a request, in place of `resumed_req_ids`; the tokens of a resumed request
are in `all_token_ids` or `resumed_req_token_ids`. Blocks to be copied or zeroed are KV, not rows: whoever owns the KV does that
before the step. Not done here, and refused: draft tokens (`scheduled_spec_decode_tokens`), prompts given as embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from runtime_service.adapters.errors import MissingAttributeError, UnsupportedPlanError, read
from runtime_service.adapters.leases import RowPlan
from runtime_service.adapters.ops import OpWriter, PlannedRow, SamplingOf, greedy, whole
from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, Int32Array, RefusalCode

PRODUCER = "a SchedulerOutput of vLLM v1"


class VllmOp(NamedTuple):
    """One step. `request_ids` [R]: whose row each is."""

    op: ForwardOp
    request_ids: list[str]


class _Known(NamedTuple):
    """What was said of one request."""

    tokens: Int32Array  # prompt, or prompt and output at the last resume: what extend rows compute
    pages: Int32Array


class _Entry(NamedTuple):
    """One request of an output."""

    known: _Known
    computed: int
    is_new: bool  # or resumed: a lease begins


class VllmAdapter:
    """One scheduler's outputs, in order.

    Args:
        max_rows: rows of the mirror, at least the scheduler's `max_num_seqs`.
        group: which of the KV cache groups' blocks are passed on.
        sampling: request id → sampling parameters, asked once per lease.
    """

    def __init__(self, max_rows: int, *, group: int = 0, session_no: int = 1, sampling: SamplingOf = greedy) -> None:
        self._writer = OpWriter(max_rows, session_no=session_no, sampling=sampling)
        self._group = group
        self._known: dict[str, _Known] = {}
        self._rows: dict[str, int] = {}
        self._free = list(range(max_rows, 0, -1))  # a stack, the lowest number on top

    def row_of(self, request_id: str) -> int | None:
        """The row number of a request that has blocks."""
        return self._rows.get(request_id)

    def pages(self, request_id: str) -> Int32Array:
        """What the mirror was last told of the request's row, int32 [row_len]."""
        known = self._known.get(request_id)
        return np.empty(0, dtype=np.int32) if known is None else known.pages

    def reset(self, session_no: int | None = None) -> None:
        """After a refusal or a failed step: the next op opens a new session. Its rows must compute anew from token 0."""
        for request_id in list(self._rows):
            self._forget(request_id)
        self._writer.reset(session_no)

    def forward_op(self, output: Any) -> VllmOp:
        """The op for one output.

        Raises MissingAttributeError for an object that is none, UnsupportedPlanError for what this runtime does not do, and
        Refusal where the output contradicts earlier ones. Nothing has changed then.
        """
        scheduled: dict[str, int] = read(output, "num_scheduled_tokens", PRODUCER)
        if drafts := getattr(output, "scheduled_spec_decode_tokens", None):
            raise UnsupportedPlanError(PRODUCER, f"draft tokens for {min(drafts)!r} (scheduled_spec_decode_tokens)")
        over = set(read(output, "finished_req_ids", PRODUCER)) | set(getattr(output, "preempted_req_ids", None) or ())
        new = self._new_requests(output)
        cached = self._cached_requests(output, over)
        named = [*new, *cached]
        names = set(named)
        if len(names) < len(named):
            raise Refusal(RefusalCode.MALFORMED, detail="the output names a request twice")
        if unplanned := [request_id for request_id in named if scheduled.get(request_id, 0) < 1]:
            raise Refusal(RefusalCode.MALFORMED, detail=f"num_scheduled_tokens has no tokens for request {unplanned[0]!r}")
        if unnamed := [request_id for request_id, count in scheduled.items() if count and request_id not in names]:
            raise Refusal(RefusalCode.MALFORMED, detail=f"num_scheduled_tokens has tokens for request {unnamed[0]!r} alone")
        entries = new | cached
        rows, free = self._rows_after(over, named)
        planned = [self._planned(i, rows[i], entries[i], int(scheduled[i])) for i in named]
        planned.sort(key=lambda row: not row.is_extend)  # extend rows first, otherwise in vLLM's order
        op = self._writer.write(planned, over)
        for request_id in over:
            self._known.pop(request_id, None)
        self._known.update((request_id, entry.known) for request_id, entry in entries.items())
        self._rows, self._free = rows, free
        return VllmOp(op, [row.plan.request_id for row in planned])

    def _new_requests(self, output: Any) -> dict[str, _Entry]:
        """The requests that come with their prompts."""
        found = {}
        for request in read(output, "scheduled_new_reqs", PRODUCER):
            request_id: str = read(request, "req_id", PRODUCER)
            # Where a resumed request comes as a new one, its output so far belongs to what is computed again.
            tokens = getattr(request, "prefill_token_ids", None)
            if tokens is None or not len(tokens):
                tokens = read(request, "prompt_token_ids", PRODUCER)
            if tokens is None or not len(tokens):
                raise UnsupportedPlanError(PRODUCER, f"request {request_id!r} has no prompt_token_ids")
            pages = self._blocks(request_id, read(request, "block_ids", PRODUCER))
            if request_id in found:
                raise Refusal(RefusalCode.MALFORMED, request_id=request_id, detail="the output names a request twice")
            known = _Known(whole("prompt_token_ids", tokens).copy(), pages)
            found[request_id] = _Entry(known, int(read(request, "num_computed_tokens", PRODUCER)), is_new=True)
        return found

    def _cached_requests(self, output: Any, over: set[str]) -> dict[str, _Entry]:
        """The requests that were scheduled before."""
        cached = read(output, "scheduled_cached_reqs", PRODUCER)
        ids: Sequence[str] = read(cached, "req_ids", PRODUCER)
        blocks = read(cached, "new_block_ids", PRODUCER)
        computed = whole("num_computed_tokens", read(cached, "num_computed_tokens", PRODUCER)).tolist()
        if not len(ids) == len(blocks) == len(computed):
            detail = f"{len(ids)} req_ids, {len(blocks)} new_block_ids, {len(computed)} num_computed_tokens"
            raise Refusal(RefusalCode.MALFORMED, detail=f"scheduled_cached_reqs: {detail}")
        resumed = _resumed(cached, ids)
        found = {}
        for i, request_id in enumerate(ids):
            new = self._blocks(request_id, blocks[i])
            if request_id in found:
                raise Refusal(RefusalCode.MALFORMED, request_id=request_id, detail="the output names a request twice")
            if request_id in resumed:
                known = _Known(_all_tokens(cached, request_id, i), new)
            else:
                before = None if request_id in over else self._known.get(request_id)
                if before is None:
                    detail = f"request {request_id!r} is cached and not resumed, but holds no row here"
                    raise Refusal(RefusalCode.LEASE_NOT_STARTED, request_id=request_id, detail=detail)
                known = _Known(before.tokens, np.concatenate((before.pages, new)))
            found[request_id] = _Entry(known, computed[i], request_id in resumed)
        return found

    def _blocks(self, request_id: str, groups: Any) -> Int32Array:
        """Our group's blocks; None: no new ones."""
        if groups is None:
            return np.empty(0, dtype=np.int32)
        if not len(groups) or np.ndim(groups[0]) == 0:  # before there were groups
            return whole("block_ids", groups).copy()
        if self._group >= len(groups):
            what = f"request {request_id!r} has blocks of {len(groups)} groups, none of them is group {self._group}"
            raise UnsupportedPlanError(PRODUCER, what)
        return whole("block_ids", groups[self._group]).copy()

    def _rows_after(self, over: set[str], named: Sequence[str]) -> tuple[dict[str, int], list[int]]:
        """Row numbers and the free ones, once those that are over have left and all of `named` have one."""
        rows, free = dict(self._rows), list(self._free)
        free.extend(rows.pop(request_id) for request_id in sorted(over & rows.keys()))
        for request_id in named:
            if request_id not in rows:
                if not free:
                    detail = f"request {request_id!r} is one more than the {len(rows)} rows of the mirror"
                    raise Refusal(RefusalCode.ROW_OUT_OF_RANGE, request_id=request_id, detail=detail)
                rows[request_id] = free.pop()
        return rows, free

    def _planned(self, request_id: str, row: int, entry: _Entry, count: int) -> PlannedRow:
        (tokens, pages), computed, is_new = entry
        end, num_tokens = computed + count, len(tokens)
        if computed >= num_tokens and not is_new:  # a token that the runtime has sampled
            if count != 1:
                raise UnsupportedPlanError(PRODUCER, f"a decode step of {count} tokens for request {request_id!r}")
            if (last := self._writer.leases.end_of(request_id)) != computed:
                detail = f"request {request_id!r}: num_computed_tokens is {computed}, its last step ended at {last}"
                raise Refusal(RefusalCode.NOT_CONTIGUOUS, row, request_id, detail)
            ids = None
        elif end > num_tokens:
            detail = f"request {request_id!r}: tokens [{computed}, {end}) of the {num_tokens} that are known"
            raise Refusal(RefusalCode.MALFORMED, request_id=request_id, detail=detail)
        else:
            ids = tokens[computed:end]
        plan = RowPlan(row, request_id, pages, computed, count, sample=end >= num_tokens, begins_lease=is_new)
        return PlannedRow(plan, ids, num_tokens)

    def _forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._free.append(self._rows.pop(request_id))


def _resumed(cached: Any, ids: Sequence[str]) -> set[str]:
    if (resumed := getattr(cached, "resumed_req_ids", None)) is not None:
        return set(resumed)
    return {request_id for request_id, bit in zip(ids, read(cached, "resumed_from_preemption", PRODUCER), strict=True) if bit}


def _all_tokens(cached: Any, request_id: str, i: int) -> Int32Array:
    if (by_id := getattr(cached, "all_token_ids", None)) is not None:
        tokens = by_id.get(request_id)
    else:
        tokens = read(cached, "resumed_req_token_ids", PRODUCER)[i]
    if tokens is None or not len(tokens):
        raise MissingAttributeError(PRODUCER, f"all_token_ids[{request_id!r}]", cached)
    return whole("all_token_ids", tokens).copy()
