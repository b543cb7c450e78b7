"""What can go wrong, drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from _soak_ledger import STEP_FAILS
from _soak_proxy import Line
from _soak_services import Service

from scheduler_service.client import Client, RpcFailedError

KINDS = (
    "runtime_kill",
    "runtime_stop",
    STEP_FAILS,
    "runtime_slow",
    "runtime_cut",
    "runtime_cut_mid_message",
    "runtime_stall",
    "runtime_half_open",
    "scheduler_kill",
    "scheduler_stop",
    "client_cut",
    "client_stall",
    "client_half_open",
    "client_kill",
    "cache_reset",
    "rows",
)
FIRST = ("runtime_kill", "runtime_stop", STEP_FAILS, "runtime_cut", "scheduler_kill", "client_cut", "client_kill")

Fault = Callable[[], Awaitable[bool]]


class Clients(Protocol):
    """What a fault needs of the client processes."""

    lines: list[Line]
    cuts: list[tuple[int, float, float]]

    def restart(self, number: int) -> None: ...


@dataclass
class Faults:
    """Injects one fault after another. A deck of all kinds is shuffled and dealt, then again: each comes about as often."""

    rng: random.Random
    pace_s: float
    """Mean time between two faults."""
    scheduler: Service
    runtimes: list[Service]
    """Of each rank one."""
    clients: Clients
    control: str
    """Where the scheduler is reached beside the lines that are cut."""
    only: frozenset[str] = frozenset()
    """Kinds to choose from; empty: all."""
    counts: Counter[str] = field(default_factory=Counter)
    rows_compared: int = 0
    findings: list[str] = field(default_factory=list)
    of_runtimes: list[tuple[str, float, float]] = field(default_factory=list)
    """What was done to a runtime or to the line to it, from when to when."""
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def kinds(self) -> dict[str, Fault]:
        """The faults by their names; each says whether there was anything to do it to."""
        kinds = {
            "runtime_kill": self._kill(self._any_runtime),
            "runtime_stop": self._stop(self._any_runtime, 0.2, 5.0),
            STEP_FAILS: self._fail_step,
            "runtime_slow": self._slow_steps,
            "runtime_cut": self._cut_runtime,
            "runtime_cut_mid_message": self._cut_runtime_mid_message,
            "runtime_stall": self._stall_runtime,
            "runtime_half_open": self._half_open_runtime,
            "scheduler_kill": self._kill(lambda: self.scheduler),
            "scheduler_stop": self._stop(lambda: self.scheduler, 0.2, 3.0),
            "client_cut": self._cut_client,
            "client_stall": self._stall_client,
            "client_half_open": self._half_open_client,
            "client_kill": self._kill_client,
            "cache_reset": self._reset_cache,
            "rows": self._compare_rows,
        }
        return {name: fault for name, fault in kinds.items() if not self.only or name in self.only}

    async def run(self, seconds: float) -> None:
        """Inject for so long, then undo what lasts."""
        kinds = self.kinds()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for number in itertools.count():
                    deck = list(kinds)
                    self.rng.shuffle(deck)
                    if number == 0:
                        # Also a short run, or one on a slow machine, has seen what matters most.
                        deck.sort(key=lambda name: name not in FIRST)
                    for name in deck:
                        await asyncio.sleep(self.rng.expovariate(1 / self.pace_s))
                        await self._inject(name, kinds[name])
        await asyncio.gather(*self._running)

    async def _inject(self, name: str, fault: Fault) -> None:
        async def one() -> None:
            began, done = time.monotonic(), False
            with contextlib.suppress(ProcessLookupError, OSError):
                done = await fault()
            self.counts[name] += done
            if done and name.startswith("runtime") and name != "runtime_slow":
                self.of_runtimes.append((name, began, time.monotonic()))

        task = asyncio.create_task(one())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if self.rng.random() < 0.5:
            # The next one meets a system that has got over this one; otherwise they overlap.
            await asyncio.shield(task)
            for service in (self.scheduler, *self.runtimes):
                await service.ready.wait()

    # --- processes --------------------------------------------------------------------------------------------------------

    def _kill(self, choose: Callable[[], Service]) -> Fault:
        async def kill() -> bool:
            service = choose()
            await service.ready.wait()
            return service.kill()

        return kill

    def _stop(self, choose: Callable[[], Service], shortest_s: float, longest_s: float) -> Fault:
        async def stop() -> bool:
            service = choose()
            await service.ready.wait()
            if service.is_stopped:
                return False
            await service.stop_for(self.rng.uniform(shortest_s, longest_s))
            return True

        return stop

    async def _fail_step(self) -> bool:
        runtime = self._any_runtime()
        await runtime.ready.wait()
        return runtime.order("fail")

    async def _slow_steps(self) -> bool:
        runtime = self._any_runtime()
        await runtime.ready.wait()
        seconds = self.rng.uniform(0.2, 2.0)
        done = runtime.order(f"slow {self.rng.uniform(0.01, 0.2):.3f} {seconds:.3f}")
        await asyncio.sleep(seconds)
        return done

    def _any_runtime(self) -> Service:
        return self.rng.choice(self.runtimes)

    async def _kill_client(self) -> bool:
        self.clients.restart(self._any_client())
        return True

    def _any_client(self) -> int:
        return self.rng.randrange(len(self.clients.lines))

    # --- lines ------------------------------------------------------------------------------------------------------------

    async def _cut_runtime(self) -> bool:
        return self._any_runtime().line.cut() > 0

    async def _cut_runtime_mid_message(self) -> bool:
        self._any_runtime().line.cut_after(self.rng.randint(1, 2000))
        return True

    async def _stall_runtime(self) -> bool:
        await self._any_runtime().line.stall(self.rng.uniform(0.1, 4.0))
        return True

    async def _half_open_runtime(self) -> bool:
        await self._any_runtime().line.leave_half_open(self.rng.uniform(0.5, 5.0))
        return True

    async def _cut_client(self) -> bool:
        number = self._any_client()
        self._note_cut(number, 0)
        return self.clients.lines[number].cut() > 0

    async def _stall_client(self) -> bool:
        await self.clients.lines[self._any_client()].stall(self.rng.uniform(0.1, 4.0))
        return True

    async def _half_open_client(self) -> bool:
        number, seconds = self._any_client(), self.rng.uniform(0.5, 3.0)
        self._note_cut(number, seconds)
        await self.clients.lines[number].leave_half_open(seconds)
        return True

    def _note_cut(self, number: int, seconds: float) -> None:
        now = time.monotonic()
        self.clients.cuts.append((number, now, now + seconds))

    # --- calls ------------------------------------------------------------------------------------------------------------

    async def _reset_cache(self) -> bool:
        """Forced: it retracts everybody."""
        with contextlib.suppress(RpcFailedError, TimeoutError):
            async with asyncio.timeout(10), Client(self.control) as client:
                await client.reset_prefix_cache(force=True)
                return True
        return False

    async def _compare_rows(self) -> bool:
        """No fault: the two sides' rows beside each other, under load."""
        with contextlib.suppress(RpcFailedError, TimeoutError):
            async with asyncio.timeout(30), Client(self.control) as client:
                found = await client.rows()
                self.rows_compared += len(found.rows)
                self.findings += [f"session {found.session_no} step {found.step}: {row}" for row in found.rows if not row.equal]
                return True
        return False
