"""The scheduler's side of the two-process parts of `bench_wire.py`: a peer process, a session with it, a core to drive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter

import numpy as np
from _wire_peers import MAX_PAGES_PER_ROW, MAX_ROWS, NUM_PAGES, PAGE_SIZE, VOCAB_SIZE

from scheduler_service.agreement import ExpectedShape
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.ops import StepResult
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.errors import RuntimeLinkError
from scheduler_service.runtime_client import LinkLimits, RuntimeLink, open_link
from scheduler_service.wire import StepRefusal

PEERS = Path(__file__).resolve().parent / "_wire_peers.py"
LIMIT_S = 60.0
LIMITS = (PAGE_SIZE, NUM_PAGES, MAX_ROWS, MAX_PAGES_PER_ROW, VOCAB_SIZE)


@contextlib.asynccontextmanager
async def peer(folder: Path, what: str, number: float) -> AsyncIterator[str]:
    """A process of `_wire_peers.py`; gives its address."""
    socket = folder / f"{what}-{number:g}.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEERS), what, str(socket), f"{number:g}", env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    )
    try:
        yield f"unix:{socket}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def connect(target: str, overlap_depth: int, wake: asyncio.Event, session_no: int) -> RuntimeLink:
    """A session with the runtime, once it is ready."""
    deadline = perf_counter() + LIMIT_S
    while True:
        try:
            link, _ = await open_link(
                target,
                scheduler_epoch=os.getpid(),
                session_no=session_no,
                overlap_depth=overlap_depth,
                expected=ExpectedShape(),
                limits=LinkLimits(),
                wake=wake.set,
            )
        except RuntimeLinkError:
            if perf_counter() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return link


def decoding_scheduler(num_rows: int, overlap_depth: int, session_no: int, prompt_len: int = 64) -> Scheduler:
    """A core with that many requests, none of which ends while anybody measures.

    Prompts differ in length by up to a page, so that each step has rows that need a page.
    """
    config = SchedulerConfig(*LIMITS, token_budget=num_rows * prompt_len, overlap_depth=overlap_depth, prefix_cache=False)
    scheduler = Scheduler(config, session_no=session_no)
    for number in range(num_rows):
        prompt = np.arange(prompt_len - number % PAGE_SIZE, dtype=np.int32)
        scheduler.submit(str(number), prompt, max_tokens=4096)
    return scheduler


async def next_outcome(link: RuntimeLink, wake: asyncio.Event) -> StepResult:
    """The answer to the oldest op; the link's own watch ends the wait for one that does not come."""
    while not link.answers:
        if link.broken is not None:
            raise link.broken
        wake.clear()
        await wake.wait()
    outcome = link.answers.popleft().outcome
    if isinstance(outcome, StepRefusal):
        raise SystemExit(f"the runtime refused a step: {outcome}")
    return outcome
