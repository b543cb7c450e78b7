"""What vLLM's v1 scheduler hands to its workers, by shape: the fields of vLLM 0.33 that say which blocks and tokens, no more.

Its own classes cannot be imported without its dependencies for GPUs. `PlainScheduler` plans in these shapes as that scheduler
does: block 0 is never given out, blocks of a preempted request are freed, and a resumed one gets a whole new list.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class NewRequestData:
    """A request's first step."""

    req_id: str
    prompt_token_ids: list[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    sampling_params: object | None = None
    prefill_token_ids: list[int] | None = None


@dataclass
class CachedRequestData:
    """Later steps, one entry a request in each list."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One step."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


@dataclass
class _Request:
    name: str
    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "waiting"


class PlainScheduler:
    """Requests in order, chunked prefill, preemption of the youngest when blocks are short; no prefix cache."""

    def __init__(self, *, num_blocks: int, block_size: int, max_seqs: int, budget: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.block_size, self.max_seqs, self.budget = block_size, max_seqs, budget
        self.free = list(range(1, num_blocks + 1))
        self.requests: list[_Request] = []
        self.done: list[_Request] = []
        self.finished: set[str] = set()
        self.num_preempted = 0

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self.requests.append(_Request(name, prompt, max_tokens, list(prompt)))

    def schedule(self) -> SchedulerOutput:
        """Plan a step."""
        budget, cached, new = self.budget, CachedRequestData(), []
        counts: dict[str, int] = {}
        preempted: set[str] = set()
        for request in [request for request in self.requests if request.state == "running"]:
            if request.state != "running" or not budget:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            while (needed := self._missing(request, count)) > len(self.free):
                victim = [other for other in self.requests if other.state == "running" and other.name not in counts][-1]
                self._preempt(victim)
                preempted.add(victim.name)
                if victim is request:
                    break
            if request.state != "running":
                continue
            fresh = self._take(request, needed)
            self._append(cached, request, fresh or None)
            counts[request.name] = count
            request.computed += count
            budget -= count
        num_running = sum(request.state == "running" for request in self.requests)
        for request in [request for request in self.requests if request.state in {"waiting", "preempted"}]:
            count = min(len(request.tokens), budget)
            if (
                preempted
                or not count
                or num_running == self.max_seqs
                or self._missing(request, len(request.tokens)) > len(self.free)
            ):
                break
            blocks = self._take(request, self._missing(request, count))
            if request.state == "waiting":
                new.append(NewRequestData(request.name, request.prompt, (blocks,), 0))
            else:
                cached.resumed_req_ids.add(request.name)
                cached.all_token_ids[request.name] = list(request.tokens)
                self._append(cached, request, blocks)
            request.state, request.computed = "running", count
            counts[request.name] = count
            budget -= count
            num_running += 1
        finished, self.finished = self.finished, set()
        return SchedulerOutput(new, cached, counts, {}, finished, preempted or None)

    def update(self, name: str, token: int) -> None:
        """A sampled token."""
        request = next(request for request in self.requests if request.name == name)
        request.tokens.append(token)
        if len(request.tokens) == len(request.prompt) + request.max_tokens:
            self.free.extend(self.draw.sample(request.blocks, len(request.blocks)))
            self.requests.remove(request)
            self.done.append(request)
            self.finished.add(name)

    def blocks_of(self, name: str) -> list[int]:
        """The blocks that a request has now."""
        return next(request.blocks for request in self.requests if request.name == name)

    def samples(self, name: str) -> bool:
        """Whether the step just planned computes the request's last known token."""
        return next(request.computed == len(request.tokens) for request in self.requests if request.name == name)

    def _append(self, cached: CachedRequestData, request: _Request, blocks: list[int] | None) -> None:
        cached.req_ids.append(request.name)
        cached.new_token_ids.append([])
        cached.new_block_ids.append(None if blocks is None else (blocks,))
        cached.num_computed_tokens.append(0 if request.name in cached.resumed_req_ids else request.computed)
        cached.num_output_tokens.append(len(request.tokens) - len(request.prompt))

    def _missing(self, request: _Request, count: int) -> int:
        return max(0, -(-(request.computed + count) // self.block_size) - len(request.blocks))

    def _take(self, request: _Request, count: int) -> list[int]:
        taken = [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(count)]
        request.blocks += taken
        return taken

    def _preempt(self, request: _Request) -> None:
        self.free.extend(request.blocks)
        request.blocks, request.computed, request.state = [], 0, "preempted"
        self.num_preempted += 1
