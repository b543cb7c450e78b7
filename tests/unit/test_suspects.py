"""Suspects: whom failed steps count for, who runs alone, who ends, and that everybody else is served as if nothing was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.request import Request
from scheduler_service.core.states import State
from scheduler_service.core.suspects import Suspects

Drive = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]
IsPoison = Callable[[Request, int, int], bool]  # (request, first position computed, end) → the step fails

_DEPTHS = pytest.mark.parametrize("overlap_depth", [0, 1, 2])


@dataclass
class Faulty:
    """A driver whose steps fail where `is_poison` says so; every failed op is kept, with the ops that were in flight."""

    driver: Any
    is_poison: IsPoison
    crashed: bool = False
    names_row: bool = False
    failed: list[list[str]] = field(default_factory=list)
    num_steps: int = 0

    def run(self, max_steps: int = 3000) -> None:
        """Until every request has ended."""
        driver = self.driver
        pending: deque[tuple[ForwardOp, int]] = deque()
        while driver.scheduler.has_work or pending:
            assert self.num_steps < max_steps, f"no end: {driver.scheduler.requests}"
            self.num_steps += 1
            driver.plan()
            if driver.op is not None:
                pending.append((driver.op, self._poison_row(driver.op)))
            if pending and (len(pending) > driver.config.overlap_depth or driver.op is None):
                op, row = pending.popleft()
                if not row:
                    driver.complete()
                    continue
                names = [request.request_id for request in op.requests]
                self.failed.append(names)
                ended = driver.scheduler.note_failure(op, (row,) if self.names_row else (), crashed=self.crashed)
                if ended:
                    assert names == [ended[0].request_id], "only a request that was alone is ended"
                    assert not pending, "nothing else was in flight"
                pending.clear()
                driver.restart()
        driver.expect_clean(driver.config.num_pages)

    def _poison_row(self, op: ForwardOp) -> int:
        starts = op.num_computed.tolist()
        for row, request, start, length in zip(
            op.req_pool_indices.tolist(), op.requests, starts, op.input_lens.tolist(), strict=True
        ):
            if self.is_poison(request, start, start + length):
                return int(row)
        return 0


def named(*names: str) -> IsPoison:
    """Every step with one of these requests fails."""
    return lambda request, start, end: request.request_id in names


def test_one_poison_row_among_256_ends_alone(drive: Drive, definition: Definition) -> None:
    """One of 256 requests loses the runtime each step it is in: it ends after three steps alone, all others are exact."""
    driver = drive(num_pages=1100, max_rows=256, token_budget=2048, overlap_depth=2)
    driver.audit = lambda: None  # a thousand times over 256 rows; the machine of the property tests audits
    prompts = {f"r{n}": [n, n + 1, 3 * n % 900, 7, 11] for n in range(256)}
    for name, prompt in prompts.items():
        driver.submit(name, prompt, 4)
    faulty = Faulty(driver, named("r97"), crashed=True)
    faulty.run()
    assert driver.finish.pop("r97") == "failed"
    assert set(driver.finish.values()) == {"length"}
    assert driver.outputs.pop("r97") == []
    assert driver.outputs == {name: definition(prompts[name], 4) for name in driver.outputs}
    assert [len(names) for names in faulty.failed] == [256, 256, 1, 1, 1]


@_DEPTHS
def test_two_poisons(drive: Drive, definition: Definition, overlap_depth: int) -> None:
    """Two of five requests fail their steps: each ends once, alone, and the other three are exact."""
    driver = drive(overlap_depth=overlap_depth, num_pages=64)
    for n in range(5):
        driver.submit(f"r{n}", [n, 2, 3], 6)
    faulty = Faulty(driver, named("r1", "r3"))
    faulty.run()
    assert driver.finish == {"r0": "length", "r1": "failed", "r2": "length", "r3": "failed", "r4": "length"}
    for n in (0, 2, 4):
        assert driver.outputs[f"r{n}"] == definition([n, 2, 3], 6)
    assert len(faulty.failed) <= 6


@_DEPTHS
def test_poison_in_the_second_chunk(drive: Drive, definition: Definition, overlap_depth: int) -> None:
    """The first chunk always succeeds, which must not clear the request; it ends, and decoding neighbours are exact."""
    driver = drive(chunk_size=3, overlap_depth=overlap_depth, num_pages=64)
    driver.submit("A", [1, 2, 3], 12)
    driver.submit("B", [5, 6], 12)
    driver.submit("bad", range(20, 28), 4)
    Faulty(driver, lambda request, start, end: request.request_id == "bad" and start <= 4 < end).run()
    assert driver.finish == {"A": "length", "B": "length", "bad": "failed"}
    assert driver.outputs["A"] == definition([1, 2, 3], 12)
    assert driver.outputs["B"] == definition([5, 6], 12)


@_DEPTHS
@pytest.mark.parametrize("crashed", [False, True])
def test_poison_in_decode_steps_only(drive: Drive, definition: Definition, overlap_depth: int, crashed: bool) -> None:
    """Its prefill gives a token each time, which must not clear it; it ends in its decode step, alone."""
    driver = drive(overlap_depth=overlap_depth, num_pages=64)
    driver.submit("A", [1, 2, 3], 12)
    driver.submit("bad", [4, 5], 40)
    driver.submit("B", [5, 6], 12)
    faulty = Faulty(driver, lambda request, start, end: request.request_id == "bad" and start > 1 and end == start + 1, crashed)
    faulty.run()
    assert driver.finish == {"A": "length", "bad": "failed", "B": "length"}
    assert driver.outputs["A"] == definition([1, 2, 3], 12)
    assert driver.outputs["bad"] == definition([4, 5], 40)[: len(driver.outputs["bad"])]
    assert len(faulty.failed) <= (5 if crashed else 3)


def test_named_row_counts_for_its_request_only(drive: Drive, definition: Definition) -> None:
    """Refusals that name a row make no suspects of the others: only the guilty one ever runs alone."""
    driver = drive(num_pages=64)
    for name in "ABC":
        driver.submit(name, [ord(name), 2, 3], 5)
    faulty = Faulty(driver, named("B"), names_row=True)
    faulty.run()
    assert faulty.failed == [["A", "B", "C"], ["A", "B", "C"], ["B"]]
    assert faulty.num_steps == 10, "two that fail, two empty ones after resets, B alone, five of A and C together"
    assert driver.outputs["A"] == definition([ord("A"), 2, 3], 5)


def test_faults_that_pass_end_nobody(drive: Drive, definition: Definition) -> None:
    """Two failed steps make suspects of everybody; each runs alone until it has two tokens more, then all go on together."""
    driver = drive(num_pages=64, overlap_depth=1)
    for name in "ABC":
        driver.submit(name, [ord(name), 2, 3], 6)
    faulty = Faulty(driver, lambda request, start, end: len(faulty.failed) < 2)
    faulty.run()
    assert faulty.failed == [["A", "B", "C"]] * 2
    assert {name: driver.outputs[name] for name in "ABC"} == {name: definition([ord(name), 2, 3], 6) for name in "ABC"}


def test_suspects_run_one_by_one_with_nothing_else_in_flight(drive: Drive) -> None:
    """After two failed steps: first in order first, no other row in the step, no second op before the answer."""
    driver = drive(num_pages=64, overlap_depth=2)
    for name, priority in (("C", 2), ("A", 0), ("B", 1)):
        driver.submit(name, [ord(name), 2, 3], 6, priority=priority)
    for _ in range(2):
        while driver.plan() == {}:
            pass
        driver.scheduler.note_failure(driver.op)
        driver.restart()
    driver.submit("new", [9], 1)
    alone = []
    for _ in range(6):
        while (planned := driver.plan()) == {}:
            pass
        alone += list(planned)
        assert driver.plan() == {}, "a suspect's step is the only one in flight"
        assert driver.scheduler.flush_releases() is None
        driver.complete()
    assert alone == ["A", "A", "B", "B", "C", "C"]
    assert set(driver.plan()) == {"A", "B", "C", "new"}
    driver.complete()
    driver.run()
    assert set(driver.finish.values()) == {"length"}


def test_suspect_takes_rows_and_pages_from_those_ahead_of_it(drive: Drive, definition: Definition) -> None:
    """One row and few pages: a suspect that is last in order still gets its turn, and the first loses its row for it."""
    driver = drive(max_rows=2, num_pages=4, page_size=2, chunk_size=2)
    driver.submit("A", [1, 2, 3, 4], 4)
    driver.submit("bad", [5, 6, 7, 8], 4)
    driver.submit("B", [1, 2, 3, 5], 4)
    faulty = Faulty(driver, named("bad"))
    faulty.run()
    assert driver.finish == {"A": "length", "bad": "failed", "B": "length"}
    assert driver.outputs["A"] == definition([1, 2, 3, 4], 4)
    assert driver.outputs["B"] == definition([1, 2, 3, 5], 4)


def test_suspect_that_is_aborted_or_retracted(drive: Drive, definition: Definition) -> None:
    """An aborted suspect frees the others at once; a retracted one resumes alone."""
    driver = drive(num_pages=64)
    driver.submit("A", [1, 2, 3], 5)
    driver.submit("B", [4, 5, 6], 5)
    for _ in range(2):
        while driver.plan() == {}:
            pass
        driver.scheduler.note_failure(driver.op)
        driver.restart()
    assert driver.step() == {}
    assert list(driver.step()) == ["A"]
    driver.retract("A")
    assert driver.step() == {}, "what was just retracted waits one plan, and nobody goes in its place"
    assert list(driver.step()) == ["A"]
    assert list(driver.step()) == ["B"]
    driver.abort("B")
    driver.run()
    assert driver.outputs["A"] == definition([1, 2, 3], 5)
    assert driver.finish == {"A": "length", "B": "abort"}


class NaiveSuspects:
    """The rules, from each request's whole history."""

    def __init__(self) -> None:
        self.history: dict[Any, list[str]] = {}

    def count(self, request: Any) -> int:
        count = gained = 0
        for event in self.history.get(request, []):
            if event == "token":
                gained += 1
            else:
                count = 1 if gained >= 2 else count + 1
                gained = 0
        return 0 if gained >= 2 else count

    def first(self, live: list[Any]) -> Any:
        return min((r for r in live if self.count(r) >= 2), key=lambda request: request.order, default=None)


