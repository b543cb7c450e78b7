"""A scheduler driven by hand: `Driver` puts a runtime of a few lines of plain Python beside it.

That runtime is written from the wire's definition alone: it applies each op's columns to lists, keeps a token in every cell,
and samples by the fingerprint model's definition. After every call the core's audit runs, the mirror is held against the rows,
and every accepted token against what the request's own tokens give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.invariants import audit_op, audit_writes, check
from scheduler_service.core.ops import NO_TOKEN, ForwardOp, StepResult
from scheduler_service.core.page_pool import PoolStats
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.states import State

VOCAB_SIZE = 997


def fingerprint(tokens: Sequence[int]) -> int:
    """The token that follows `tokens`: sum of (i + 1) * (tok_i + 1) mod 997."""
    return sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % VOCAB_SIZE


def alone(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a cold engine returns when it serves this prompt alone."""
    known = list(prompt)
    for _ in range(count):
        known.append(fingerprint(known))
    return known[len(prompt) :]


@dataclass(frozen=True)
class PlannedRow:
    """One row of an op; `pages` is the whole row as the runtime has it after the op."""

    cause: str
    row: int
    begin: int
    size: int
    full: bool
    pages: list[int]
    num_computed: int
    input_len: int
    sample: bool


class PlainRuntime:
    """Mirror, KV cells and model as lists and dictionaries."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.mirror: dict[int, list[int]] = {}
        self._generations: dict[int, int] = {}
        self._last_token: dict[int, int] = {}
        self.cells: dict[tuple[int, int], int] = {}
        """(page, place in it) → token."""

    def run(self, op: ForwardOp) -> StepResult:
        """Apply one op, compute it, and answer."""
        for row in op.released_rows.tolist():
            self.mirror.pop(row, None)
        self._apply(op)
        self._write(op)
        tokens = []
        for row, start, length, sample in zip(
            op.req_pool_indices.tolist(), op.num_computed.tolist(), op.input_lens.tolist(), op.sample.tolist(), strict=True
        ):
            if sample:
                self._last_token[row] = fingerprint([self.cells[self._place(row, i)] for i in range(start + length)])
            tokens.append(self._last_token[row] if sample else NO_TOKEN)
        return StepResult(op.session_no, op.step, np.array(tokens, dtype=np.int32))

    def _apply(self, op: ForwardOp) -> None:
        offset = 0
        for i, row in enumerate(op.req_pool_indices.tolist()):
            begin, size, row_len = int(op.begins[i]), int(op.sizes[i]), int(op.row_lens[i])
            count = row_len if op.full_refresh[i] else size
            pages = op.occupied_pages[offset : offset + count].tolist()
            offset += count
            if op.full_refresh[i]:
                self.mirror[row] = pages
            else:
                assert self._generations[row] == op.row_generations[i], "a lease begins with a full refresh"
                assert begin == len(self.mirror[row]), "a tail begins where the last one ended"
                self.mirror[row] = self.mirror[row] + pages
            self._generations[row] = int(op.row_generations[i])
            assert begin + size == row_len == len(self.mirror[row])
        assert offset == len(op.occupied_pages)

    def _write(self, op: ForwardOp) -> None:
        offset = 0
        for i, row in enumerate(op.req_pool_indices.tolist()):
            length = int(op.input_lens[i])
            if i < op.num_extend_rows:
                tokens = op.input_ids[offset : offset + length].tolist()
                offset += length
            else:
                tokens = [self._last_token[row]]
            assert len(tokens) == length
            for position, token in enumerate(tokens, start=int(op.num_computed[i])):
                self.cells[self._place(row, position)] = token

    def _place(self, row: int, position: int) -> tuple[int, int]:
        return self.mirror[row][position // self._page_size], position % self._page_size


class Driver:
    """A scheduler and its plain runtime; every method audits."""

    def __init__(
        self, config: SchedulerConfig, new_runtime: Callable[[SchedulerConfig, int], PlainRuntime] | None = None
    ) -> None:
        """`new_runtime` is called with the configuration and the number of the session, at first and after each loss."""
        self.config = config
        self.scheduler = Scheduler(config, keep_sent=True)
        self._new_runtime = new_runtime or (lambda config, session_no: PlainRuntime(config.page_size))
        self.runtime = self._new_runtime(config, self.scheduler.session_no)
        self.op: ForwardOp | None = None
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.num_ops = 0
        self._known: dict[Request, list[int]] = {}

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **options: Any) -> Request:
        request = self.scheduler.submit(name, prompt, max_tokens=max_tokens, **options)
        self.requests[name] = request
        self.outputs[name] = []
        self.finish.pop(name, None)
        self._known[request] = list(prompt)
        return request

    def plan(self) -> dict[str, PlannedRow]:
        """Plan one op and run it; its result waits in `results`. Empty when nothing was planned."""
        op = self.op = self.scheduler.plan()
        if op is None:
            self.audit()
            return {}
        assert [*audit_op(op), *audit_writes(self.scheduler, op)] == []
        self.num_ops += 1
        self.results.append(self.runtime.run(op))
        self.audit()
        return self.planned(op)

    def planned(self, op: ForwardOp) -> dict[str, PlannedRow]:
        """The op by request id, in the op's order."""
        return {
            request.request_id: PlannedRow(
                cause=str(op.causes[i]),
                row=int(op.req_pool_indices[i]),
                begin=int(op.begins[i]),
                size=int(op.sizes[i]),
                full=bool(op.full_refresh[i]),
                pages=list(self.runtime.mirror[int(op.req_pool_indices[i])]),
                num_computed=int(op.num_computed[i]),
                input_len=int(op.input_lens[i]),
                sample=bool(op.sample[i]),
            )
            for i, request in enumerate(op.requests)
        }

    def complete(self) -> None:
        """Hand back the oldest result."""
        self.scheduler.complete(self.results.popleft())
        self.collect()
        self.audit()

    def step(self) -> dict[str, PlannedRow]:
        """Plan, and hand back the result that is due at this overlap depth."""
        planned = self.plan()
        if self.results and (len(self.results) > self.config.overlap_depth or self.op is None):
            self.complete()
        return planned

    def run(self, max_steps: int = 500) -> None:
        """Step until every request has ended and nothing is in flight."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.results:
                break
            self.step()
        assert not self.scheduler.has_work, f"no end after {max_steps} steps: {self.scheduler.requests}"
        self.audit()

    def bring(self, state: State) -> None:
        """Submit A, five tokens in chunks of at most two, and bring it to `state` with nothing in flight."""
        self.submit("A", [1, 2, 3, 4, 5], 4)
        steps = {State.SUBMITTED: 0, State.PREFILLING: 1, State.PREFILL_DONE: 3, State.DECODING: 4, State.RETRACTED: 4}
        for _ in range(steps[state]):
            self.plan()
            self.complete()
        if state is State.RETRACTED:
            self.retract("A")
        assert self.requests["A"].state is state

    def abort(self, name: str) -> None:
        self.scheduler.abort(name)
        self.collect()
        self.audit()

    def retract(self, name: str) -> None:
        self.scheduler.retract(name)
        self.audit()

    def restart(self) -> None:
        """The runtime is lost; its successor knows nothing."""
        self.results.clear()
        self.scheduler.reset(self.scheduler.session_no + 1)
        self.runtime = self._new_runtime(self.config, self.scheduler.session_no)
        self.collect()
        self.audit()

    def collect(self) -> None:
        outputs = self.scheduler.take_outputs()
        for request, token in zip(*outputs.columns, strict=True):
            known = self._known[request]
            assert token == fingerprint(known), f"{request}: {token} does not follow {known}"
            known.append(token)
            self.outputs[request.request_id].append(token)
        for request in outputs.finished:
            assert request.request_id not in self.finish, "a request ends once"
            self.finish[request.request_id] = str(request.finish_reason)

    def audit(self) -> None:
        check(self.scheduler)
        unsent = self.scheduler.placement.rows.unsent
        for row, (_, pages) in self.scheduler.rows().items():
            if not unsent[row]:
                assert self.runtime.mirror[row] == pages.tolist()

    def expect_clean(self, num_pages: int) -> None:
        """Nobody is left, nothing is private or locked, and every page can be granted."""
        scheduler, placement = self.scheduler, self.scheduler.placement
        assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_retracted, scheduler.num_in_flight) == (0, 0, 0, 0)
        assert (scheduler.requests, self.stats.private, placement.cache.num_locked) == ({}, 0, 0)
        assert placement.num_available == num_pages
        assert sorted(placement.rows.free_rows()) == list(range(1, self.config.max_rows + 1))

    @property
    def rows(self) -> dict[str, list[int]]:
        """Page row of every request that holds one."""
        return {request.request_id: pages.tolist() for request, pages in self.scheduler.rows().values()}

    @property
    def stats(self) -> PoolStats:
        return self.scheduler.stats()

    @property
    def free(self) -> list[int]:
        """Free pages, the next one granted first."""
        return self.scheduler.placement.pool.free_pages().tolist()[::-1]

    @property
    def tree(self) -> set[int]:
        """Every page of the prefix tree."""
        return {page for node in self.scheduler.placement.cache.nodes() for page in node.pages.tolist()}

    def state(self) -> dict[str, Any]:
        """Everything that a call which changes nothing must leave alone."""
        placement, pool = self.scheduler.placement, self.scheduler.placement.pool
        columns = {name: value.copy().tolist() for name, value in vars(placement.rows).items() if isinstance(value, np.ndarray)}
        return {
            "rows": columns,
            "free_rows": placement.rows.free_rows(),
            "holders": self.rows,
            "free": self.free,
            "counts": (pool.num_free, pool.num_cached, pool.num_private),
            "tree": sorted((n.pages.tolist(), n.tokens.tolist(), n.locks, n.depth) for n in placement.cache.nodes()),
            "ages": [n.pages.tolist() for n in sorted(placement.cache.nodes(), key=lambda n: (n.last_use, n.serial))],
            "locked": placement.cache.num_locked,
            "released": list(placement.released_rows),
            "requests": {name: _facts(request) for name, request in self.scheduler.requests.items()},
            "queues": (self.scheduler.num_waiting, self.scheduler.num_retracted, self.scheduler.num_in_flight),
            "records": placement.cache.records and [str(record) for record in placement.cache.records],
            "steps": self.scheduler.last_step,
        }


def _facts(request: Request) -> dict[str, Any]:
    """Everything about a request but its place in the tree."""
    names = (name for name in Request.__slots__ if name not in {"stored", "late", "node"})
    return {name: getattr(request, name) for name in names} | {"tokens": request.tokens.tolist()}


DEFAULTS: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 16,
    "max_rows": 8,
    "max_pages_per_row": 16,
    "vocab_size": VOCAB_SIZE,
    "token_budget": 64,
    "chunk_size": 64,
    "overlap_depth": 0,
}
