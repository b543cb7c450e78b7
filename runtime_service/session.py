"""The runtime's half of the session protocol, without torch, gRPC or threads: what was applied, and what may come next.

A session is (scheduler_epoch, session_no). Its ops are steps 1, 2, 3, …; the last overlap_depth + 1 results are kept, and a
repeat of one of those steps is answered from them. The first op that is refused or fails *breaks* the session: every later op
is SKIPPED until `reset` or `open` starts a new one.

A *lease* is one tenancy of a row number: it begins with a higher generation than the row number has seen, and ends when the
row is released or the next lease begins. Per row this module remembers the length the scheduler stated (never the clamped
one: a tail update must begin where the last update ended, whatever the mirror could hold), the end of the last step, whether
a token was asked for, and which pages the row holds.

    before an op:   check(op)   raises Refusal and changes no row, or returns the stored result of a repeat, or returns None
    then:           commit(op)  the rows are now as the op says
    then:           store(result) or fail(op, code, detail)
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from runtime_service.errors import Refusal
from runtime_service.mixed_decode import MixedOp
from runtime_service.op_checks import (
    Fault,
    Int64Array,
    Limits,
    check_columns,
    check_held,
    check_lease_starts,
    check_pages,
    check_tokens,
    check_verify_rows,
    entry_rows,
    hold_pages,
)
from runtime_service.ops import ForwardOp, RefusalCode, StepResult
from runtime_service.plain_decode import PlainDecode, PlainOp
from runtime_service.row_rules import NUM_RULES, RULES, STRICT_ONLY, RowView, evaluate

MAX_OVERLAP_DEPTH = 2


class SessionState:
    """One runtime's protocol state; at most one session at a time.

    `lenient` is for `simulate`'s broken `tail_only` policy alone: gap, lease, generation and contiguity rules are off, and a
    tail page is not compared with the pages the row already holds. `greedy_only`: the model has no logits, so sampling
    parameters that would need them are refused.

    Memory: a bit for each (row, page), so that a tail update that repeats an earlier page of its row is noticed without
    reading the row.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages_per_row: int,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        *,
        lenient: bool = False,
        greedy_only: bool = False,
    ) -> None:
        self.limits = Limits(max_rows, max_pages_per_row, num_pages, page_size, vocab_size, greedy_only)
        self.lenient = lenient
        self.scheduler_epoch = 0
        self.session_no = 0
        """Number of the open session; 0: none is open."""
        self.overlap_depth = 0
        self.last_step = 0
        self.broken_by: Refusal | None = None
        """The refusal or failure after which everything is SKIPPED."""
        self.request_ids: dict[int, str] = {}
        """Row number → request id of the live leases."""
        self._highest_session_no = 0
        self._results: deque[StepResult] = deque(maxlen=1)
        size = max_rows + 1
        self._view = RowView(
            generation=np.zeros(size, dtype=np.int64),
            live=np.zeros(size, dtype=np.bool_),
            row_len=np.zeros(size, dtype=np.int64),
            end=np.zeros(size, dtype=np.int64),
            sampled=np.zeros(size, dtype=np.bool_),
        )
        self._held = np.zeros((size, num_pages // 8 + 1), dtype=np.uint8)
        self._stamp = np.zeros(size, dtype=np.int64)  # scratch
        self._released = np.zeros(size, dtype=np.bool_)  # scratch, all False between calls
        self._bad = np.zeros((NUM_RULES, size), dtype=np.bool_)  # scratch
        self._index = np.arange(size)
        self._plain = PlainDecode(self.limits, self._held)
        self._checked: PlainOp | MixedOp | tuple[ForwardOp, Int64Array] | None = None
        self._committed: PlainOp | None = None  # the last op, if it is of this kind

    # -- sessions

    def open(self, scheduler_epoch: int, session_no: int, overlap_depth: int) -> None:
        """Begin a session; whatever there was before is dropped.

        Raises ValueError for numbers no scheduler may send, and Refusal(UNKNOWN_SESSION) when `session_no` is not higher than
        the last one of the same scheduler; nothing is changed then.
        """
        if scheduler_epoch == 0:
            raise ValueError("scheduler_epoch is 0, it must be a random number other than 0")
        if not 0 <= overlap_depth <= MAX_OVERLAP_DEPTH:
            raise ValueError(f"overlap_depth is {overlap_depth}, it must be in [0, {MAX_OVERLAP_DEPTH}]")
        if session_no < 1:
            raise ValueError(f"session_no is {session_no}, it must be at least 1")
        if scheduler_epoch == self.scheduler_epoch:
            self._require_higher(session_no)
        self.scheduler_epoch = scheduler_epoch
        self.overlap_depth = overlap_depth
        self._begin(session_no)

    def reset(self, session_no: int) -> None:
        """Begin the scheduler's next session: steps start at 1, all rows are dropped. Raises like `open`."""
        if self.scheduler_epoch == 0:
            raise ValueError("reset before any session was opened")
        self._require_higher(session_no)
        self._begin(session_no)

    def close(self) -> None:
        """End the session, if one is open. The scheduler's highest session number stays known."""
        self._begin(0)

    def _require_higher(self, session_no: int) -> None:
        if session_no <= self._highest_session_no:
            raise Refusal(
                RefusalCode.UNKNOWN_SESSION,
                detail=f"session {session_no} is not higher than {self._highest_session_no}, the last one of this scheduler",
                session_no=session_no,
            )

    def _begin(self, session_no: int) -> None:
        self.session_no = session_no
        if session_no:
            self._highest_session_no = session_no
        self.last_step = 0
        self.broken_by = None
        self.request_ids = {}
        self._results = deque(maxlen=self.overlap_depth + 1)
        self._checked = self._committed = None
        self._view.clear()

    # -- ops

    def check(self, op: ForwardOp) -> StepResult | None:
        """Look at everything that can be refused; None: the op may be applied. A stored result: it is a repeat, answer that.

        Raises Refusal, and the session is broken from then on; no row has changed.
        """
        if self.broken_by is not None:
            raise self.skipped(op)
        try:
            self._check_session(op.session_no)
            if op.step != self.last_step + 1:
                return self._stored(op.step)
            self._check_content(op)
        except Fault as fault:
            raise self._break(self._refusal(op, fault)) from None
        return None

    def refuse(self, refusal: Refusal) -> Refusal:
        """Break the session with a refusal found elsewhere (unreadable bytes); returns what to answer, SKIPPED if too late."""
        if self.broken_by is not None:
            return self._skipped(refusal.session_no, refusal.step)
        return self._break(refusal)

    def commit(self, op: ForwardOp) -> None:
        """Take over what a checked op says about its rows."""
        checked, self._checked = self._checked, None
        if isinstance(checked, PlainOp) and checked.op is op:
            self._plain.commit(checked, self._view)
            self.last_step = op.step
            self._committed = checked
            return
        self._committed = None
        for row in op.released_rows.tolist():
            self.request_ids.pop(row, None)
        if isinstance(checked, MixedOp) and checked.op is op:
            self._plain.commit(checked, self._view)
        else:
            self._commit_rows(op, checked[1] if isinstance(checked, tuple) and checked[0] is op else None)
        for lease in op.lease_starts:
            self.request_ids[lease.req_pool_index] = lease.request_id
        self.last_step = op.step

    def _commit_rows(self, op: ForwardOp, owners: Int64Array | None) -> None:
        view, rows = self._view, op.req_pool_indices.astype(np.intp)
        if len(op.released_rows):
            view.live[op.released_rows] = False
        if len(rows):
            if not self.lenient and len(op.occupied_pages):
                if owners is None:
                    hold_pages(op, self._held, entry_rows(op), checked=False)
                else:
                    hold_pages(op, self._held, owners, checked=True)
            new = (view.generation[rows] != op.row_generations) | ~view.live[rows]
            view.generation[rows] = op.row_generations
            view.live[rows] = True
            view.row_len[rows] = op.row_lens
            view.end[rows] = np.add(op.num_computed, op.input_lens, dtype=np.int64)
            view.sampled[rows] = op.sample | (view.sampled[rows] & ~new)

    def repeated_rows(self, op: ForwardOp) -> npt.NDArray[np.intp] | None:
        """Its rows, where this op was committed last, is one of decode rows alone, and names the rows of the one before."""
        plain = self._committed
        return plain.rows if plain is not None and plain.op is op and self._plain.repeats else None

    def check_foreseen(self, op: ForwardOp, rows: npt.NDArray[np.intp], growing: npt.NDArray[np.intp]) -> bool:
        """Look at the pages of an op of which all else was foreseen; True: it may be applied. False says nothing about it.

        `rows` are what `repeated_rows` gave, `growing` is the index of those that get a page.
        """
        if self.broken_by is not None or op.session_no != self.session_no or op.step != self.last_step + 1:
            return False
        self._checked = self._plain.look_at_pages(op, rows, growing)
        return self._checked is not None

    def store(self, result: StepResult) -> None:
        """Keep the result of the step just committed, for repeats."""
        self._results.append(result)

    def fail(self, op: ForwardOp, code: RefusalCode, detail: str) -> Refusal:
        """The op was valid but executing it failed: breaks the session; returns what to answer.

        The failure may become known after a later op was refused; it is then the cause of everything that follows it.
        """
        return self._break(Refusal(code, detail=detail, session_no=op.session_no, step=op.step))

    def skipped(self, op: ForwardOp) -> Refusal:
        """What to answer to an op that follows a refused or failed one."""
        return self._skipped(op.session_no, op.step)

    def lease_rows(self) -> Int64Array:
        """Row numbers that have a lease, ascending."""
        return np.flatnonzero(self._view.live)

    def generations(self, rows: Int64Array) -> Int64Array:
        """Generation of each row's lease; 0 where it has none."""
        return np.where(self._view.live[rows], self._view.generation[rows], 0)

    # -- details

    def _check_session(self, session_no: int) -> None:
        if session_no != self.session_no or session_no == 0:
            present = f"the present one is {self.session_no}" if self.session_no else "none is open"
            raise Fault(RefusalCode.UNKNOWN_SESSION, 0, f"the op is of session {session_no}, {present}")

    def _stored(self, step: int) -> StepResult:
        for result in self._results:
            if result.step == step:
                return result
        kept = (
            f"results of steps {self._results[0].step} to {self.last_step} are kept" if self._results else "no result is kept"
        )
        raise Fault(RefusalCode.STEP_OUT_OF_ORDER, 0, f"step {step} came where {self.last_step + 1} is next; {kept}")

    def _check_content(self, op: ForwardOp) -> None:
        limits = self.limits
        self._checked = None if self.lenient else self._plain.look(op, self._view)
        if self._checked is not None:
            return
        check_columns(op, limits)
        released = self._released if len(op.released_rows) else None
        if released is not None:
            released[op.released_rows] = True
        new = evaluate(op, limits, self._view, released, self._stamp, self._index, self._bad)
        if released is not None:
            released[op.released_rows] = False
        bad = self._bad[:, : op.num_rows]
        if self.lenient:
            bad[STRICT_ONLY] = False
        if bad.any():
            number = int(np.flatnonzero(bad.any(axis=1))[0])
            i = int(np.flatnonzero(bad[number])[0])
            row = int(op.req_pool_indices[i])
            raise Fault(RULES[number].code, row, RULES[number].describe(op, i, limits, self._view))
        owners = entry_rows(op)
        check_pages(op, limits, owners)
        if len(owners) and not self.lenient:
            check_held(op, self._held, owners)
        check_tokens(op, limits)
        check_verify_rows(op, limits, self._view.live)
        started = check_lease_starts(op, limits)
        if not self.lenient and (started or new.any()):
            self._check_started(op.req_pool_indices[new].tolist(), started)
        self._checked = (op, owners)

    def _check_started(self, new_rows: list[int], started: dict[int, str]) -> None:
        for row in new_rows:
            if row not in started:
                raise Fault(RefusalCode.LEASE_NOT_STARTED, row, "a new lease begins without its lease start")
        for row in started.keys() - set(new_rows):
            raise Fault(RefusalCode.MALFORMED, row, "lease start for a row whose lease goes on")

    def _break(self, refusal: Refusal) -> Refusal:
        self.broken_by = refusal
        return refusal

    def _skipped(self, session_no: int, step: int) -> Refusal:
        cause = self.broken_by
        assert cause is not None
        detail = f"not looked at, because step {cause.step} was answered {cause.code.name}"
        return Refusal(RefusalCode.SKIPPED, detail=detail, session_no=session_no, step=step)

    def _refusal(self, op: ForwardOp, fault: Fault) -> Refusal:
        request_id = ""
        if fault.row:
            request_id = next((lease.request_id for lease in op.lease_starts if lease.req_pool_index == fault.row), "")
            request_id = request_id or self.request_ids.get(fault.row, "")
        whose = f"row {fault.row}" + (f" of request {request_id!r}" if request_id else "")
        detail = f"{whose}: {fault.detail}" if fault.row else fault.detail
        return Refusal(fault.code, fault.row, request_id, detail, session_no=op.session_no, step=op.step)
