"""A tokenspeed-scheduler as a party of bench_scheduler.py: the C++ scheduler of TokenSpeed through its Python bindings.

    PEER_PYTHON _party_tokenspeed.py PREFIX_GRANULARITY

runs in the peer's own environment and knows both shapes of its interface, that of 0.1.0 and that of 0.1.42. A decode step has
these stages: `plan` (`next_execution_plan`), `read` (of the plan's columns, what a runtime needs to run the step and to keep
its page table) and `advance` (an event a row with its token, and `Scheduler.advance`). Tokens and everything else that a caller
would have at hand are not counted, nor is turning lists into arrays. What was faster of what there is to choose from:

- event objects are kept and given new tokens; they are never made twice for a request
- 0.1.0: of a decode step only the new pages are read, not each row's whole list, which its runtime does not need then
- 0.1.42: the block tables as arrays, not as lists; a prefix granularity of a page, or of more (see the argument)
- a prompt is turned from numpy into a list, which the bindings take three times as fast as the array
- no host pages in use, no mixed batches, no overlap: each was measured and none makes a step faster
"""

from __future__ import annotations

import gc
import sys
from time import perf_counter_ns
from typing import Any

import tokenspeed_scheduler as tokenspeed
from _scheduler_lines import PAGE_SIZE, PROMPT_TOKENS, WARM_UP, num_pages, pages_for_prompts, prompt_of_row, prompt_to_admit
from _workers import Answer, serve

IS_OLD = hasattr(tokenspeed.SchedulerConfig, "page_size")
"""0.1.0: pages of one size, plans with `occupied_pages`; newer ones have groups and full tables."""
STEP_STAGES = ("plan", "read", "advance")
ADMISSION_STAGES = ("submit", "plan", "read")


def make_scheduler(rows: int, pages: int, budget: int, granularity: int) -> Any:
    """An empty scheduler with device pages only."""
    config = tokenspeed.SchedulerConfig()
    config.max_scheduled_tokens, config.max_batch_size = budget, rows
    config.num_device_pages, config.disable_l2_cache = pages, True
    if IS_OLD:
        config.page_size = PAGE_SIZE
    else:
        config.prefix_granularity = granularity
        config.num_snapshot_pages = config.num_host_pages = 1
        group = tokenspeed.CacheGroupConfig()
        group.group_id, group.block_granularity, group.total_pages = "full", PAGE_SIZE, pages
        group.attn_kind = tokenspeed.AttnKind.Full
        config.cache_groups = [group]
    return tokenspeed.Scheduler(config)


def read_step(batch: Any) -> tuple[Any, ...]:
    """What a runtime needs of a step of decode rows that have their input token on the device already."""
    columns = (batch.request_ids, batch.request_pool_indices, batch.input_lengths, batch.num_extends())
    if IS_OLD:
        return *columns, batch.begins, batch.sizes, batch.new_occupied_pages
    return *columns, batch.block_tables_arrays()


def read_admission(batch: Any) -> tuple[Any, ...]:
    """The same of a step with a prompt: its tokens and its whole row, too."""
    columns = (batch.request_ids, batch.request_pool_indices, batch.input_lengths, batch.num_extends())
    inputs = (batch.input_ids, batch.extend_prefix_lens)
    if IS_OLD:
        return *columns, *inputs, batch.begins, batch.sizes, batch.occupied_pages
    return *columns, *inputs, batch.block_tables_arrays()


