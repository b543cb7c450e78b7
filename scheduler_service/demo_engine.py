"""What the demonstration runs on: the scheduler core in this process, a runtime in another, gRPC between them.

The served scheduler hides its steps; here one step is one call, so that rows can be compared after each.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scheduler_service.agreement import ExpectedShape
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.intake import Outputs
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.errors import RuntimeLinkError
from scheduler_service.runtime_client import LinkLimits, RuntimeLink, open_link
from scheduler_service.wire import StepRefusal
from scheduler_service.wire_facts import RuntimeFacts

START_TIMEOUT_S = 120.0
_LIMITS = LinkLimits(heartbeat_timeout_s=30.0)


class DemoError(PagemirrorError):
    """The demonstration cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class RowView:
    """One request's row after a step: the scheduler's pages and what the mirror holds."""

    request: Request
    scheduler: list[int]
    mirror: list[int]

    @property
    def equal(self) -> bool:
        return self.scheduler == self.mirror


@dataclass(frozen=True, slots=True)
class StepView:
    """What one step was, and the rows after it ran (before requests that ended gave theirs back)."""

    op: ForwardOp
    rows: list[RowView]
    outputs: Outputs


class RuntimeProcess:
    """A runtime of our own: started, found ready, and ended with us."""

    def __init__(self, process: asyncio.subprocess.Process, target: str, log: Path) -> None:
        self.process = process
        self.target = target
        self._log = log
        self._session_no = 0
        self._epoch = secrets.randbits(63) + 1

    async def session(self, wake: Callable[[], None]) -> tuple[RuntimeLink, RuntimeFacts]:
        """Open a new session, waiting until the runtime is ready. Raises DemoError if it ends first or takes too long."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            self._session_no += 1
            try:
                return await open_link(
                    self.target,
                    scheduler_epoch=self._epoch,
                    session_no=self._session_no,
                    overlap_depth=0,
                    expected=ExpectedShape(),
                    limits=_LIMITS,
                    wake=wake,
                )
            except RuntimeLinkError as error:
                if self.process.returncode is not None:
                    last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
                    raise DemoError("the runtime ended while starting:\n" + "\n".join(last)) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise DemoError(f"the runtime was not ready within {START_TIMEOUT_S:g} s: {error}") from error
                await asyncio.sleep(0.05)

    @property
    def session_no(self) -> int:
        return self._session_no


@asynccontextmanager
async def runtime_process(folder: Path, name: str, *arguments: str) -> AsyncIterator[RuntimeProcess]:
    """A runtime on a unix socket in `folder`; it is ended when the context is left."""
    socket, log = folder / f"{name}.sock", folder / f"{name}.log"
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "runtime_service", "--listen", f"unix:{socket}", *arguments,
            "--exit-with-parent", str(os.getpid()),
            env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield RuntimeProcess(process, f"unix:{socket}", log)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


class SteppedEngine:
    """A scheduler core and a session with a runtime, advanced one step at a time."""

    def __init__(self, scheduler: Scheduler, link: RuntimeLink, facts: RuntimeFacts, wake: asyncio.Event) -> None:
        self.scheduler = scheduler
        self.facts = facts
        self._link = link
        self._wake = wake

    async def step(self) -> StepView | None:
        """Plan, send, wait for the result, and compare every row with the mirror's; None when nothing was planned."""
        scheduler = self.scheduler
        op = scheduler.plan()
        if op is None:
            return None
        self._link.send(op)
        outcome = await self._answer()
        if isinstance(outcome, StepRefusal):
            raise DemoError(f"the runtime refused step {op.step}: {outcome}")
        rows = await self._compare()
        scheduler.complete(outcome)
        return StepView(op, rows, scheduler.take_outputs())

    async def _answer(self) -> StepResult | StepRefusal:
        while not self._link.answers:
            if self._link.broken is not None:
                raise DemoError(f"the runtime was lost: {self._link.broken}")
            self._wake.clear()
            await self._wake.wait()
        return self._link.answers.popleft().outcome

    async def _compare(self) -> list[RowView]:
        rows = self.scheduler.rows()
        mirror = await self._link.read_rows(sorted(rows), timeout_s=30)
        if mirror.last_step != self.scheduler.last_step:
            raise DemoError(f"the mirror was read at step {mirror.last_step}, the scheduler is at {self.scheduler.last_step}")
        views: list[RowView] = []
        for row, (request, pages) in rows.items():
            views.append(RowView(request, pages.tolist(), mirror.pages[row].tolist()))
        return views


@asynccontextmanager
async def stepped_engine(
    runtime: RuntimeProcess,
    policy: RefreshPolicy,
    *,
    num_pages: int | None = None,
    token_budget: int = 2048,
    chunk_size: int = 512,
) -> AsyncIterator[SteppedEngine]:
    """A fresh scheduler on a fresh session. `num_pages` grants fewer pages than the runtime has."""
    wake = asyncio.Event()
    link, facts = await runtime.session(wake.set)
    try:
        config = SchedulerConfig(
            page_size=facts.page_size,
            num_pages=min(num_pages or facts.num_pages, facts.num_pages),
            max_rows=facts.max_rows,
            max_pages_per_row=facts.max_pages_per_row,
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            token_budget=token_budget,
            chunk_size=chunk_size,
            refresh_policy=policy,
            overlap_depth=0,
        )
        yield SteppedEngine(Scheduler(config, session_no=runtime.session_no), link, facts, wake)
    finally:
        await link.close()
