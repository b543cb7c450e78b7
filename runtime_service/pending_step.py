"""A step that was launched and not yet answered."""

from __future__ import annotations

import time

import numpy as np
import structlog

from runtime_service.errors import Refusal
from runtime_service.executors.base import PendingResult
from runtime_service.op_digests import PendingDigests
from runtime_service.ops import NO_TOKEN, BoolArray, ForwardOp, RowStatus, StepResult

log = structlog.get_logger(__name__)


class PendingStep:
    """A step that was launched: its op, what the model owes, and its answer once that is known."""

    def __init__(
        self, op: ForwardOp, outcome: PendingResult | None, clamped: BoolArray, digests: PendingDigests | None = None
    ) -> None:
        self.op = op
        self.answer: StepResult | Refusal | None = None
        self._outcome = outcome
        self._clamped = clamped
        self._digests = digests
        self._result: StepResult | None = None
        self.began_at = self.apply_s = 0.0  # see `timed`

    @classmethod
    def answered(cls, op: ForwardOp, answer: StepResult) -> PendingStep:
        """A step that owes nothing: a repeat."""
        step = cls(op, None, np.empty(0, dtype=np.bool_))
        step.answer = answer
        return step

    def timed(self, began_at: float, apply_s: float) -> PendingStep:
        """This step, with the time at which the runner began with it, and how long until it was applied to the mirror."""
        self.began_at, self.apply_s = began_at, apply_s
        return self

    def ready(self) -> bool:
        """Whether `StepRunner.collect` would return at once, as far as this step goes."""
        if self._outcome is None:
            return True
        try:
            return self._outcome.ready() and (self._digests is None or self._digests.ready())
        except Exception:  # what it failed with is for `collect` to say
            return True

    def drop(self) -> None:
        """Nobody wants the answer any more."""
        self._outcome = self._digests = None

    def wait(self) -> StepResult:
        """The result, from the op's own columns; raises what the step failed with."""
        if self._result is None:
            outcome, self._outcome = self._outcome, None
            if outcome is None:
                raise RuntimeError(f"the result of step {self.op.step} was dropped")
            op, result = self.op, outcome.wait()
            if len(result.tokens) != op.num_rows or len(result.row_status) != op.num_rows:
                raise RuntimeError(f"the model answered {len(result.tokens)} rows of {op.num_rows}")
            # Copies, whatever the model keeps.
            tokens, row_status = result.tokens.astype(np.int32), result.row_status.astype(np.uint8)
            if np.count_nonzero(self._clamped):
                tokens[self._clamped], row_status[self._clamped] = NO_TOKEN, RowStatus.CLAMPED
            if np.count_nonzero(op.sample) < op.num_rows:
                tokens[~op.sample] = NO_TOKEN
            logprob_columns = (result.logprobs, result.top_tokens, result.top_logprobs)
            self._result = StepResult(op.session_no, op.step, tokens, row_status, *logprob_columns)
            self._result.apply_us = int(self.apply_s * 1e6)
            self._result.step_us = max(1, int((time.perf_counter() - self.began_at) * 1e6))
            if self._digests is not None:
                self._add_digests(self._result, self._digests)
        return self._result

    def _add_digests(self, result: StepResult, digests: PendingDigests) -> None:
        result.digests, masked = digests.wait()
        if masked.any():
            result.tokens[masked] = NO_TOKEN
            result.row_status[masked] = RowStatus.OK  # nothing was computed that could be wrong
            rows = self.op.req_pool_indices[masked].tolist()
            log.warning("rows_masked", reason="their digests differ", session_no=result.session_no, step=result.step, rows=rows)
