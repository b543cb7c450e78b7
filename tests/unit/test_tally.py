"""scheduler_service.tally: times of requests and counts of rows, by a clock that is set by hand."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagemirror.histograms import BulkHistogram
from scheduler_driver import PlainRuntime
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.ops import Cause, RowStatus, StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.tally import Tally


class Bench:
    """A scheduler, a runtime and a tally. A step takes a second from its sending to its result."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_rows": 8, "max_pages_per_row": 16, "vocab_size": 997}
        self.config = SchedulerConfig(**values | changes)
        self.core = Scheduler(self.config)
        self.runtime = PlainRuntime(self.config.page_size)
        self.tally = Tally()
        self.tally.set_rows(self.config.max_rows)
        self.tally._clock = lambda: self.now  # type: ignore[method-assign]
        self.now = 0.0
        self.results: list[StepResult] = []
        self.token_times: dict[str, list[float]] = {}

    def submit(self, name: str, length: int, max_tokens: int, **options: Any) -> None:
        self.tally.begin(self.core.submit(name, list(range(length)), max_tokens=max_tokens, **options))

    def send(self) -> None:
        op = self.core.plan()
        assert op is not None
        self.tally.sent(op, 100, 0.0, 0.0)
        self.results.append(self.runtime.run(op))

    def answer(self, status: list[int] | None = None) -> None:
        self.now += 1.0
        result = self.results.pop(0)
        if status is not None:
            result.row_status = np.array(status, dtype=np.uint8)
        self.core.complete(result)
        self.tally.answered(result, 1.0, self.now, 0.0)
        self.publish()

    def publish(self) -> None:
        outputs = self.core.take_outputs()
        for request in outputs.requests:
            self.token_times.setdefault(request.request_id, []).append(self.now)
        self.tally.delivered(len(outputs.tokens), 0.0)
        for request in outputs.finished:
            self.tally.end(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.send()
            self.answer()

    def read(self, name: str) -> tuple[int, float]:
        """How many values a histogram has, and their sum."""
        self.tally.fold()
        histogram: BulkHistogram = getattr(self.tally, name)
        return histogram.count, histogram.total


def test_times_of_requests_that_run_together() -> None:
    """A waits a second and has 5 tokens, B joins at its third: each token has its time, whether or not steps are alike."""
    bench = Bench()
    bench.submit("a", 4, 5)
    bench.now += 1.0
    bench.step(3)
    bench.submit("b", 9, 4)
    bench.step(2)
    assert not bench.core.requests.get("a")
    bench.step(2)
    assert not bench.core.has_work
    assert bench.read("first_token") == (2, 2.0 + 1.0)
    assert bench.read("between_tokens") == (4 + 3, 7.0)
    assert bench.read("queued") == (2, 1.0)
    assert bench.read("end_to_end") == (2, 6.0 + 4.0)
    tally = bench.tally
    assert (tally.prompt_tokens, tally.prefilled_tokens, tally.tokens, tally.steps) == (13, 13, 9, 7)


def test_a_retracted_request_waits_between_two_tokens() -> None:
    """Its next token is late by the steps that it sat out, and its first token stays its first."""
    bench = Bench()
    bench.submit("a", 4, 8)
    bench.submit("b", 4, 8)
    bench.step(4)
    bench.core.retract("a")
    bench.step(2)  # the first without A, in the second it resumes
    assert bench.read("first_token") == (2, 2.0)
    assert bench.read("between_tokens") == (6 + 2 + 1, 6.0 + 2.0 + 2.0)
    assert bench.tally.rows_sent[Cause.RESUME] == [0, 1]
    assert bench.core.num_retractions == 1


def test_what_comes_for_a_request_that_is_over_is_no_token() -> None:
    """A look-ahead step of a request that was aborted counts for nobody, nor for whoever gets its slot."""
    bench = Bench(overlap_depth=1)
    bench.submit("a", 4, 50)
    bench.submit("b", 4, 50)
    bench.step(3)
    bench.send()
    bench.core.abort("a")
    bench.publish()
    bench.submit("c", 4, 50)
    bench.send()
    bench.answer()  # of A and B
    bench.answer()  # of B and C
    assert bench.read("first_token") == (3, 1.0 + 1.0 + 2.0)
    assert bench.read("between_tokens") == (4 + 2, 6.0)
    assert bench.read("end_to_end") == (0, 0.0)  # an abort is no latency
    slots = bench.tally._slots
    assert len(set(slots.values())) == 2
    bench.submit("d", 4, 50)
    bench.step(2)
    assert bench.read("first_token") == (4, 5.0)


def test_a_new_session_forgets_what_was_in_flight() -> None:
    """Results that never come leave no trace; the wait is part of the time between two tokens."""
    bench = Bench(overlap_depth=1)
    bench.submit("a", 4, 50)
    bench.step(2)
    bench.send()
    bench.send()
    bench.results.clear()
    bench.now += 10.0
    bench.core.reset(2)
    bench.tally.reset()
    bench.runtime = PlainRuntime(bench.config.page_size)
    assert bench.core.plan() is None  # it resumes in a later plan
    bench.step(2)
    assert bench.read("first_token") == (1, 1.0)
    assert bench.read("between_tokens") == (3, 1.0 + 11.0 + 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_times_are_those_of_the_tokens_one_by_one(seed: int) -> None:
    """Whatever comes, goes, is aborted or loses its row: counts and sums are those of a list of every token's time."""
    draw = random.Random(seed)
    depth = seed % 3
    bench = Bench(overlap_depth=depth, num_pages=24, chunk_size=6)
    submitted: dict[str, float] = {}
    for n in range(300):
        bench.now += draw.choice((0.0, 0.5, 1.0))
        what, live = draw.random(), list(bench.core.requests.values())
        if what < 0.25 and len(live) < 12:
            submitted[f"r{n}"] = bench.now
            bench.submit(f"r{n}", draw.randint(1, 20), draw.randint(1, 30), stop_ids=draw.sample(range(997), 40))
        elif what < 0.3 and live:
            bench.core.abort(draw.choice(live).request_id)
            bench.publish()
        elif what < 0.35 and (holders := [request for request in live if request.state.holds_row]):
            bench.core.retract(draw.choice(holders).request_id)
        elif len(bench.results) <= depth and (op := bench.core.plan()) is not None:
            bench.tally.sent(op, 1, 0.0, 0.0)
            bench.results.append(bench.runtime.run(op))
            bench.publish()  # of requests that planning has ended
        elif bench.results:
            bench.answer()
    times = bench.token_times
    firsts = [values[0] - submitted[name] for name, values in times.items()]
    gaps = [later - before for values in times.values() for before, later in pairwise(values)]
    assert len(firsts) > 20
    assert bench.read("first_token") == (len(firsts), sum(firsts))
    assert bench.read("between_tokens") == (len(gaps), sum(gaps))
    assert bench.tally.tokens == len(firsts) + len(gaps)


def test_rows_are_counted_by_cause_and_kind() -> None:
    """Chunks, the first decode and later ones; under `always` each of them is sent whole."""
    for policy, later in ((RefreshPolicy.TRANSITION, [3, 0]), (RefreshPolicy.ALWAYS, [0, 3])):
        bench = Bench(refresh_policy=policy, chunk_size=4, overlap_depth=0)
        bench.submit("a", 10, 5)
        bench.step(7)
        tally = bench.tally
        counts = {cause.value: sum(kinds) for cause, kinds in tally.rows_sent.items()}
        assert counts == {"first_chunk": 1, "continuation": 2, "prefill_done_to_decode": 1, "decode": 3, "resume": 0}
        assert tally.rows_sent[Cause.FIRST_CHUNK] == [0, 1]
        assert tally.rows_sent[Cause.DECODE] == later
        assert tally.refreshed_rows == sum(full for _, full in tally.rows_sent.values())
        assert (tally.rows, tally.op_bytes) == (7, 700)


def test_prefix_cache_counts_first_admissions() -> None:
    """Queries are whole prompts, hits what was found of them; a request that opted out asks nothing."""
    bench = Bench(overlap_depth=0)
    for name, options in (("a", {}), ("b", {}), ("c", {"prefix_cache": False})):
        bench.submit(name, 10, 2, **options)
        bench.step(2)
    assert (bench.tally.query_tokens, bench.tally.hit_tokens) == (20, 8)


def test_clamped_rows_are_counted_and_get_no_token() -> None:
    """A row that reached the mirror's width is counted; the other row's token still has its time."""
    bench = Bench(overlap_depth=0)
    bench.submit("a", 4, 9)
    bench.submit("b", 4, 9)
    bench.step(3)
    bench.send()
    bench.answer([RowStatus.CLAMPED, RowStatus.OK])
    assert bench.tally.clamped_rows == 1
    assert bench.read("between_tokens") == (4 + 1, 5.0)


def test_a_histogram_counts_as_one_by_one() -> None:
    """A value on a bound belongs to its bucket; weights count; infinity and no numbers do not."""
    histogram = BulkHistogram((1.0, 2.0, 5.0))
    histogram.values += [0.5, 1.0, 2.5]
    histogram.weighted += [(2.0, 3), (7.0, 2)]
    histogram.arrays.append((10.0, np.array([9.5, np.nan, np.inf, 4.0])))
    histogram.fold()
    histogram.fold()
    assert histogram.read() == ([("1.0", 3.0), ("2.0", 6.0), ("5.0", 7.0), ("+Inf", 10.0)], 0.5 + 1 + 2.5 + 6 + 14 + 0.5 + 6)
    assert histogram.read((2.0,))[0] == [("2.0", 6.0), ("+Inf", 10.0)]
