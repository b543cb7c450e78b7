"""Scheduler core, wire, mirror and fingerprint model together, beside a mirror and a memory written in plain Python.

Every rule is something a client, an operator or a fault can do at any moment. After every step the core's audit must find
nothing, the real mirror and the naive one must hold the scheduler's rows, and at the end every request must have returned what
the definition of the model says for its prompt alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import CacheInUseError, PromptTooLongError
from scheduler_service.core.invariants import audit, audit_op, audit_writes
from scheduler_service.core.ops import Cause, ForwardOp, StepResult
from scheduler_service.core.request import FinishReason
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.in_process_runtime import InProcessRuntime

VOCAB_SIZE = 997


def fingerprint(tokens: list[int]) -> int:
    return sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % VOCAB_SIZE


def served_alone(prompt: list[int], limit_len: int, stop_ids: list[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < limit_len:
        tokens.append(fingerprint(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class NaiveRuntime:
    """Rows as lists, KV cells as a dictionary: what the protocol says, word by word."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: dict[int, list[int]] = {}
        self.cells: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def run(self, op: ForwardOp) -> list[int]:
        for row in op.released_rows.tolist():
            del self.rows[row]
        pages, ids = deque(op.occupied_pages.tolist()), deque(op.input_ids.tolist())
        for i in range(op.num_rows):
            row, begin, row_len = (int(column[i]) for column in (op.req_pool_indices, op.begins, op.row_lens))
            if op.full_refresh[i]:
                self.rows[row] = [pages.popleft() for _ in range(row_len)]
            else:
                assert len(self.rows[row]) == begin
                self.rows[row] += [pages.popleft() for _ in range(row_len - begin)]
            start = int(op.num_computed[i])
            for position in range(start, start + int(op.input_lens[i])):
                token = ids.popleft() if i < op.num_extend_rows else self.last[row]
                self.cells[self.slot(row, position)] = token
        assert not pages
        assert not ids
        tokens = []
        for i in range(op.num_rows):
            row, length = int(op.req_pool_indices[i]), int(op.num_computed[i] + op.input_lens[i])
            token = fingerprint([self.cells[self.slot(row, position)] for position in range(length)])
            if op.sample[i]:
                self.last[row] = token
            tokens.append(token if op.sample[i] else -1)
        return tokens

    def slot(self, row: int, position: int) -> int:
        return self.rows[row][position // self.page_size] * self.page_size + position % self.page_size


CONFIGS = st.builds(
    SchedulerConfig,
    page_size=st.integers(1, 5),
    num_pages=st.integers(2, 14),
    max_rows=st.integers(1, 5),
    max_pages_per_row=st.integers(1, 16),
    vocab_size=st.just(VOCAB_SIZE),
    token_budget=st.integers(1, 24),
    chunk_size=st.integers(1, 24),
    overlap_depth=st.integers(0, 2),
    refresh_policy=st.sampled_from([RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS]),
    mixed=st.booleans(),
    prefix_cache=st.sampled_from([True, True, True, False]),
)
PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS)
    def begin(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config, keep_sent=True)
        self.restart_runtimes()
        self.results: deque[tuple[int, StepResult | None]] = deque()  # None: the step fails
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.failures: dict[str, int] = {}  # failed steps of each request, over its whole life
        self.bad: set[str] = set()  # requests that make every step fail that they are in
        self.retracted: set[str] = set()
        self.num_steps = 0

    def restart_runtimes(self) -> None:
        self.runtime = InProcessRuntime(self.config)
        self.runtime.open(self.scheduler.session_no)
        self.naive = NaiveRuntime(self.config.page_size)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 16),
        priority=st.integers(0, 2),
        prefix_cache=st.sampled_from([True, True, False]),
        namespace=st.sampled_from(["", "", "tenant"]),
        stops=st.sampled_from([[], [], list(range(0, VOCAB_SIZE, 5))]),
        bad=st.sampled_from([False] * 7 + [True]),
    )
    def submit(self, stops: list[int], namespace: str, bad: bool, **arguments: Any) -> None:
        name = f"r{len(self.expected)}"
        prompt = arguments.pop("prompt")
        try:
            request = self.scheduler.submit(name, prompt, stop_ids=stops, cache_namespace=namespace, **arguments)
        except PromptTooLongError:
            assert len(prompt) > self.config.room
            assert name not in self.scheduler.requests
            return
        self.outputs[name] = []
        self.expected[name] = served_alone(prompt, request.limit_len, stops)
        if bad:
            self.bad.add(name)

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        running = [request.request_id for request, _ in self.scheduler.rows().values()]
        if running:
            name = data.draw(st.sampled_from(running))
            self.scheduler.retract(name)
            self.retracted.add(name)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.abort(name)
        self.aborted.add(name)

    @rule(force=st.booleans())
    def reset_prefix_cache(self, force: bool) -> None:
        before = self.scheduler.stats()
        try:
            self.scheduler.reset_prefix_cache(force=force)
        except CacheInUseError:
            assert not force
            assert self.scheduler.stats() == before
        else:
            assert self.scheduler.stats().cached == 0
            if force:
                self.retracted |= set(self.scheduler.requests)

    @rule()
    def restart_runtime(self) -> None:
        self.results.clear()
        self.scheduler.reset(self.scheduler.session_no + 1)
        self.retracted |= set(self.scheduler.requests)
        self.restart_runtimes()

    @precondition(lambda self: self.results)
    @rule(crashed=st.booleans(), data=st.data())
    def fail_step(self, crashed: bool, data: st.DataObject) -> None:
        op = self.scheduler.ops_in_flight()[0]
        self.fail(data.draw(st.sets(st.sampled_from([0, *op.req_pool_indices.tolist()]), max_size=2)), crashed)

    def fail(self, rows: set[int], crashed: bool) -> None:
        """The oldest op in flight fails."""
        ops = self.scheduler.ops_in_flight()
        for request in ops[0].requests:
            self.failures[request.request_id] = self.failures.get(request.request_id, 0) + 1
        for request in self.scheduler.note_failure(ops[0], rows, crashed=crashed):
            assert ops[0].requests == [request]
            assert len(ops) == 1
            assert self.failures[request.request_id] >= (5 if crashed else 3)
        self.restart_runtime()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        idle = not self.results
        rows_before = {request.request_id: pages.tolist() for request, pages in self.scheduler.rows().values()}
        op = self.scheduler.plan()
        self.audit()
        if op is None:
            # Only what was retracted since the last plan may have to wait for the next one.
            suspect = self.scheduler._suspects.first()
            waiting = {suspect.request_id} if suspect else set(self.scheduler.requests)
            assert not idle or waiting <= self.retracted
        else:
            assert audit_op(op) + audit_writes(self.scheduler, op) == []
            self.check_untouched(op, rows_before)
            self.run(op)
        self.retracted.clear()
        self.num_steps += 1
        if self.results and self.results[0][0] <= self.num_steps - 1 - self.config.overlap_depth:
            if (result := self.results.popleft()[1]) is None:
                self.fail(set(), crashed=False)
            else:
                self.scheduler.complete(result)
            self.audit()
        outputs = self.scheduler.take_outputs()
        for request, token in zip(*outputs.columns, strict=True):
            self.outputs[request.request_id].append(token)
        for request in outputs.finished:
            name = request.request_id
            if request.finish_reason is FinishReason.FAILED:
                assert self.failures[name] >= 3
            if name in self.aborted or request.finish_reason is FinishReason.FAILED:
                assert self.outputs[name] == self.expected[name][: len(self.outputs[name])]
            else:
                assert self.outputs[name] == self.expected[name]

    def check_untouched(self, op: ForwardOp, rows_before: dict[str, list[int]]) -> None:
        planned = {request.request_id for request in op.requests}
        for request, pages in self.scheduler.rows().values():
            if request.request_id not in planned:
                assert pages.tolist() == rows_before[request.request_id]
        if self.config.refresh_policy is RefreshPolicy.TRANSITION:
            assert op.full_refresh.tolist() == [cause is not Cause.DECODE for cause in op.causes]

    def run(self, op: ForwardOp) -> None:
        assert int(op.input_lens.sum()) <= self.config.token_budget
        failed_before = any(result is None for _, result in self.results)
        if failed_before or any(request.request_id in self.bad for request in op.requests):
            self.results.append((self.num_steps, None))
            return
        naive = self.naive.run(op)
        answer = self.runtime.run(op)
        assert isinstance(answer, StepResult), answer
        assert answer.tokens.tolist() == naive
        assert self.runtime.new_violations() == []
        for row, (_, pages) in self.scheduler.rows().items():
            if not self.scheduler.placement.rows.unsent[row]:
                assert self.naive.rows[row] == pages.tolist()
                assert self.runtime.row(row) == pages.tolist()
        self.results.append((self.num_steps, answer))

    def audit(self) -> None:
        assert audit(self.scheduler) == []

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert not self.bad & {name for name, tokens in self.outputs.items() if tokens}
        limit = self.num_steps + 200 + 40 * len(self.expected) * (1 + 3 * len(self.bad))
        while self.scheduler.has_work or self.results:
            assert self.num_steps < limit, f"no progress: {list(self.scheduler.requests.values())}"
            self.step()
        stats = self.scheduler.stats()
        assert stats.private == 0
        assert stats.free + self.scheduler.placement.cache.num_evictable == self.config.num_pages
        assert self.scheduler.placement.rows.num_free == self.config.max_rows


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_the_three_right_policies_give_the_same_tokens_and_rows() -> None:
    """`transition`, `diff` and `always` differ in bytes on the wire only."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 2, int(rng.integers(1, 12))).tolist() for _ in range(12)]
    seen = {}
    for policy in (RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS):
        config = SchedulerConfig(
            page_size=2, num_pages=14, max_rows=4, max_pages_per_row=14, vocab_size=VOCAB_SIZE, overlap_depth=0,
            token_budget=9, chunk_size=4, refresh_policy=policy,
        )  # fmt: skip
        scheduler = Scheduler(config)
        naive = NaiveRuntime(2)
        history, pages_sent = [], 0
        for i, prompt in enumerate(prompts):
            scheduler.submit(f"r{i}", prompt, max_tokens=5 + i)
        while scheduler.has_work:
            op = scheduler.plan()
            if op is None:
                continue
            pages_sent += len(op.occupied_pages)
            tokens = naive.run(op)
            history.append(({row: list(pages) for row, pages in naive.rows.items()}, tokens))
            scheduler.complete(StepResult(op.session_no, op.step, np.array(tokens, dtype=np.int32)))
        seen[policy] = (history, pages_sent)
    histories = [history for history, _ in seen.values()]
    assert histories[0] == histories[1] == histories[2]
    sent = {policy: pages for policy, (_, pages) in seen.items()}
    assert sent[RefreshPolicy.DIFF] <= sent[RefreshPolicy.TRANSITION] < sent[RefreshPolicy.ALWAYS]