@given(st.data())
def test_counts_are_those_of_the_whole_history(data: st.DataObject) -> None:
    """Tokens, failures and ends in any order: counts, the suspect whose turn it is, and who ends are those of a naive twin."""
    requests = [SimpleNamespace(request_id=f"r{i}", order=(i % 2, i), tokens=[1], state=State.DECODING) for i in range(4)]
    requests = [Hashable(**vars(request)) for request in requests]
    suspects, twin = Suspects(), NaiveSuspects()
    for _ in range(data.draw(st.integers(1, 30))):
        live = [request for request in requests if request.state is not State.FINISHED]
        if not live:
            break
        first = suspects.first()
        assert first is twin.first(live)
        assert bool(suspects) == (first is not None)
        ran = [first] if first is not None else data.draw(st.lists(st.sampled_from(live), min_size=1, unique_by=id))
        what = data.draw(st.sampled_from(["tokens", "tokens", "chunk", "fail", "fail", "crash", "end"]))
        if what == "tokens":
            for request in ran:
                request.tokens.append(0)
                twin.history.setdefault(request, []).append("token")
        elif what == "end":
            ran[0].state = State.FINISHED
        elif what in {"fail", "crash"}:
            blamed = data.draw(st.sets(st.integers(0, len(ran)), max_size=2))
            op = SimpleNamespace(req_pool_indices=np.arange(1, len(ran) + 1), requests=ran)
            named_rows = {row for row in blamed if 1 <= row <= len(ran)} or set(range(1, len(ran) + 1))
            for row in named_rows:
                twin.history.setdefault(ran[row - 1], []).append("fail")
            limit = 3 if what == "fail" else 5
            expected = [ran[row - 1] for row in sorted(named_rows) if twin.count(ran[row - 1]) >= limit]
            ended = suspects.note_failure(op, blamed, crashed=what == "crash")  # type: ignore[arg-type]
            assert ended == expected
            assert len(ended) <= 1
            for request in ended:
                assert ran == [request], "only a request that was alone is ended"
                request.state = State.FINISHED
        live = [request for request in requests if request.state is not State.FINISHED]
        assert [suspects.num_failures(request) for request in live] == [twin.count(request) for request in live]


class Hashable(SimpleNamespace):
    """A request by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other
