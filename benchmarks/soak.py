"""Soak test: real processes under random faults, every output exact, no request lost.

A scheduler (with --check: its invariants are audited in every step), a runtime with the fingerprint model, and client processes
that stream generations, share prefixes, abort, retract, vanish, read slowly and send bad requests. Meanwhile, in an order that
the seed decides, processes are killed and stopped, and connections are cut, stalled and left half open. Killed processes are
started again. A client whose scheduler died, or whose own connection was cut, makes its call again; so does one whose request
was in so many failed steps that it had to be taken for their cause. Nothing else may fail.

    python benchmarks/soak.py --minutes 10 --seed 3
    python benchmarks/soak.py --minutes 1 --seed 1 --json | tail -1

Lost is a request without an end, or ended with an error that no fault explains; wrong is an output that is not the model's. At
the end both services must be idle, hold as many files, threads and tasks as at first, and end with status 0. The exit
status is 1 if anything was lost, wrong or found, and then logs are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from _soak_faults import KINDS, Faults
from _soak_ledger import Ledger
from _soak_processes import LAST_CALL_S, ClientProcesses
from _soak_proxy import Line
from _soak_services import Service

from scheduler_service.client import Client
from scheduler_service.up import socket_base

PROGRESS_S = 5.0
PAGE_SIZE = 4
LONGEST_PAGES = 64
"""Of one row: prompt and output of the longest request have 150 tokens."""


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self.folder = folder
        control = f"unix:{folder}/s.sock"
        pool = ("--page-size", str(PAGE_SIZE), "--num-pages", str(options.pages), "--max-rows", str(options.rows))
        model = ("--model", "fingerprint", *pool, "--max-pages-per-row", str(LONGEST_PAGES))
        names = ["runtime"] if options.ranks == 1 else [f"runtime_{rank}" for rank in range(options.ranks)]
        self.runtimes = [
            Service(name, "runtime", ["--listen", f"unix:{folder}/{name}.sock", *model], folder, Line(f"{folder}/{name}.sock"))
            for name in names
        ]
        addresses = ("--runtime", ",".join(f"unix:{folder}/{name}.link" for name in names), "--listen", control)
        limits = ("--heartbeat-timeout", "2.5", "--step-timeout", "20", "--max-waiting", "0", "--runtime-timeout", "100")
        sizes = ("--token-budget", "96", "--chunk-size", "24", "--overlap-depth", str(options.overlap_depth))
        checks = ("--check", "--dump-dir", str(folder), "--verify", options.verify)
        self.scheduler = Service(
            "scheduler", "scheduler", [*addresses, *limits, *sizes, *checks], folder, Line(f"{folder}/s.sock"), self._use_once
        )
        self.ledger = Ledger()
        self.clients = ClientProcesses(options.clients, options.seed, f"{folder}/s.sock", self.ledger)
        rng = random.Random(options.seed)
        self.faults = Faults(rng, options.pace, self.scheduler, self.runtimes, self.clients, control, options.only)
        self._control = control
        self._findings: list[str] = []
        self._client_memory_mib = 0.0

    async def run(self) -> dict[str, Any]:
        """Everything; the summary."""
        began = time.monotonic()
        async with self._running():
            loaded = time.monotonic()
            progress = asyncio.create_task(self._tell_progress(loaded))
            await self.faults.run(self._options.minutes * 60)
            self._client_memory_mib = self.clients.memory_mib()
            self._findings += await self.clients.finish()
            progress.cancel()
            load_seconds = time.monotonic() - loaded
            self.ledger.close(self.scheduler.outages, self.clients.cuts, self.faults.of_runtimes)
            usage = await self._come_to_rest()
        return self._summary(usage, load_seconds, time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        for runtime in self.runtimes:
            await runtime.line.listen_on_path(f"{self.folder}/{runtime.name}.link")
        services = [asyncio.create_task(service.run()) for service in (*self.runtimes, self.scheduler)]
        try:
            await self.clients.start(self.folder / "clients.log", self.scheduler.line.gate)
            async with asyncio.timeout(180):
                for service in (*self.runtimes, self.scheduler):
                    await service.ready.wait()
            yield
        finally:
            await self.clients.close()
            for runtime in self.runtimes:
                runtime.line.close()
            for task in services:
                task.cancel()
            await asyncio.gather(*services, return_exceptions=True)
            for service in (self.scheduler, *self.runtimes):
                if service.process is not None and service.process.returncode is None:
                    service.process.kill()
                    await service.process.wait()

    async def _use_once(self) -> None:
        """One request of our own, so that what is made on first use is part of the baseline."""
        async with Client(self._control) as client:
            await client.info()
            async for _ in client.generate([1, 2, 3], max_tokens=3, cache_namespace="warm-up"):
                pass

    async def _come_to_rest(self) -> dict[str, Any]:
        """With the clients gone: nothing runs, all pages are there, nothing is left open, both end when told to."""
        await self.scheduler.ready.wait()
        async with asyncio.timeout(LAST_CALL_S), Client(self._control) as client:
            while True:
                info = (await client.info()).raw
                live = (info.num_waiting, info.num_running, info.num_retracted)
                if live == (0, 0, 0):
                    break
                await asyncio.sleep(0.1)
            rows = await client.rows()
        if info.free_pages + info.cached_pages != info.num_pages:
            self._findings.append(f"{info.free_pages} free and {info.cached_pages} cached pages are not all {info.num_pages}")
        if rows.rows:
            self._findings.append(f"rows at rest: {rows.rows}")
        found: dict[str, Any] = {}
        for service in (self.scheduler, *self.runtimes):
            usage = await service.check_rest()
            await service.end()
            numbers = {"at_first": _numbers(service.baseline), "at_rest": _numbers(usage)}
            found[service.name] = {"lives": service.num_lives, **numbers}
            self._findings += service.read_log(r"violation:|.{0,60}(digest_mismatch|digests_differ)")
        return found

    async def _tell_progress(self, began: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            faults = sum(self.faults.counts.values())
            print(
                f"soak: {time.monotonic() - began:4.0f} s, {self.ledger.num_requests} requests finished, {faults} faults,"
                f" {self.ledger.outcomes['unavailable'] + self.ledger.outcomes['internal']} calls to be made again,"
                f" {len(self.ledger.lost)} lost, {len(self.ledger.wrong)} wrong",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _summary(self, usage: dict[str, Any], load_seconds: float, seconds: float) -> dict[str, Any]:
        findings = self._findings + self.faults.findings
        for service in (self.scheduler, *self.runtimes):
            findings += service.findings
        outcomes = self.ledger.outcomes
        return {
            "seed": self._options.seed,
            "seconds": round(seconds, 1),
            "load_seconds": round(load_seconds, 1),
            "clients": self._options.clients,
            "client_memory_mib": self._client_memory_mib,
            "faults": {name: self.faults.counts[name] for name in self.faults.kinds()} | dict(self.ledger.deliberate),
            "rows_compared": self.faults.rows_compared,
            "calls": self.ledger.num_calls,
            "requests_finished": self.ledger.num_requests,
            "retractions": self.ledger.retractions,
            "cached_tokens": self.ledger.cached_tokens,
            "outcomes": dict(sorted(outcomes.items())),
            "suspects_ended": len(self.scheduler.read_log(r".{0,60}suspect_ended")),
            "services": usage,
            "findings": findings,
            "lost_requests": self.ledger.lost[:20],
            "wrong_outputs": self.ledger.wrong[:20],
            "lost": len(self.ledger.lost),
            "wrong": len(self.ledger.wrong),
        }


def _numbers(usage: Any) -> dict[str, float]:
    return {name: getattr(usage, name) for name in ("files", "threads", "tasks", "rss_mib")} if usage else {}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults are injected (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="decides faults and requests; not the moment they meet (default 1)")
    parser.add_argument("--clients", type=int, default=40, help="client processes (default 40)")
    parser.add_argument("--rows", type=int, default=16, help="requests that can run at once (default 16)")
    parser.add_argument("--pages", type=int, default=200, help=f"pages of {PAGE_SIZE} tokens in the pool (default 200)")
    parser.add_argument("--ranks", type=int, default=1, help="runtimes that receive the same ops (default 1)")
    parser.add_argument("--overlap-depth", type=int, default=2, choices=(0, 1, 2), help="steps planned ahead (default 2)")
    parser.add_argument("--verify", default="sample", choices=("off", "sample", "every"), help="as of the scheduler (sample)")
    parser.add_argument("--pace", type=float, default=0.7, help="mean seconds between two faults (default 0.7)")
    parser.add_argument(
        "--only", type=lambda text: frozenset(text.split(",")), default=frozenset(), help=f"faults, of {', '.join(KINDS)}"
    )
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder, whatever the result")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object on the last line of stdout")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.clients < 1 or options.rows < 1 or options.pace <= 0:
        parser.error("--minutes, --clients, --rows and --pace must be above 0")
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    if unknown := options.only - set(KINDS):
        parser.error(f"--only: there is no fault {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if options.pages < LONGEST_PAGES:
        parser.error(f"--pages must be at least {LONGEST_PAGES}: the longest request needs as many")
    return options


def show(summary: dict[str, Any]) -> None:
    """The summary for people."""
    for name, value in summary.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(f"  {key:<24} {entry}")
        elif isinstance(value, list):
            print(f"{name}: {'none' if not value else ''}")
            for entry in value:
                print(f"  {entry}")
        else:
            print(f"{name:<26} {value}")


def main() -> int:
    options = parse()
    folder = Path(tempfile.mkdtemp(prefix="pm-soak-", dir=socket_base()))
    bad = True
    try:
        summary = asyncio.run(Soak(options, folder).run())
        bad = bool(summary["lost"] or summary["wrong"] or summary["findings"])
        if options.json:
            print(json.dumps(summary))
        else:
            show(summary)
    finally:
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            for log in (*folder.glob("*.log"), *folder.glob("*.yaml")):
                shutil.copy(log, options.logs)
        if bad:
            print(f"soak: logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