class TokenSpeed:
    """State between the parent's requests."""

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._scheduler: Any = None
        self._events: dict[str, Any] = {}
        self._rows = 0
        self._number = 0

    def rows(self, rows: int, context: int, steps: int) -> Answer:
        """Set a decode line up, for so many timed steps."""
        self._scheduler = None
        self._events.clear()
        gc.collect()
        room = steps + WARM_UP + 8
        pages = num_pages(rows, context, room + self._granularity)
        scheduler = make_scheduler(rows, pages, rows * context, self._granularity)
        scheduler.submit_requests([self._spec(str(row), prompt_of_row(row, context), room) for row in range(rows)])
        self._scheduler, self._rows = scheduler, rows
        while scheduler.decoding_size() < rows:
            batches = scheduler.next_execution_plan().forward
            if not batches or not batches[0].request_ids:
                raise RuntimeError(f"{rows} rows of {context} tokens do not fit into its pool")
            batch = batches[0]
            ids, num_extends = batch.request_ids, batch.num_extends()
            lengths = zip(batch.extend_prefix_lens, batch.input_lengths, batch.prefill_lengths, strict=False)
            is_whole = [prefix + new >= whole for prefix, new, whole in lengths][:num_extends]
            is_whole += [True] * (len(ids) - len(is_whole))
            self._advance([name for name, sampled in zip(ids, is_whole, strict=True) if sampled])
        self.steps(WARM_UP)
        return {}

    def steps(self, count: int) -> Answer:
        """Time so many steps."""
        samples = []
        for _ in range(count):
            begin = perf_counter_ns()
            plan = self._scheduler.next_execution_plan()
            planned = perf_counter_ns()
            columns = read_step(plan.forward[0])
            read = perf_counter_ns()
            self._advance(columns[0])
            advanced = perf_counter_ns()
            if len(columns[0]) != self._rows or columns[3]:
                raise RuntimeError(f"a step of {self._rows} decode rows was to be planned, not one of {len(columns[0])}")
            samples.append([planned - begin, read - planned, advanced - read])
        return {stage: list(times) for stage, times in zip(STEP_STAGES, zip(*samples, strict=True), strict=True)}

    def idle(self, prompts: int) -> Answer:
        """Set an admission line up: nothing runs, and the pool holds so many prompts."""
        self._scheduler = None
        self._events.clear()
        gc.collect()
        self._scheduler = make_scheduler(64, pages_for_prompts(prompts), 8192, self._granularity)
        for cached in (False, True):
            self.admit(cached, WARM_UP)
        return {}

    def admit(self, cached: bool, count: int) -> Answer:
        """Time so many admissions, one after the other; `cached`: of prompts that were here once, untimed, before."""
        samples = []
        for _ in range(count):
            self._number += 1
            prompt = prompt_to_admit(self._number)
            if cached:
                self._admit(f"first-{self._number}", prompt)
            times, found = self._admit(str(self._number), prompt)
            if (found >= PROMPT_TOKENS - self._granularity) != cached:
                raise RuntimeError(f"an admission with cached={cached} had {found} cached tokens")
            samples.append(times)
        names = (*ADMISSION_STAGES, "leave")
        return {stage: list(times) for stage, times in zip(names, zip(*samples, strict=True), strict=True)}

    def _admit(self, name: str, prompt: Any) -> tuple[list[int], int]:
        scheduler = self._scheduler
        begin = perf_counter_ns()
        scheduler.submit_requests([self._spec(name, prompt, 1)])
        submitted = perf_counter_ns()
        plan = scheduler.next_execution_plan()
        planned = perf_counter_ns()
        columns = read_admission(plan.forward[0])
        read = perf_counter_ns()
        self._advance([name], ends=True)
        scheduler.next_execution_plan()  # gives the request's pages back
        left = perf_counter_ns()
        if columns[0] != [name]:
            raise RuntimeError(f"a step of one prompt was to be planned, not one of {columns[0]}")
        self._events.clear()
        return [submitted - begin, planned - submitted, read - planned, left - read], columns[5][0]

    def _spec(self, name: str, prompt: Any, max_new_tokens: int) -> Any:
        spec = tokenspeed.RequestSpec()
        spec.request_id, spec.tokens = name, prompt.tolist()
        if not IS_OLD:
            spec.max_new_tokens = max_new_tokens
        return spec

    def _advance(self, names: list[str], *, ends: bool = False) -> None:
        """One token for each of these requests."""
        event, kept = tokenspeed.ExecutionEvent(), self._events
        for name in names:
            result = kept.get(name)
            if result is None:
                result = kept[name] = tokenspeed.ForwardEvent.ExtendResult()
                result.request_id = name
            result.tokens = [7]
            event.add_event(result)
            if ends:
                finish = tokenspeed.ForwardEvent.Finish()
                finish.request_id = name
                event.add_event(finish)
        self._scheduler.advance(event)


def main() -> None:
    peer = TokenSpeed(int(sys.argv[1]))
    serve({"rows": peer.rows, "steps": peer.steps, "idle": peer.idle, "admit": peer.admit})


if __name__ == "__main__":
    main()
