"""A dump is a scenario file that makes the core do again what it did: the same ops, bit for bit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler_service import recorder
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import CacheInUseError, PromptTooLongError, UnexpectedResultError
from scheduler_service.core.ops import ForwardOp, RowStatus, StepResult
from scheduler_service.dump import dump_text
from scheduler_service.in_process_runtime import InProcessRuntime
from scheduler_service.recorder import RecordingScheduler
from scheduler_service.scenario import parse_scenario
from scheduler_service.scenario_events import Submit
from scheduler_service.simulation import Simulation

FINGERPRINT_VOCAB = 997
NAMES = ["a", "7", "null", "yes", "2024-13-45", "ä b", 'q"{}\\', "#", "🦊", "line\nbreak", "\x85\u2028", "a: b, c"]

Op = tuple[object, ...]
Replay = Callable[[str], tuple[list[Op], Simulation]]


def essence(op: ForwardOp) -> Op:
    """Everything that an op says, less the token ids."""
    columns = (
        op.req_pool_indices, op.row_lens, op.begins, op.sizes, op.full_refresh, op.occupied_pages, op.num_computed,
        op.input_lens, op.sample, op.released_rows,
    )  # fmt: skip
    return (op.step, op.num_extend_rows, *(tuple(column.tolist()) for column in columns))


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Simulate a text to its end; the ops that were sent, and the simulation."""

    def run(text: str) -> tuple[list[Op], Simulation]:
        ops: list[Op] = []
        execute = InProcessRuntime.run

        def spy(self: InProcessRuntime, op: ForwardOp, *args: Any) -> StepResult | str:
            ops.append(essence(op))
            return execute(self, op, *args)

        with monkeypatch.context() as patch:
            patch.setattr(InProcessRuntime, "run", spy)
            simulation = Simulation(parse_scenario(text, "dump.yaml"))
            while simulation.step() is not None:
                pass
        return ops, simulation

    return run


