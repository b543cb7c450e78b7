"""One step, start to end, in the one order that lets a page be granted again at once.

Check, mirror, batch, model, feedback, result: nothing that reads or writes rows, KV or last tokens runs outside of it. Where
the op asks for digests of rows, they are computed between mirror and batch (`op_digests`).

A step has two halves. `launch` checks the op and queues all its work on the compute stream, the feedback of its tokens to the
next step included; `collect` waits for the tokens and makes the result, from what the op itself says of its rows. Several steps
may be launched before the first is collected. On a CPU a step is over when `launch` returns.

Answers do not depend on when they are collected: the first op that was refused or failed is answered so, every later one with
SKIPPED, also one that was launched before the failure was known. What such an op did is dropped by the reset that follows.

The runner is driven by exactly one thread: the runtime's execution thread, or the simulator.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.errors import Refusal
from runtime_service.executors.base import ExecutionResult, ModelExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.next_step import NextStep, foresee
from runtime_service.op_checks import Int64Array
from runtime_service.op_digests import PendingDigests, RowDigests
from runtime_service.ops import NO_TOKEN, ForwardOp, Int32Array, RefusalCode, StepResult
from runtime_service.pending_step import PendingStep
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.staging import StagingRing

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


_NOTHING = ExecutionResult(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8))


class StepRunner:
    """Applies ops to a session, a mirror and a model, and answers each with a result or a refusal, never with an exception."""

    def __init__(self, session: SessionState, mirror: ReqToPage, executor: ModelExecutor) -> None:
        self.session = session
        self.mirror = mirror
        self.executor = executor
        device = mirror.table.device
        self._builder = BatchBuilder(mirror, device)
        self._digests = RowDigests(mirror)
        # Feedback for decode rows. Row 0 is the padding sink; a row without a token so far feeds token 0.
        self._last_tokens = torch.zeros(session.limits.max_rows + 1, dtype=torch.int64, device=device)
        self._new_rows = StagingRing(device, torch.int64, capacity=session.limits.max_rows)
        self._pending: deque[PendingStep] = deque()
        self._next: NextStep | None = None
        self._last: tuple[ForwardBatch, PendingStep] | None = None  # what `foresee` starts from
        # What nobody waits for and is done once the answer is on its way, or before anything else is.
        self._uncommitted: ForwardOp | None = None
        self._unfed: tuple[ForwardBatch, PendingStep] | None = None

    @property
    def num_pending(self) -> int:
        """Steps launched and not collected."""
        return len(self._pending)

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

    def prepare(self) -> None:
        """Make ready for the next op, while nobody waits for an answer; harmless when it is called often, or never."""
        self._catch_up()
        last, self._last = self._last, None
        if last is None or self._pending or self.session.broken_by is not None:
            return
        batch, step = last
        rows, result = self.session.repeated_rows(step.op), step.wait()
        # A row that is clamped or masked has no token either.
        if rows is not None and np.count_nonzero(result.tokens == NO_TOKEN) == 0:
            self._next = foresee(batch, step.op, rows, result.tokens, self.mirror)

    @property
    def foreseen(self) -> NextStep | None:
        """What the next op says if it goes on like the last ones; `launch` is short where it gets the op of this."""
        return self._next

    def run(self, op: ForwardOp) -> StepResult | Refusal:
        """Check, apply and execute one op. A refused op has changed nothing; after a failed one only a reset helps."""
        launched = self.launch(op)
        return launched if isinstance(launched, Refusal) else self.collect(launched)

    def launch(self, op: ForwardOp) -> PendingStep | Refusal:
        """Check and apply one op and start its step.

        A refusal waits for the steps launched before, since one of them may have failed, which makes this op a skipped one.
        """
        began_at = time.perf_counter()
        foreseen, self._next, self._last = self._next, None, None
        if foreseen is not None and op is foreseen.op and (known := self._launch_foreseen(foreseen, began_at)) is not None:
            return known
        self._catch_up()
        try:
            stored = self._check(op)
        except Refusal as refusal:
            log.warning("refused", session_no=op.session_no, step=op.step, code=refusal.code.name, detail=refusal.detail)
            return refusal
        if stored is not None:
            return PendingStep.answered(op, stored)
        try:
            step = self._start(op, began_at)
        except Exception as error:
            self._settle()
            return self._failed(op, error)
        self._pending.append(step)
        return step

    def collect(self, step: PendingStep) -> StepResult | Refusal:
        """The answer to a launched op; waits for it, and for those launched before it."""
        while step.answer is None:
            if not self._pending:
                raise RuntimeError(f"step {step.op.step} of session {step.op.session_no} was dropped by a reset")
            self._collect_oldest()
        return step.answer

    def refuse(self, refusal: Refusal) -> Refusal:
        """An op could not even be read: break the session and return what to answer."""
        self._catch_up()
        self._settle()
        return self.session.refuse(refusal)

    def read_rows(self, rows: Int32Array | None = None) -> RowsSnapshot:
        """These rows, or every row that has a lease, ascending. Raises IndexError for a number outside [1, max_rows]."""
        self._catch_up()
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

    def _launch_foreseen(self, foreseen: NextStep, began_at: float) -> PendingStep | Refusal | None:
        """Likewise; None: something is wrong with the op's pages."""
        op = foreseen.op
        self._catch_up()
        if not self.session.check_foreseen(op, foreseen.rows, foreseen.growing):
            return None
        try:
            self._uncommitted = op
            foreseen.take_pages(self.mirror)
            step = self._execute(op, foreseen.batch, (began_at, time.perf_counter() - began_at))
        except Exception as error:
            return self._failed(op, error)
        self._pending.append(step)
        return step

    def _check(self, op: ForwardOp) -> StepResult | None:
        """`SessionState.check`, after the steps before this one where the answer depends on how they end."""
        session = self.session
        if self._pending and op.step != session.last_step + 1:
            self._settle()  # a repeat: its result may be among them
        try:
            return session.check(op)
        except Refusal as refusal:
            self._settle()
            if session.broken_by is not refusal and refusal.code is not RefusalCode.SKIPPED:
                return session.check(op)  # SKIPPED: an earlier step has failed
            raise

    def _start(self, op: ForwardOp, began_at: float) -> PendingStep:
        session, executor = self.session, self.executor
        session.commit(op)
        self.mirror.apply(op, request_ids=session.request_ids)
        apply_s = time.perf_counter() - began_at
        if len(op.released_rows):
            executor.release_rows(op.released_rows)
        if op.lease_starts:
            executor.start_leases(op.lease_starts)
            new_rows = self._new_rows.begin(len(op.lease_starts))
            new_rows[:] = [lease.req_pool_index for lease in op.lease_starts]
            self._last_tokens.index_fill_(0, self._new_rows.upload(), 0)
        digests = self._digests.start(op) if op.num_digests else None
        if op.num_rows == 0:
            return PendingStep(op, _NOTHING, np.empty(0, dtype=np.bool_), digests).timed(began_at, apply_s)
        batch = self._builder.build(op, self._last_tokens, None if digests is None else digests.masked)
        step = self._execute(op, batch, (began_at, apply_s), digests)
        self._catch_up()
        return step

    def _execute(
        self, op: ForwardOp, batch: ForwardBatch, times: tuple[float, float], digests: PendingDigests | None = None
    ) -> PendingStep:
        outcome = self.executor.execute(batch)
        step = PendingStep(op, outcome, batch.clamped, digests).timed(*times)
        if outcome.device_tokens is not None:
            self._feed_back_on_device(batch, outcome.device_tokens)
        else:
            step.wait()
            self._unfed = batch, step
            if digests is None and not op.num_extend_rows and batch.rows.is_cpu:
                self._last = batch, step
        return step

    def _catch_up(self) -> None:
        if (op := self._uncommitted) is not None:
            self._uncommitted = None
            self.session.commit(op)
        if (unfed := self._unfed) is not None:
            self._unfed = None
            self._feed_back(unfed[0], unfed[1].wait().tokens)

    def _collect_oldest(self) -> None:
        step = self._pending.popleft()
        op, broken_by = step.op, self.session.broken_by
        if broken_by is not None and broken_by.step < op.step:
            step.drop()
            step.answer = self.session.skipped(op)
            return
        try:
            result = step.wait()
        except Exception as error:
            step.answer = self._failed(op, error)
            return
        self.session.store(result)
        step.answer = result

    def _settle(self) -> None:
        while self._pending:
            self._collect_oldest()

    def _failed(self, op: ForwardOp, error: Exception) -> Refusal:
        """The answer to an op that failed; called while the error is handled, with every earlier step collected."""
        if self.session.broken_by is not None and self.session.broken_by.step < op.step:
            return self.session.skipped(op)
        code = RefusalCode.OUT_OF_MEMORY if (out_of_memory := _is_out_of_memory(error)) else RefusalCode.STEP_FAILED
        facts = {"session_no": op.session_no, "step": op.step, "code": code.name, "num_rows": op.num_rows}
        log.exception("step failed", **facts)  # noqa: LOG004  (the caller handles the exception)
        # The peer learns which step it was and no more; the traceback is in our log.
        what = "not enough memory for" if out_of_memory else "an error inside the runtime during"
        return self.session.fail(op, code, f"{what} step {op.step} of {op.num_rows} rows; see the runtime's log")

    def _feed_back(self, batch: ForwardBatch, tokens: Int32Array) -> None:
        sampled = tokens != NO_TOKEN
        if self._last_tokens.is_cpu:
            rows = batch.host_rows
            if np.count_nonzero(sampled) < len(sampled):
                rows, tokens = rows[sampled], tokens[sampled]
            self._last_tokens.numpy()[rows] = tokens
        elif sampled.all():
            self._last_tokens[batch.rows] = torch.from_numpy(tokens.astype(np.int64)).to(self._last_tokens.device)
        elif sampled.any():
            which = torch.from_numpy(np.flatnonzero(sampled)).to(self._last_tokens.device)
            values = torch.from_numpy(tokens[sampled].astype(np.int64)).to(self._last_tokens.device)
            self._last_tokens[batch.rows[which]] = values

    def _feed_back_on_device(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """`last_tokens[row] = token` for the rows that sampled, without asking the device which these are."""
        if tokens.shape != batch.rows.shape:
            raise RuntimeError(f"the model answered {len(tokens)} rows of {batch.num_rows}")
        if batch.masked is not None:
            tokens = tokens.masked_fill(batch.masked, NO_TOKEN)
        kept = torch.where(tokens >= 0, tokens, self._last_tokens[batch.rows])
        self._last_tokens.index_copy_(0, batch.rows, kept)

    def _drop_rows(self) -> None:
        # What the dropped steps still do on the device is ordered before anything of the new session.
        for step in self._pending:
            step.drop()
        self._pending.clear()
        self._next = self._last = self._uncommitted = self._unfed = None
        self.mirror.reset()
        self.executor.reset()
        self._last_tokens.zero_()


def _is_out_of_memory(error: Exception) -> bool:
    # Torch's allocator for the CPU, and calls of the driver beside torch's allocator, raise a plain RuntimeError.
    words = ("can't allocate memory", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in str(error) for part in words)
