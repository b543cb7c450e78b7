"""One scheduler of a given size as a worker of bench_scaling.py, or the memory of a large one.

python _party_scaling.py
"""

from __future__ import annotations

import gc
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from _party_ours import STEP_STAGES, fill_rows, finish_step, timed_step
from _scheduler_lines import PAGE_SIZE, VOCAB_SIZE, WARM_UP, num_pages
from _workers import Answer, serve

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.wire import op_to_proto

SMALL_VALUES = 256
"""Token values of the scaling lines: Python keeps integers below 257 once, so that long contexts fit into memory."""


def make_scheduler(rows: int, pages: int, width: int) -> Scheduler:
    """A scheduler that can fill all its rows in one step."""
    limits = (PAGE_SIZE, pages, rows, width, VOCAB_SIZE)
    return Scheduler(SchedulerConfig(*limits, token_budget=rows * width * PAGE_SIZE, chunk_size=width * PAGE_SIZE))


def fill_tree(scheduler: Scheduler, nodes: int) -> None:
    """Bring the prefix cache to so many nodes of one page: requests of a page and a token come and end.

    The pool has at least one page more than that; no more requests come at once than fit beside the nodes that are there.
    """
    rng = np.random.default_rng(3)  # noqa: TID251  (seeded data, not the product)
    config, done = scheduler.config, 0
    while done < nodes:
        count = min(config.max_rows, nodes - done, max(1, (config.num_pages - done) // 3))
        for number, prompt in enumerate(rng.integers(0, VOCAB_SIZE, (count, PAGE_SIZE + 1), dtype=np.int32)):
            scheduler.submit(f"node-{done + number}", prompt, max_tokens=1)
        done += count
        while scheduler.has_work and (op := scheduler.plan()) is not None:
            finish_step(scheduler, op)


def num_nodes(scheduler: Scheduler) -> int:
    """Nodes of the prefix cache."""
    return sum(1 for _ in scheduler.placement.cache.nodes())


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not say how much memory a process has in RAM")


class Scaling:
    """The scheduler of one point."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._rows = 0
        self._number = 0

    def decode(self, rows: int, context: int, steps: int, pages: int = 0, waiting: int = 0, nodes: int = 0) -> Answer:
        """Set up decode rows, a pool of `pages` pages (0: what is needed), requests that wait, a tree of `nodes` nodes."""
        self._scheduler = None
        gc.collect()
        room = steps + WARM_UP + 8
        pages = pages or num_pages(rows, context, room) + nodes
        self._scheduler = make_scheduler(rows, pages, -(-(context + room) // PAGE_SIZE) + 1)
        self._rows = rows
        fill_tree(self._scheduler, nodes)
        fill_rows(self._scheduler, rows, context, room, SMALL_VALUES)
        prompt = np.arange(PAGE_SIZE, dtype=np.int32)
        for number in range(waiting):
            self._scheduler.submit(f"waiting-{number}", prompt, max_tokens=16)
        self.steps(WARM_UP)
        if self._scheduler.num_waiting != waiting:
            raise RuntimeError(f"{self._scheduler.num_waiting} requests wait, not {waiting}")
        return {}

    def steps(self, count: int) -> Answer:
        """Time so many decode steps."""
        assert self._scheduler is not None
        samples = [timed_step(self._scheduler, self._rows) for _ in range(count)]
        return {stage: list(times) for stage, times in zip(STEP_STAGES, zip(*samples, strict=True), strict=True)}

    def lives(self, nodes: int) -> Answer:
        """Set up a tree that fills the pool but for a page: whoever enters evicts, whoever leaves publishes."""
        self._scheduler = None
        gc.collect()
        self._scheduler = make_scheduler(256, nodes + 1, 8)
        fill_tree(self._scheduler, nodes)
        self.come_and_go(WARM_UP)
        if num_nodes(self._scheduler) != nodes:
            raise RuntimeError(f"the tree has {num_nodes(self._scheduler)} nodes, not {nodes}")
        return {}

    def come_and_go(self, count: int) -> Answer:
        """Time so many requests of a page and a token from submit to end, one after the other."""
        scheduler = self._scheduler
        assert scheduler is not None
        times = []
        for _ in range(count):
            self._number += 1
            prompt = np.full(PAGE_SIZE + 1, self._number % VOCAB_SIZE, np.int32)
            prompt[0] = self._number // VOCAB_SIZE
            begin = perf_counter_ns()
            scheduler.submit(f"life-{self._number}", prompt, max_tokens=1)
            op = scheduler.plan()
            assert op is not None
            op_to_proto(op).SerializeToString()
            finish_step(scheduler, op)
            times.append(perf_counter_ns() - begin)
            if scheduler.has_work:
                raise RuntimeError("a request of one token did not end with its first step")
        return {"life": times}

    def memory(self, pages: int, nodes: int, waiting: int, prompt_tokens: int) -> Answer:
        """Bytes in RAM before and after a scheduler was made that has all of that; 0 pages: none is made."""
        before = resident_bytes()
        if pages:
            self._scheduler = scheduler = make_scheduler(1024, pages, 4096)
            fill_tree(scheduler, 1)
            fill_tree(scheduler, nodes)
            rng = np.random.default_rng(4)  # noqa: TID251  (seeded data, not the product)
            for number in range(waiting):
                prompt = rng.integers(0, VOCAB_SIZE, prompt_tokens, dtype=np.int32)
                scheduler.submit(f"waiting-{number}", prompt, max_tokens=256)
            if scheduler.num_waiting != waiting or num_nodes(scheduler) < nodes:
                raise RuntimeError(f"{scheduler.num_waiting} requests wait and the tree has {num_nodes(scheduler)} nodes")
        gc.collect()
        return {"before": before, "after": resident_bytes()}


def main() -> None:
    scaling = Scaling()
    handlers = (scaling.decode, scaling.steps, scaling.lives, scaling.come_and_go, scaling.memory)
    serve({handler.__name__: handler for handler in handlers})


if __name__ == "__main__":
    main()
