"""One step, start to end, in the one order that lets a page be granted again at once.

Check, mirror, batch, model, feedback, result: nothing that reads or writes rows, KV or last tokens runs outside of it.

The runner is driven by exactly one thread: the runtime's execution thread, or the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.errors import Refusal
from runtime_service.executors.base import ModelExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.op_checks import Int64Array
from runtime_service.ops import NO_TOKEN, ForwardOp, Int32Array, RefusalCode, RowStatus, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowsSnapshot:
    """Rows of the mirror at one moment: N row numbers and, column by column, what `ReadRowsResponse` says about them."""

    session_no: int  # 0: no session is open
    last_step: int
    rows: Int32Array  # [N]
    row_generations: Int32Array  # [N], 0 where the row has no lease
    row_lens: Int32Array  # [N], as the scheduler stated them
    valid_lens: Int32Array  # [N], entries that may be read
    pages: Int32Array  # concatenated, valid_len entries each


class StepRunner:
    """Applies ops to a session, a mirror and a model, and answers each with a result or a refusal, never with an exception."""

    def __init__(self, session: SessionState, mirror: ReqToPage, executor: ModelExecutor) -> None:
        self.session = session
        self.mirror = mirror
        self.executor = executor
        self._builder = BatchBuilder(mirror, mirror.table.device)
        # Feedback for decode rows. Row 0 is the padding sink; a row without a token so far feeds token 0.
        self._last_tokens = torch.zeros(session.limits.max_rows + 1, dtype=torch.int64, device=mirror.table.device)

    def open(self, scheduler_epoch: int, session_no: int, overlap_depth: int) -> None:
        """Begin the session of a hello with everything dropped. Raises like `SessionState.open`, changing nothing."""
        self.session.open(scheduler_epoch, session_no, overlap_depth)
        self._drop_rows()

    def reset(self, session_no: int) -> None:
        """Begin the scheduler's next session with everything dropped. Raises like `SessionState.reset`, changing nothing."""
        self.session.reset(session_no)
        self._drop_rows()

    def close(self) -> None:
        """The scheduler is gone: end the session and drop everything."""
        self.session.close()
        self._drop_rows()

    def run(self, op: ForwardOp) -> StepResult | Refusal:
        """Check, apply and execute one op. A refused op has changed nothing; after a failed one only a reset helps."""
        try:
            stored = self.session.check(op)
        except Refusal as refusal:
            log.warning("refused", session_no=op.session_no, step=op.step, code=refusal.code.name, detail=refusal.detail)
            return refusal
        if stored is not None:
            return stored
        try:
            result = self._execute(op)
        except Exception as error:
            code = RefusalCode.OUT_OF_MEMORY if (out_of_memory := _is_out_of_memory(error)) else RefusalCode.STEP_FAILED
            log.exception("step failed", session_no=op.session_no, step=op.step, code=code.name, num_rows=op.num_rows)
            # The peer learns which step it was and no more; the traceback is in our log.
            what = "not enough memory for" if out_of_memory else "an error inside the runtime during"
            return self.session.fail(op, code, f"{what} step {op.step} of {op.num_rows} rows; see the runtime's log")
        self.session.store(result)
        return result

    def refuse(self, refusal: Refusal) -> Refusal:
        """An op could not even be read: break the session and return what to answer."""
        return self.session.refuse(refusal)

    def read_rows(self, rows: Int32Array | None = None) -> RowsSnapshot:
        """These rows, or every row that has a lease, ascending. Raises IndexError for a number outside [1, max_rows]."""
        session, mirror = self.session, self.mirror
        numbers: Int64Array = session.lease_rows() if rows is None else np.asarray(rows, dtype=np.int64)
        max_rows = session.limits.max_rows
        outside = numbers[(numbers < 1) | (numbers > max_rows)]
        if len(outside):
            raise IndexError(f"row {outside[0]} is outside [1, {max_rows}]")
        parts = mirror.read_rows(numbers) if len(numbers) else []
        return RowsSnapshot(
            session_no=session.session_no,
            last_step=session.last_step,
            rows=numbers.astype(np.int32),
            row_generations=session.generations(numbers).astype(np.int32),
            row_lens=mirror.row_lens[numbers],
            valid_lens=mirror.valid_lens[numbers],
            pages=np.concatenate(parts) if parts else np.empty(0, dtype=np.int32),
        )

    def _execute(self, op: ForwardOp) -> StepResult:
        session, executor = self.session, self.executor
        session.commit(op)
        self.mirror.apply(op, request_ids=session.request_ids)
        if len(op.released_rows):
            executor.release_rows(op.released_rows)
        if op.lease_starts:
            executor.start_leases(op.lease_starts)
            self._last_tokens[[lease.req_pool_index for lease in op.lease_starts]] = 0
        if op.num_rows == 0:
            return StepResult(op.session_no, op.step, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8))
        batch = self._builder.build(op, self._last_tokens)
        outcome = executor.execute(batch)
        if len(outcome.tokens) != op.num_rows or len(outcome.row_status) != op.num_rows:
            raise RuntimeError(f"the model answered {len(outcome.tokens)} rows of {op.num_rows}")
        tokens = np.where(op.sample & ~batch.clamped, outcome.tokens, NO_TOKEN).astype(np.int32, copy=False)
        row_status = np.where(batch.clamped, RowStatus.CLAMPED, outcome.row_status).astype(np.uint8, copy=False)
        self._feed_back(batch, tokens)
        return StepResult(op.session_no, op.step, tokens, row_status)

    def _feed_back(self, batch: ForwardBatch, tokens: Int32Array) -> None:
        sampled = tokens != NO_TOKEN
        if sampled.all():
            self._last_tokens[batch.rows] = torch.from_numpy(tokens.astype(np.int64)).to(self._last_tokens.device)
        elif sampled.any():
            which = torch.from_numpy(np.flatnonzero(sampled)).to(self._last_tokens.device)
            values = torch.from_numpy(tokens[sampled].astype(np.int64)).to(self._last_tokens.device)
            self._last_tokens[batch.rows[which]] = values

    def _drop_rows(self) -> None:
        self.mirror.reset()
        self.executor.reset()
        self._last_tokens.zero_()


def _is_out_of_memory(error: Exception) -> bool:
    # Torch's allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
