"""Core, mirror and fingerprint model in one process, one step at a time.

A scenario runs through the real scheduler core, the real wire format and the real runtime half (session checks, mirror, model);
only the network and the clock are missing, so a run is deterministic. After every half step the whole state is audited: the
core's own invariants, the mirror's rows against the scheduler's, the fingerprint of every cell that was read, and every sampled
token against the definition of the model.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from scheduler_service.core.errors import InternalError, RequestError
from scheduler_service.core.invariants import audit, audit_op, audit_writes
from scheduler_service.core.ops import ForwardOp, Int32Array, StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.in_process_runtime import InProcessRuntime
from scheduler_service.scenario import Results, Scenario
from scheduler_service.scenario_events import (
    VOCAB_SIZE,
    Abort,
    Complete,
    Event,
    Fail,
    FlushReleases,
    ResetPrefixCache,
    RestartRuntime,
    Retract,
    StepFailed,
    Submit,
    TokenBudget,
)
from scheduler_service.simulation_report import OpLine, StepLine, Summary

MAX_IDLE_STEPS = 10_000
"""Steps, beside one for each token asked for, after which a run that has not ended is stopped."""


class Simulation:
    """One scenario under way: `step()` until it returns None, then `summary` is complete."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.summary = Summary()
        self.scheduler = Scheduler(scenario.config, keep_sent=True)
        self.runtime = InProcessRuntime(scenario.config)
        self.runtime.open(1)
        self._events = [(event.step, place, event) for place, event in enumerate(scenario.events)]  # a heap
        heapq.heapify(self._events)
        self._results: deque[tuple[int, StepResult]] = deque()
        self._sums: dict[str, _Fingerprint] = {}
        self._scripted = any(isinstance(event, Submit) and event.output for event in scenario.events)
        self._step = 0
        self._given_up = False
        asked = sum(max(event.max_tokens, 0) for event in scenario.events if isinstance(event, Submit))
        self._last_step = scenario.last_event_step + 1 + MAX_IDLE_STEPS + asked

    def step(self) -> StepLine | None:
        """Run one step and describe it; None when every event is applied, every request has ended and no result is due."""
        if self._given_up or not (self._events or self._results or self.scheduler.has_work):
            return None
        if self._step >= self._last_step:
            self._report(f"no progress: the run has not ended after {self._step} steps")
            return None
        line = StepLine(self._step)
        try:
            self._advance(line)
        except InternalError as error:
            self._report(f"step {self._step}: the scheduler gave up: {error}")
            self._given_up = True
        self._describe(line)
        self.summary.lines += 1
        self.summary.steps += 1 if line.ops else 0
        self._step += 1
        return line

    def _advance(self, line: StepLine) -> None:
        depth, by_event = self.scenario.config.overlap_depth, self.scenario.results is Results.BY_EVENT
        while self._events and self._events[0][0] <= self._step:
            _, place, event = heapq.heappop(self._events)
            self._apply(event, line)
            if isinstance(event, Complete) and event.until is not None and event.until > self._step:
                heapq.heappush(self._events, (self._step + 1, place, event))
        if by_event:
            self._complete(len(self._results) - depth)
        self._collect(line)
        op = self._plan(line)
        if op is not None:
            self._run(op, line)
        self._audit()
        if by_event:
            self._complete(1 if op is None and not self._events else 0)
        else:
            self._complete(sum(step <= self._step - depth for step, _ in self._results))
        self._collect(line)
        self._audit()

    def _complete(self, count: int) -> None:
        for _ in range(min(count, len(self._results))):
            self.scheduler.complete(self._results.popleft()[1])

    def _apply(self, event: Event, line: StepLine) -> None:
        scheduler = self.scheduler
        if isinstance(event, Submit):
            self._submit(event, line)
        elif isinstance(event, Retract):
            request = scheduler.requests.get(event.retract)
            if request is not None and request.state.holds_row:
                scheduler.retract(event.retract)
        elif isinstance(event, Abort):
            if event.abort in scheduler.requests:
                scheduler.abort(event.abort)
        elif isinstance(event, Fail):
            if event.fail in scheduler.requests:
                scheduler.fail_request(event.fail, "the scenario says so")
        elif isinstance(event, ResetPrefixCache):
            try:
                scheduler.reset_prefix_cache(force=event.force)
            except RequestError as error:
                line.refused.append(f"reset_prefix_cache:{error.code}")
        elif isinstance(event, Complete):
            self._complete(event.complete)
        else:
            self._apply_runtime_event(event)

    def _apply_runtime_event(self, event: StepFailed | RestartRuntime | FlushReleases | TokenBudget) -> None:
        scheduler = self.scheduler
        if isinstance(event, StepFailed):
            if event.step_failed <= scheduler.num_in_flight:
                failed = scheduler.ops_in_flight()[event.step_failed - 1]
                scheduler.note_failure(failed, event.rows, crashed=event.crashed)
        elif isinstance(event, TokenBudget):
            scheduler.set_token_budget(event.token_budget)
        elif isinstance(event, FlushReleases):
            op = scheduler.flush_releases()
            if op is not None:
                self._results.append((self._step, self._answer(op)))
        else:
            self._results.clear()
            scheduler.reset(scheduler.session_no + 1)
            self.runtime = InProcessRuntime(self.scenario.config)
            self.runtime.open(scheduler.session_no)

    def _submit(self, event: Submit, line: StepLine) -> None:
        summary, name = self.summary, event.submit
        summary.outputs[name], summary.cached_tokens[name], summary.retractions[name] = [], 0, 0
        try:
            self.scheduler.submit(
                name,
                event.prompt,
                max_tokens=event.max_tokens,
                stop_ids=event.eos,
                priority=event.priority,
                prefix_cache=event.prefix_cache,
                cache_namespace=event.namespace,
            )
        except RequestError as error:
            summary.finish[name] = line.ended[name] = f"refused:{error.code}"
        else:
            self._sums[name] = _Fingerprint(event.prompt, event.output)

    def _plan(self, line: StepLine) -> ForwardOp | None:
        op = self.scheduler.plan()
        if op is None:
            return None
        self.summary.pages_sent += len(op.occupied_pages)
        pages = self.scheduler.placement.rows.row_pages
        for index, (request, cause) in enumerate(zip(op.requests, op.causes, strict=True)):
            row = int(op.req_pool_indices[index])
            line.ops.append(
                OpLine(
                    request=request.request_id,
                    cause=cause,
                    row=row,
                    begin=int(op.begins[index]),
                    size=int(op.sizes[index]),
                    full_refresh=bool(op.full_refresh[index]),
                    occupied_pages=pages(row).tolist(),
                    num_computed=int(op.num_computed[index]),
                    input_len=int(op.input_lens[index]),
                )
            )
        return op

    def _run(self, op: ForwardOp, line: StepLine) -> None:
        for finding in (*audit_op(op), *audit_writes(self.scheduler, op)):
            self._report(finding)
        self._results.append((self._step, self._answer(op)))
        line.applied = {planned.request: self.runtime.row(planned.row) for planned in line.ops}
        for violation in self.runtime.new_violations():
            self._report(f"step {self._step}: {violation}")

    def _answer(self, op: ForwardOp) -> StepResult:
        answer = self.runtime.run(op, self._shifts(op) if self._scripted else None)
        if isinstance(answer, str):
            self._report(f"step {self._step}: the runtime refused: {answer}")
            answer = StepResult(op.session_no, op.step, np.where(op.sample, 0, -1).astype(np.int32))
        return answer

    def _shifts(self, op: ForwardOp) -> Int32Array:
        lengths = (op.num_computed + op.input_lens).tolist()
        shifts = [self._sums[r.request_id].shift(length) for r, length in zip(op.requests, lengths, strict=True)]
        return np.array(shifts, dtype=np.int32)

    def _collect(self, line: StepLine) -> None:
        """Take over what the core has accepted and ended, and hold each token against the model's definition."""
        outputs = self.scheduler.take_outputs()
        for request, token in zip(*outputs.columns, strict=True):
            name = request.request_id
            expected = self._sums[name].accept(token)
            if token != expected:
                self._report(f"step {self._step}: request {name} sampled {token}, its own tokens give {expected}")
            line.sampled[name] = token
            self.summary.outputs[name].append(token)
        for request in outputs.finished:
            line.ended[request.request_id] = self.summary.finish[request.request_id] = str(request.finish_reason)
            self._note(request)
            self._sums.pop(request.request_id, None)

    def _note(self, request: Request) -> None:
        self.summary.cached_tokens[request.request_id] = request.cached_tokens
        self.summary.retractions[request.request_id] = request.num_retractions

    def _audit(self) -> None:
        for finding in audit(self.scheduler):
            self._report(f"step {self._step}: {finding}")
        for row, (request, pages) in self.scheduler.rows().items():
            self._compare(request.request_id, self.runtime.row(row), pages.tolist())

    def _compare(self, name: str, mirror: list[int], pages: list[int]) -> None:
        if mirror == pages:
            return
        text = f"step {self._step}: request {name}: mirror row {mirror} is not the scheduler's row {pages}"
        wrong = [i for i, page in enumerate(mirror) if i >= len(pages) or pages[i] != page]
        text += "".join(f"; logical page {i} reads page {mirror[i]}" for i in wrong)
        for page in sorted({page for page in mirror if mirror.count(page) > 1}):
            places = [str(i) for i, entry in enumerate(mirror) if entry == page]
            text += f"; page {page} is aliased by logical pages {' and '.join(places)}"
        owners = {
            entry: request.request_id
            for request, row in self.scheduler.rows().values()
            for entry in row.tolist()
            if request.request_id != name
        }
        for i in wrong:
            if mirror[i] in owners and mirror[i] not in pages:
                text += f"; page {mirror[i]} belongs to request {owners[mirror[i]]}"
        self._report(text)

    def _report(self, violation: str) -> None:
        if violation not in self.summary.violations:
            self.summary.violations.append(violation)

    def _describe(self, line: StepLine) -> None:
        for row, (request, pages) in sorted(self.scheduler.rows().items()):
            line.rows[request.request_id] = pages.tolist()
            line.mirror[request.request_id] = self.runtime.row(row)
        stats = self.scheduler.stats()
        line.free, line.cached, line.private = stats.free, stats.cached, stats.private
        for request in self.scheduler.requests.values():
            self._note(request)


class _Fingerprint:
    """The model by its definition, over a request's own tokens: sum of (i + 1) * (tok_i + 1) mod 997.

    `output`: the first tokens that are to come instead. The model's are shifted to them, so that a wrong read still shows.
    """

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self._prompt_len = self._length = len(prompt)
        self._sum = sum((i + 1) * (token + 1) for i, token in enumerate(prompt)) % VOCAB_SIZE
        self._shifts: list[int] = []
        total = self._sum
        for i, token in enumerate(output, len(prompt)):
            self._shifts.append((token - total) % VOCAB_SIZE)
            total = (total + (i + 1) * (token + 1)) % VOCAB_SIZE

    def shift(self, length: int) -> int:
        """What is added to the token that follows `length` known ones."""
        place = length - self._prompt_len
        return self._shifts[place] if 0 <= place < len(self._shifts) else 0

    def accept(self, token: int) -> int:
        """The token that follows so far; then takes in the one that did."""
        expected = (self._sum + self.shift(self._length)) % VOCAB_SIZE
        self._length += 1
        self._sum = (self._sum + self._length * (token + 1)) % VOCAB_SIZE
        return expected
