"""What is counted while steps go through: plain numbers and lists, which `metrics` shows.

Nothing here is called for a single token. A step whose rows are those of the step before appends a few numbers; another one
takes a few numpy calls, for all its rows at once.

Times are those of one clock, in seconds. Every live request has a slot, in which its times lie; which rows belong to which
slots is noted when an op is sent, because rows change hands while results are awaited.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagemirror.histograms import BulkHistogram
from scheduler_service.core.ops import Cause, ForwardOp, RowStatus, StepResult
from scheduler_service.core.request import FinishReason, Request

if TYPE_CHECKING:
    from scheduler_service.tracing import RequestTraces

Places = npt.NDArray[np.intp]

# Those of vLLM's histograms, which are shown under its names; ours have finer ones besides.
VLLM_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
VLLM_BETWEEN_TOKENS_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 120.0)
STAGE_BOUNDS = (*(1e-5, 2e-5, 5e-5, 1e-4, 2e-4), *STEP_BOUNDS)
STAGES = ("plan", "send", "wait", "complete", "deliver")

_MOST_UNFOLDED = 4096
_CONTINUATION, _FIRST_CHUNK = Cause.CONTINUATION, Cause.FIRST_CHUNK
_BREAKS_OFF = (FinishReason.ABORT, FinishReason.DEADLINE)


class _Rows:
    """Slots of the rows of an op that were asked for a token; of several ops in a row, where they go on as they are."""

    __slots__ = ("is_steady", "num_extend", "positions", "slots")

    def __init__(self, slots: Places, positions: Places | None, num_extend: int, is_steady: bool) -> None:
        self.slots = slots
        self.positions = positions  # in the op; None: all of its rows
        self.num_extend = num_extend  # of the slots, the first ones: they may get their request's first token
        self.is_steady = is_steady


class Tally:
    """Counts of one scheduler process since its start; they survive sessions."""

    def __init__(self) -> None:
        self.traces: RequestTraces | None = None
        """Told of requests and ops as well, where requests are traced."""
        self.requests = self.prompt_tokens = 0  # accepted
        self.tokens = 0  # handed out
        self.query_tokens = self.hit_tokens = 0  # looked for in the prefix cache, and found, at first admissions
        self.prefilled_tokens = 0  # prompt tokens of requests that got their first token
        self.steps = self.rows = self.refreshed_rows = self.pages_sent = self.op_bytes = self.clamped_rows = 0
        self.rows_sent = {cause: [0, 0] for cause in Cause}  # only what is new at the end, and with full_refresh
        self._decodes, self._first_decodes = self.rows_sent[Cause.DECODE], self.rows_sent[Cause.PREFILL_DONE_TO_DECODE]
        self.finished = dict.fromkeys(FinishReason, 0)
        self.stages = {stage: BulkHistogram(STAGE_BOUNDS) for stage in STAGES}
        self.apply = BulkHistogram((1e-5, 2e-5, 5e-5, 1e-4, 2e-4, *STEP_BOUNDS))
        self.runtime_step = BulkHistogram((1e-4, 2e-4, *STEP_BOUNDS))
        self.first_token = BulkHistogram((*VLLM_FIRST_TOKEN_BOUNDS, 0.002, 0.15, 0.2, 0.35, 1.5, 3.5, 60.0))
        self.between_tokens = BulkHistogram(
            (*VLLM_BETWEEN_TOKENS_BOUNDS, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.015, 0.02, 0.035)
        )
        self.queued = BulkHistogram((*VLLM_REQUEST_BOUNDS, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2))
        self.end_to_end = BulkHistogram((*VLLM_REQUEST_BOUNDS, 0.01, 0.02, 0.05, 0.1, 0.2))
        self._plan, self._send = self.stages["plan"].values, self.stages["send"].values
        self._wait, self._complete = self.stages["wait"].values, self.stages["complete"].values
        self._clock = time.perf_counter
        # By slot. The time of the last token: nan before the first, infinity when the request is over.
        self._arrived_at: list[float] = []
        self._started_at: list[float | None] = []
        self._prompt_lens: list[int] = []
        self._last_at = np.empty(0)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._over: deque[tuple[int, int]] = deque()  # ops sent when a request ended, and its slot: free when they are answered
        self._slot_of_row = np.zeros(1, dtype=np.intp)
        self._in_flight: deque[_Rows] = deque()
        self._num_sent = self._num_answered = 0
        self._sent_steady: object = None
        self._sent_rows: _Rows | None = None
        # Rows that got a token each in every step lately: the last time is here and not in their slots.
        self._run: _Rows | None = None
        self._run_at = 0.0

    def set_rows(self, max_rows: int) -> None:
        """Row numbers are [1, max_rows]."""
        self._slot_of_row = np.zeros(max_rows + 1, dtype=np.intp)

    # --- requests ---------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """The request was accepted."""
        self.requests += 1
        self.prompt_tokens += request.prompt_len
        self._settle_run()  # which may have had rows of requests whose slots are given anew
        while self._over and self._over[0][0] <= self._num_answered:
            self._free.append(self._over.popleft()[1])
        if not self._free:
            self._grow()
        slot = self._slots[request.request_id] = self._free.pop()
        self._arrived_at[slot] = self._clock()
        self._started_at[slot] = None
        self._last_at[slot] = np.nan
        self._prompt_lens[slot] = request.prompt_len

    def end(self, request: Request) -> None:
        """The request is over."""
        reason = request.finish_reason or FinishReason.FAILED
        self.finished[reason] += 1
        slot = self._slots.pop(request.request_id, None)
        if slot is None:
            return
        arrived, started = self._arrived_at[slot], self._started_at[slot]
        if started is not None and reason not in _BREAKS_OFF:
            self.queued.values.append(started - arrived)
            self.end_to_end.values.append(self._clock() - arrived)
        self._settle_run()
        self._last_at[slot] = np.inf
        self._over.append((self._num_sent, slot))

    def _grow(self) -> None:
        before = len(self._last_at)
        more = max(64, before)
        self._free += range(before + more - 1, before - 1, -1)
        self._last_at = np.concatenate((self._last_at, np.full(more, np.nan)))
        self._arrived_at += [0.0] * more
        self._started_at += [None] * more
        self._prompt_lens += [0] * more

    # --- steps ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The session is over: what is in flight has no answer."""
        self._settle_run()
        self._in_flight.clear()
        self._num_answered = self._num_sent
        self._sent_steady = self._sent_rows = None

    def sent(self, op: ForwardOp, num_bytes: int, plan_s: float, send_s: float) -> None:
        """An op is on its way, after planning and sending that took so long."""
        if self.traces is not None:
            self.traces.sent(op)
        self._num_sent += 1
        self.op_bytes += num_bytes
        self.pages_sent += len(op.occupied_pages)
        self._plan.append(plan_s)
        self._send.append(send_s)
        steady = op.steady
        if steady is not None and steady is self._sent_steady and self._sent_rows is not None:
            num_rows = len(self._sent_rows.slots)
            self.rows += num_rows
            self._decodes[0] += num_rows
            self._in_flight.append(self._sent_rows)
            return
        self._sent_steady = steady
        self._sent_rows = self._note_rows(op)
        self._in_flight.append(self._sent_rows)

    def _note_rows(self, op: ForwardOp) -> _Rows:
        num_rows, num_extend = op.num_rows, op.num_extend_rows
        self.rows += num_rows
        num_full = int(np.count_nonzero(op.full_refresh))
        self.refreshed_rows += num_full
        positions, num_first = None, 0
        if num_extend:
            num_full -= self._note_extends(op, num_extend)
            num_first = op.sample[:num_extend].tolist().count(True)
            if num_first < num_extend:
                positions = op.sample.nonzero()[0]
        if num_rows > num_extend:
            self._note_decodes(op, num_rows - num_extend, num_full)
        slots = self._slot_of_row.take(op.req_pool_indices if positions is None else op.req_pool_indices[positions])
        return _Rows(slots, positions, num_first, op.steady is not None)

    def _note_extends(self, op: ForwardOp, num_extend: int) -> int:
        """How many of the extend rows are sent with full_refresh."""
        full: list[bool] = op.full_refresh[:num_extend].tolist()
        rows: list[int] = op.req_pool_indices[:num_extend].tolist()
        for position, cause in enumerate(op.extend_causes):
            self.rows_sent[cause][full[position]] += 1
            if cause is _CONTINUATION:
                continue
            request = op.requests[position]
            slot = self._slots.get(request.request_id)
            if slot is None:
                continue
            self._slot_of_row[rows[position]] = slot
            if cause is _FIRST_CHUNK:
                self._started_at[slot] = self._clock()
                if request.prefix_cache:
                    self.query_tokens += request.prompt_len
                    self.hit_tokens += request.cached_tokens
        return full.count(True)

    def _note_decodes(self, op: ForwardOp, num_decodes: int, num_full: int) -> None:
        if op.first_decodes is not None:
            first = op.first_decodes.nonzero()[0].tolist()
            num_extend, full = op.num_extend_rows, op.full_refresh
            whole = sum(1 for place in first if full[num_extend + place]) if num_full else 0
            self._first_decodes[0] += len(first) - whole
            self._first_decodes[1] += whole
            num_decodes -= len(first)
            num_full -= whole
        self._decodes[0] += num_decodes - num_full
        self._decodes[1] += num_full

    def answered(self, result: StepResult, wait_s: float, now: float, complete_s: float) -> None:
        """The oldest op in flight has its result, which came after so long and was taken in at `now`."""
        self.steps += 1
        self._num_answered += 1
        self._wait.append(wait_s)
        self._complete.append(complete_s)
        if result.step_us:
            self.apply.values.append(result.apply_us * 1e-6)
            self.runtime_step.values.append(result.step_us * 1e-6)
        rows = self._in_flight.popleft()
        if rows is self._run and result.row_status is None:
            self.between_tokens.weighted.append((now - self._run_at, len(rows.slots)))
            self._run_at = now
            return
        self._settle_run()
        slots, num_extend = rows.slots, rows.num_extend
        if result.row_status is not None:
            self.clamped_rows += int(np.count_nonzero(result.row_status == RowStatus.CLAMPED))
            fine = result.row_status == RowStatus.OK
            if rows.positions is not None:
                fine = fine[rows.positions]
            slots, num_extend = slots[fine], int(np.count_nonzero(fine[:num_extend]))
        last = self._last_at.take(slots)
        # Of a request that ended after the op was sent, infinity stays.
        has_ended = bool(self._over) and self._over[-1][0] >= self._num_answered
        self._last_at[slots] = np.fmax(last, now) if has_ended else now
        if num_extend:
            for slot, before in zip(slots[:num_extend].tolist(), last[:num_extend].tolist(), strict=True):
                if math.isnan(before):
                    self.first_token.values.append(now - self._arrived_at[slot])
                    self.prefilled_tokens += self._prompt_lens[slot]
        self.between_tokens.arrays.append((now, last))
        if rows.is_steady and slots is rows.slots and not has_ended:
            self._run, self._run_at = rows, now

    def delivered(self, num_tokens: int, deliver_s: float) -> None:
        """Tokens were handed on, which took so long."""
        self.tokens += num_tokens
        self.stages["deliver"].values.append(deliver_s)
        if len(self._wait) > _MOST_UNFOLDED:
            self.fold()

    def _settle_run(self) -> None:
        if self._run is not None:
            slots = self._run.slots
            self._last_at[slots] = np.fmax(self._last_at[slots], self._run_at)
            self._run = None

    def fold(self) -> None:
        """Count what was noted since the last call, so that it can be shown."""
        for histogram in self.histograms():
            histogram.fold()

    def histograms(self) -> list[BulkHistogram]:
        """All of them."""
        others = (self.apply, self.runtime_step, self.first_token, self.between_tokens, self.queued, self.end_to_end)
        return [*self.stages.values(), *others]
