"""A scheduler nobody here wrote: tokenspeed-scheduler, old (0.1.0) or new (0.1.42), under random requests.

As a script it runs one seed after the other in the environment it is started with, and writes what was planned as JSON lines;
that is how the version that is not installed beside the tests is driven. Needs nothing but the wheel.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

PAGE_SIZE = 4
NUM_PAGES = 16  # of 17, the first of which is the scheduler's null page
MAX_ROWS = 4
MAX_PAGES_PER_ROW = 8
STEPS = 400
SYSTEM_PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20])
ALPHABET = range(100, 104)
GROUP = "full"

_COLUMNS = ("request_ids", "request_pool_indices", "input_lengths", "extend_prefix_lens", "prefill_lengths", "input_ids")
_OLD_COLUMNS = ("occupied_pages", "begins", "sizes")


@dataclass
class Driver:
    """One seed. `plan` gives the forward ops of a step, `advance` their tokens; both once a step."""

    tokenspeed: Any
    seed: int
    live: dict[str, int] = field(default_factory=dict)
    """Request id → tokens it is still to return."""
    known: dict[str, list[int]] = field(default_factory=dict)
    """Request id → its prompt and the tokens it was given."""

    def __post_init__(self) -> None:
        self.is_old = hasattr(self.tokenspeed.SchedulerConfig, "page_size")
        self._random = random.Random(self.seed)
        self._scheduler = self._make()

    def plan(self) -> list[Any]:
        """Submit perhaps a request, and plan."""
        draw = self._random
        if len(self.live) < 3 and draw.random() < 0.5:
            spec = self.tokenspeed.RequestSpec()
            spec.request_id = f"r{len(self.known)}"
            spec.tokens = [*draw.choice(SYSTEM_PROMPTS), *(draw.choice(ALPHABET) for _ in range(draw.randint(1, 8)))]
            count = draw.randint(1, 12)
            if not self.is_old:
                spec.max_new_tokens = count
            self.live[spec.request_id] = count
            self.known[spec.request_id] = list(spec.tokens)
            self._scheduler.submit_requests([spec])
        return [batch for batch in self._scheduler.next_execution_plan().forward if batch.request_ids]

    def sampling(self, batch: Any) -> list[bool]:
        """Which rows of a batch sample a token."""
        ends = zip(batch.extend_prefix_lens, batch.input_lengths, batch.prefill_lengths, strict=False)
        whole = [prefix + new >= length for prefix, new, length in ends][: batch.num_extends()]
        return whole + [True] * (len(batch.request_ids) - len(whole))

    def advance(self, batches: Sequence[Any], tokens: Sequence[Sequence[int]] | None = None) -> list[str]:
        """Hand tokens back, one a row that samples (None: drawn from the alphabet); the requests that are over."""
        event, made = self.tokenspeed.ExecutionEvent(), self.tokenspeed.ForwardEvent
        over = []
        for number, batch in enumerate(batches):
            for i, (request_id, samples) in enumerate(zip(batch.request_ids, self.sampling(batch), strict=True)):
                if not samples and self.is_old:
                    continue
                # The newer one wants to hear of every chunk, also of one without a token.
                result = made.ExtendResult()
                result.request_id = request_id
                result.tokens = []
                if samples:
                    drawn = self._random.choice(ALPHABET)
                    result.tokens = [drawn if tokens is None else int(tokens[number][i])]
                    self.known[request_id] += result.tokens
                event.add_event(result)
                if not samples:
                    continue
                self.live[request_id] -= 1
                if not self.live[request_id]:
                    finish = made.Finish()
                    finish.request_id = request_id
                    event.add_event(finish)
                    over.append(request_id)
                    del self.live[request_id]
        self._scheduler.advance(event)
        return over

    def _make(self) -> Any:
        config = self.tokenspeed.SchedulerConfig()
        config.max_scheduled_tokens, config.max_batch_size, config.decode_input_tokens = 8, MAX_ROWS, 1
        config.num_device_pages, config.disable_l2_cache = NUM_PAGES + 1, True
        if self.is_old:
            # State of a recurrent layer beside the KV: prompts are then published during a lease.
            config.page_size, config.enable_mamba = PAGE_SIZE, True
            config.mamba_pool_total_chunks, config.mamba_cache_chunk_size = 64, 4
        else:
            config.prefix_granularity = PAGE_SIZE
            config.num_snapshot_pages = config.num_host_pages = 1
            group = self.tokenspeed.CacheGroupConfig()
            group.group_id, group.block_granularity, group.total_pages = GROUP, PAGE_SIZE, NUM_PAGES + 1
            group.attn_kind = self.tokenspeed.AttnKind.Full
            config.cache_groups = [group]
        return self.tokenspeed.Scheduler(config)


def page_rows(batch: Any) -> list[list[int]]:
    """Each row's pages, as the scheduler has them now."""
    if hasattr(batch, "block_tables_arrays"):
        return [[page for page in row if page >= 0] for row in batch.block_tables_arrays()[GROUP].tolist()]
    return [list(row) for row in batch.occupied_pages]


def _to_json(batch: Any) -> dict[str, Any]:
    plain = {name: list(getattr(batch, name)) for name in _COLUMNS} | {"num_extends": batch.num_extends()}
    if hasattr(batch, "block_tables_arrays"):
        return plain | {"tables": {group: table.tolist() for group, table in batch.block_tables_arrays().items()}}
    return plain | {
        name: [list(row) if isinstance(row, list) else row for row in getattr(batch, name)] for name in _OLD_COLUMNS
    }


def batch_from_json(plain: dict[str, Any]) -> Any:
    """An object with the attributes of the forward op that was written."""
    import numpy as np

    batch = SimpleNamespace(**{name: value for name, value in plain.items() if name not in {"num_extends", "tables"}})
    batch.num_extends = lambda: plain["num_extends"]
    if "tables" in plain:
        batch.block_tables_arrays = lambda: {name: np.array(rows, dtype=np.int32) for name, rows in plain["tables"].items()}
    return batch


def planned(lines: Iterator[str]) -> Iterator[tuple[int, list[Any], list[str]]]:
    """Seed, batches and requests that are over, step by step, of what the script wrote."""
    for line in lines:
        step = json.loads(line)
        yield step["seed"], [batch_from_json(plain) for plain in step["batches"]], step["over"]


def main() -> None:
    import tokenspeed_scheduler

    for seed in range(int(sys.argv[1])):
        driver = Driver(tokenspeed_scheduler, seed)
        for _ in range(STEPS):
            batches = driver.plan()
            plain = [_to_json(batch) for batch in batches]
            over = driver.advance(batches)
            sys.stdout.write(json.dumps({"seed": seed, "batches": plain, "over": over}) + "\n")


if __name__ == "__main__":
    main()
