"""A span for each step that computes a request's first token, in the trace of that request. Only imported where tracing is on.

The trace context comes with the first op of a lease, as long as the request has no token; the step is the first one of the
lease that samples.
"""

from __future__ import annotations

import time

from pagemirror.tracing import Traces, context_of
from runtime_service.errors import Refusal
from runtime_service.ops import ForwardOp, LeaseStart, StepResult
from runtime_service.pending_step import PendingStep


class FirstTokenSpans:
    """Told of each step in the order of the ops."""

    def __init__(self, traces: Traces) -> None:
        self._tracer = traces.tracer
        self._awaited: dict[int, LeaseStart] = {}  # by row: leases whose first token has not come

    def note(self, step: PendingStep | Refusal, answer: StepResult | Refusal) -> None:
        """One op was answered."""
        if isinstance(step, Refusal) or isinstance(answer, Refusal):
            return
        op = step.op
        for lease in op.lease_starts:
            self._awaited.pop(lease.req_pool_index, None)
            if lease.traceparent:
                self._awaited[lease.req_pool_index] = lease
        if not self._awaited:
            return
        for position, row in enumerate(op.req_pool_indices[: op.num_extend_rows].tolist()):
            if row in self._awaited and op.sample[position]:
                self._add(op, position, self._awaited.pop(row), step.began_at, answer)

    def _add(self, op: ForwardOp, position: int, lease: LeaseStart, began_at: float, answer: StepResult) -> None:
        now = time.time_ns()
        attributes: dict[str, str | int] = {
            "pagemirror.request_id": lease.request_id,
            "pagemirror.session_no": op.session_no,
            "pagemirror.step": op.step,
            "pagemirror.row": int(op.req_pool_indices[position]),
            "pagemirror.rows": op.num_rows,
            "pagemirror.tokens": int(op.input_lens.sum()),
            "pagemirror.apply_us": answer.apply_us,
        }
        began = now - int((time.perf_counter() - began_at) * 1e9)
        parent = context_of(lease.traceparent)
        self._tracer.start_span("first token step", parent, attributes=attributes, start_time=began).end(now)