class Driver:
    """Calls a core as a server does, in random order, with a model that answers whatever it likes."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.is_fingerprint = rng.random() < 0.3
        self.config = SchedulerConfig(
            page_size=rng.choice([1, 2, 3, 4]),
            num_pages=rng.randint(6, 24),
            max_rows=rng.randint(1, 6),
            max_pages_per_row=rng.randint(4, 24),
            vocab_size=FINGERPRINT_VOCAB if self.is_fingerprint else 32000,
            token_budget=rng.randint(4, 24),
            chunk_size=rng.randint(1, 16),
            overlap_depth=rng.randint(0, 2),
            refresh_policy=rng.choice([RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS]),
            mixed=rng.random() < 0.7,
            prefix_cache=rng.random() < 0.9,
            max_context=rng.choice([0, 0, 17]),
            greedy_only=self.is_fingerprint,
        )
        self.core = RecordingScheduler(self.config)
        self.alphabet = rng.sample(range(self.config.vocab_size), rng.choice([2, 3, 200]))
        self.in_flight: deque[ForwardOp] = deque()
        self.ops: list[Op] = []
        self.said: list[list[int]] = []  # prompts with their outputs

    def run(self, num_calls: int) -> None:
        calls = [
            (30, self.plan), (30, self.complete), (6, self.submit), (2, self.retract), (1, self.abort), (1, self.fail),
            (1, self.expire), (1, self.reset_cache), (0.5, self.restart), (0.5, self.step_failed), (1, self.flush),
            (0.3, self.halve), (0.3, self.wrong_result),
        ]  # fmt: skip
        for call in self.rng.choices([call for _, call in calls], [weight for weight, _ in calls], k=num_calls):
            call()
            for request in self.core.take_outputs().finished:
                self.said.append(request.tokens.tolist())

    def plan(self) -> None:
        if len(self.in_flight) <= self.config.overlap_depth:
            self.send(self.core.plan())

    def flush(self) -> None:
        self.send(self.core.flush_releases())

    def send(self, op: ForwardOp | None) -> None:
        if op is not None:
            self.in_flight.append(op)
            self.ops.append(essence(op))

    def token(self, op: ForwardOp, i: int) -> int:
        if not op.sample[i]:
            return -1
        if self.is_fingerprint:
            known = op.requests[i].tokens.tolist()
            # The tokens of ops before this one that the core does not know yet are what the model makes of it.
            while len(known) < op.num_computed[i] + op.input_lens[i]:
                known.append(sum((p + 1) * (token + 1) for p, token in enumerate(known)) % FINGERPRINT_VOCAB)
            return sum((p + 1) * (token + 1) for p, token in enumerate(known)) % FINGERPRINT_VOCAB
        return self.rng.choice(self.alphabet)

    def complete(self) -> None:
        if self.in_flight:
            op = self.in_flight.popleft()
            tokens = np.array([self.token(op, i) for i in range(op.num_rows)], dtype=np.int32)
            status = np.array([RowStatus.NON_FINITE if self.rng.random() < 0.01 else 0 for _ in tokens], dtype=np.uint8)
            self.core.complete(StepResult(op.session_no, op.step, tokens, status))

    def wrong_result(self) -> None:
        with pytest.raises(UnexpectedResultError):
            self.core.complete(StepResult(9999, 1, np.empty(0, dtype=np.int32)))

    def submit(self) -> None:
        rng = self.rng
        prompt = [rng.choice(self.alphabet) for _ in range(rng.randint(1, 9))]
        if self.said and rng.random() < 0.5:
            prompt = rng.choice(self.said) + prompt
        name = rng.choice(NAMES)
        if name in self.core.requests:
            return
        try:
            self.core.submit(
                name,
                prompt[-self.config.room :],
                max_tokens=rng.choice([1, 2, 5, 12, 2**31 - 1]),
                stop_ids=rng.sample(self.alphabet, 1) if rng.random() < 0.4 else (),
                priority=rng.choice([0, 0, 1, -1]),
                prefix_cache=rng.random() < 0.9,
                cache_namespace=rng.choice(["", "", "", "7", "tenant: ä"]),
            )
        except PromptTooLongError:
            assert self.config.max_context

    def some(self, *, with_row: bool = False) -> str | None:
        names = [r.request_id for r in self.core.requests.values() if r.state.holds_row or not with_row]
        return self.rng.choice(names) if names else None

    def retract(self) -> None:
        if (name := self.some(with_row=True)) is not None:
            self.core.retract(name)

    def abort(self) -> None:
        if (name := self.some()) is not None:
            self.core.abort(name)

    def fail(self) -> None:
        if (name := self.some()) is not None:
            self.core.fail_request(name, "no")

    def expire(self) -> None:
        if (name := self.some()) is not None:
            self.core.expire(name)

    def reset_cache(self) -> None:
        try:
            self.core.reset_prefix_cache(force=self.rng.random() < 0.5)
        except CacheInUseError:
            assert self.core.placement.cache.num_locked

    def restart(self) -> None:
        self.in_flight.clear()
        self.core.reset(self.core.session_no + self.rng.randint(1, 3))

    def step_failed(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.in_flight:
                rows = self.in_flight[0].req_pool_indices.tolist()
                blamed = self.rng.sample(rows, 1) if rows and self.rng.random() < 0.5 else []
                self.core.note_failure(self.in_flight[0], blamed, crashed=self.rng.random() < 0.5)
            self.restart()
            self.plan()

    def halve(self) -> None:
        self.core.set_token_budget(max(1, self.core.token_budget // 2))


@pytest.mark.parametrize("seed", range(12))
def test_replay_sends_the_same_ops(seed: int, replay: Replay) -> None:
    """Rows, pages, begins, sizes, bits, lengths and releases of every op are those of the core that was recorded."""
    driver = Driver(seed)
    driver.run(300)
    ops, simulation = replay(dump_text(driver.core))
    assert len(driver.ops) > 10
    assert ops[: len(driver.ops)] == driver.ops
    assert simulation.summary.violations == []
    assert not simulation.scheduler.has_work


@pytest.mark.parametrize("seed", range(100, 104))
def test_long_history_is_cut_and_says_so(seed: int, replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts at most are kept; what is left is a sound scenario, and its comment counts what is missing."""
    monkeypatch.setattr(recorder, "MAX_ENTRIES", 60)
    driver = Driver(seed)
    driver.run(600)
    history = driver.core.history
    assert len(history.parts) == 2
    assert 60 <= len(history.entries()) + sum(part.num_plans for part in history.parts) <= 140
    text = dump_text(driver.core)
    scenario = parse_scenario(text, "cut.yaml")
    num_submits = sum(isinstance(event, Submit) for event in scenario.events)
    assert (
        f"#   the first {history.start.first_step} plans, and {history.num_submitted - num_submits} requests that had" in text
    )
    assert scenario.last_event_step <= 140
    _, simulation = replay(text)
    assert simulation.summary.violations == []
    assert not simulation.scheduler.has_work


def test_history_is_cut_by_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts fill a part as many calls do; what was live at the cut begins with the tokens known then, what was over is
    gone.
    """
    monkeypatch.setattr(recorder, "MAX_TOKENS", 20)
    config = SchedulerConfig(
        page_size=4,
        num_pages=64,
        max_rows=4,
        max_pages_per_row=16,
        vocab_size=FINGERPRINT_VOCAB,
        overlap_depth=0,
        greedy_only=True,
    )
    core = RecordingScheduler(config)
    core.submit("long", [1, 2, 3], max_tokens=40)
    for token in (20, 104, 629, 421):
        op = core.plan()
        assert op is not None
        core.complete(StepResult(1, op.step, np.array([token], dtype=np.int32)))
    for name in "ABC":
        core.submit(name, [7] * 20, max_tokens=1)
        core.abort(name)
    long, b, c = [event for event in parse_scenario(dump_text(core), "x").events if isinstance(event, Submit)]
    assert (long.step, long.submit, long.prompt, long.max_tokens) == (0, "long", [1, 2, 3, 20, 104, 629, 421], 36)
    assert [(event.step, event.submit) for event in (b, c)] == [(0, "B"), (0, "C")]
