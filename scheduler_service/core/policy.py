"""Who runs in the next step: token budget, pages, victims, admission.

One `Planner.choose()` goes through the classes of rows in a fixed order: decode rows, rows in the middle of their prompt,
requests that resume, requests that start. Within a class (priority, arrival) decides, the smaller first.

- A row that needs a page when none is free or evictable takes one from the last row in order, which is retracted; that may be
  the row itself, and may be a row chosen earlier in the same step, whose place in the step is then void. The first row in order
  is never retracted for pages, so it always ends. A row whose last allowed token is planned already is no victim.
- Waiting requests are admitted strictly in order, the retracted before the submitted: when the head does not fit, nobody behind
  it is admitted. A head fits when there are pages for all its known tokens and one more for each row in use (the watermark; not
  when none is in use). A retracted request with a step outstanding is passed over. One that lost its row in this very step
  holds back those behind it, unless nothing else could run. What the starts of leases carry in one op is limited, since an op
  is one message and never split: a head over the limit waits for the next step, unless it is the first of this one.

Until a row is certain to be planned or retracted nothing of it is changed: a request that is neither in the step nor a victim
has the row, pages, locks and lengths it had before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler_service.core.choice import NO_ROWS, Choice, Extend
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.ops import BoolArray, Cause, ForwardOp, Int32Array
from scheduler_service.core.placement import Placement
from scheduler_service.core.request import Request
from scheduler_service.core.row_table import Phase
from scheduler_service.core.steady import Steadiness, SteadyRows
from scheduler_service.core.waiting import RetractedList, WaitingQueue

_PREFILLING, _PREFILL_DONE = np.uint8(Phase.PREFILLING), np.uint8(Phase.PREFILL_DONE)


class Planner:
    """Chooses the rows of a step.

    Args:
        retract: called with a row number; must retract its request at once.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        placement: Placement,
        waiting: WaitingQueue,
        retracted: RetractedList,
        retract: Callable[[int], None],
    ) -> None:
        self._config = config
        self._placement = placement
        self._rows = placement.rows
        self._waiting = waiting
        self._retracted = retracted
        self._retract_row = retract
        self._choice = Choice()
        self._budget = 0
        self.token_budget = config.token_budget
        """Tokens of one step; begins as the configuration's and may be lowered."""
        self._lease_bytes = 0  # of the leases that begin in this step
        self._num_leases = 0
        self._refusal: tuple[object, ...] = ()  # circumstances under which the head last did not fit
        self._refused_need = 0  # available pages that it lacked then
        self._steady = Steadiness(self._rows)

    def choose(self, plan_no: int, *, idle: bool, alone: Request | None = None) -> Choice:
        """The rows of step `plan_no`; `idle`: no op is in flight; `alone`: a request that must have a step to itself."""
        self._choice = Choice([], NO_ROWS)
        self._budget = self.token_budget
        self._lease_bytes = self._num_leases = 0
        if alone is not None:
            if idle and alone.retracted_in_plan < plan_no:
                self._choose_alone(alone)
        elif not self._placement.num_holders:
            self._admit(plan_no)
        elif self._config.mixed:
            self._choose_decodes()
            self._choose_continuations()
            self._admit(plan_no)
        else:
            self._choose_continuations()
            self._admit(plan_no)
            if not self._choice.extends:
                self._choose_decodes()
        if idle and self._choice.is_empty and alone is None:
            self._admit(plan_no, past_just_retracted=True)
        return self._choice

    def _choose_alone(self, request: Request) -> None:
        """It finds its row and its pages whatever its order: other holders are retracted for it, the last in order first."""
        if not request.state.holds_row:
            while not self._enter(request, Cause.RESUME, watermark=0):
                if (victim := self._last_holder_but(0)) is None:
                    return
                self._retract_row(victim)
            self._retracted.remove(request)
        elif self._rows.phase[request.row] == _PREFILLING:
            self._continue(request.row, alone=True)
        elif self._grow(request.row, int(self._rows.num_computed[request.row]) + 1, alone=True):
            self._choice.decodes = np.array([request.row], dtype=np.int32)

    def forget(self) -> None:
        """What the last plan found is not to be relied on."""
        self._refusal = ()
        self._steady.forget()

    def note_op(self, op: ForwardOp) -> None:
        """The op that came of the choice."""
        if self._config.refresh_policy is not RefreshPolicy.ALWAYS:
            self._steady.note_op(op)

    # Rows in use

    def _choose_decodes(self) -> None:
        if self._choose_steady(self._steady.rows_for(self.token_budget)):
            return
        rows = self._rows
        order = self._placement.holder_places()
        if not len(order):
            return
        phase, num_computed = rows.phase.take(order), rows.num_computed.take(order)
        wanted = ((phase >= _PREFILL_DONE) & (num_computed + 1 < rows.limit_len.take(order))).nonzero()[0]
        wanted = wanted[: self._budget]
        if not len(wanted):
            return
        chosen = order.take(wanted).astype(np.int32)
        if self._budget == self.token_budget and self._choose_steady(self._steady.begin(chosen, phase, self._budget)):
            return
        growing = num_computed.take(wanted) >= rows.num_pages.take(chosen) * self._config.page_size
        publishing = phase.take(wanted) == _PREFILL_DONE
        self._choice.decodes = chosen
        self._budget -= len(chosen)
        if np.count_nonzero(growing | publishing) <= self._placement.num_available:
            self._grow_all(chosen, growing, publishing)
            return
        # A row that was retracted for one before it needs nothing any more: live_generation is looked at in its turn.
        self._drop_decodes(
            [
                row
                for row in chosen[growing | publishing].tolist()
                if rows.live_generation[row] and not self._grow(row, int(rows.num_computed[row]) + 1)
            ]
        )

    def _grow_all(self, chosen: Int32Array, growing: BoolArray, publishing: BoolArray) -> None:
        """There are pages for all: give each growing row its own, in order; those that publish do so in their turn."""
        start = 0
        for stop in [*publishing.nonzero()[0].tolist(), len(chosen)]:
            places = chosen[start:stop][growing[start:stop]]
            if len(places):
                self._rows.append_one_each(places, self._placement.take_one_by_one(len(places)))
            if stop < len(chosen):
                row = int(chosen[stop])
                self._grow(row, int(self._rows.num_computed[row]) + 1)
            start = stop + 1

    def _choose_steady(self, steady: SteadyRows | None) -> bool:
        """Plan these rows; False: there are none, or pages are short."""
        if steady is None:
            return False
        growing = steady.growing()
        if len(growing):
            if len(growing) > self._placement.num_available:
                return False
            steady.grow(growing, self._placement.take_one_by_one(len(growing)))
        self._choice.decodes, self._choice.steady = steady.indices, steady
        self._budget -= len(steady.indices)
        return True

    def _choose_continuations(self) -> None:
        rows = self._rows
        order = self._placement.holder_places()
        if not len(order) or self._steady.rows_for(self.token_budget) is not None:
            return
        for row in order[rows.phase.take(order) == _PREFILLING].tolist():
            if self._budget == 0:
                break
            if not rows.live_generation[row]:
                continue  # retracted for a row before it in this loop
            self._continue(row)

    def _continue(self, row: int, *, alone: bool = False) -> None:
        rows = self._rows
        remaining = int(rows.num_known[row] - rows.num_computed[row])
        input_len = min(self._config.chunk_size, self._budget, remaining)
        if self._grow(row, int(rows.num_computed[row]) + input_len, alone=alone):
            self._choice.extends.append(Extend(row, input_len, Cause.CONTINUATION))
            self._budget -= input_len

    def _grow(self, row: int, num_tokens: int, *, alone: bool = False) -> bool:
        """Give the row pages for `num_tokens`, retracting others for them if need be (`alone`: any of them); before that,
        publish what it has computed, unless it is decoding: a plain decode step only appends.

        False: the row is not to be planned, because it was retracted itself or must wait for results.
        """
        placement = self._placement
        publishes = self._rows.phase[row] != Phase.DECODING
        need = placement.pages_for(num_tokens) - int(self._rows.num_pages[row])
        while need > placement.num_available and not (
            publishes and need <= placement.num_available + placement.publish_gain(row)
        ):
            victim = self._last_holder_but(row) if alone else self._victim()
            if victim is None:
                return False
            self._retract(victim)
            if victim == row:
                return False
        if publishes:
            placement.publish(row)
        if need > 0:
            self._rows.append(row, placement.take(need))
        return True

    def _victim(self) -> int | None:
        """The last row in order that may be retracted, never the first; it comes to `row` itself before any row ahead of it."""
        rows = self._rows
        order = self._placement.holder_rows()
        for candidate in order[:0:-1].tolist():
            last_token_planned = rows.phase[candidate] >= _PREFILL_DONE and (
                rows.num_computed[candidate] + 1 >= rows.limit_len[candidate]
            )
            if not last_token_planned:
                return int(candidate)
        return None

    def _last_holder_but(self, row: int) -> int | None:
        """The last row in order other than `row`."""
        order = self._placement.holder_rows()
        others = order[order != row]
        return int(others[-1]) if len(others) else None

    def _retract(self, victim: int) -> None:
        # Among the chosen only a decode row can be a victim: chunks are chosen in order, and no row ahead of the needy one is.
        self._drop_decodes([victim])
        self._retract_row(victim)

    def _drop_decodes(self, dropped: list[int]) -> None:
        decodes = self._choice.decodes
        if dropped and len(decodes):
            keep: BoolArray = ~np.isin(decodes, dropped)
            self._budget += len(decodes) - int(keep.sum())
            self._choice.decodes = decodes[keep]

    # Requests without a row

    def _admit(self, plan_no: int, *, past_just_retracted: bool = False) -> None:
        num_passed = 0
        while (request := self._retracted.at(num_passed)) is not None:
            if request.num_outstanding or (past_just_retracted and request.retracted_in_plan >= plan_no):
                num_passed += 1
                continue
            if request.retracted_in_plan >= plan_no:
                return
            if not self._enter(request, Cause.RESUME):
                return
            self._retracted.remove(request)
        while (head := self._waiting.head()) is not None:
            if not self._enter(head, Cause.FIRST_CHUNK):
                return
            self._waiting.pop()

    def _enter(self, request: Request, cause: Cause, watermark: int | None = None) -> bool:
        """Admit the request if it fits; False: it does not, and nothing was changed. `watermark` None: one page a holder."""
        placement, config = self._placement, self._config
        if self._budget == 0 or self._rows.num_free == 0:
            return False
        watermark = placement.num_holders if watermark is None else watermark
        # What it lacks is all its pages but those that are locked in the tree, which is the same until the clock ticks: what is
        # evicted of its prefix is neither matched nor evictable any more.
        circumstances = (request, placement.cache.clock)
        if circumstances == self._refusal and self._refused_need + watermark > placement.num_available:
            return False
        known = request.token_slice(0, len(request.tokens))
        num_known = len(known)
        match = placement.match(request, known)
        matched, evictable = (len(match.pages), match.num_evictable) if match is not None else (0, 0)
        need = placement.pages_for(num_known) - matched
        if need + watermark > placement.num_available - evictable:
            self._refusal, self._refused_need = circumstances, need + evictable
            return False
        cached = matched * config.page_size
        lease_bytes = self._lease_bytes + request.lease_bytes(cached)
        if self._num_leases and lease_bytes > config.max_lease_bytes:
            return False
        self._lease_bytes, self._num_leases = lease_bytes, self._num_leases + 1
        input_len = min(config.chunk_size, self._budget, num_known - cached)
        row = placement.enter(request, match, cached + input_len)
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = cached
        self._choice.extends.append(Extend(row, input_len, cause, known))
        self._budget -= input_len
        return True
