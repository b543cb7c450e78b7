"""Measure the public streams: tokens a second and the server's CPU time a token, for Generate, Session and a front end.

Two tables. "stream": a server with no engine behind it, so that the stream is all there is. "served": a scheduler with the
exact test model behind it, as processes; its CPU time includes planning, and the time of a step includes the model's. Kinds are
interleaved, and medians of the rounds are reported: only ratios within one run count. `--json FILE` writes

    {"streams": ..., "rounds": ..., "stream": {kind: {...}}, "served": {kind: {"tokens_per_s", "server_us_per_token", ...}}}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from pagemirror.v1 import generation_pb2
from scheduler_service.client import Client
from scheduler_service.columns import int32_to_bytes
from scheduler_service.session_client import Session

FOLDER = Path(__file__).resolve().parent
FRONT_CLIENTS = 16  # connections, which the kernel spreads over the workers

Run = Callable[[str], Awaitable[int]]


@contextlib.asynccontextmanager
async def process(*command: str) -> AsyncIterator[tuple[int, str]]:
    """Start a process and wait for the line that says where it serves; its id and address."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", *command), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        line = (await child.stdout.readline()).decode()
        if (match := re.search(r"ready on (\S+)", line)) is None:
            raise SystemExit(f"{command[1]} did not start")
        yield child.pid, match[1]
    finally:
        child.terminate()
        await child.wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Requests:
    """So many requests of so many tokens at a time, by each way; every method returns the tokens that came."""

    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self.num_streams, self.num_tokens = num_streams, num_tokens

    async def generate(self, clients: list[Client], name: str) -> int:
        """A call of Generate each, spread over the clients."""
        counts = await asyncio.gather(*(self._call(clients[n % len(clients)], name, n) for n in range(self.num_streams)))
        return sum(counts)

    async def session(self, client: Client, name: str) -> int:
        """All over one session."""
        session = await Session.open(client.stub)
        total = sum(await asyncio.gather(*(self._member(session, name, n) for n in range(self.num_streams))))
        await session.drain()
        await session.close()
        return total

    def _request(self, name: str, n: int) -> generation_pb2.GenerateRequest:
        prompt = int32_to_bytes([n % 900 + 1, 2, 3])
        return generation_pb2.GenerateRequest(
            request_id=f"{name}-{n}", prompt=prompt, max_tokens=self.num_tokens, prefix_cache=False
        )

    async def _call(self, client: Client, name: str, n: int) -> int:
        return sum([len(message.tokens) // 4 async for message in client.stub.Generate(self._request(name, n))])

    async def _member(self, session: Session, name: str, n: int) -> int:
        output = await session.submit(self._request(name, n))
        count = 0
        while True:
            piece = await output.take()
            count += len(piece.tokens)
            if piece.finished is not None:
                return count


async def raw_session(client: Client) -> int:
    """Read one session to its end, and count."""
    call = client.stub.Session()
    await call.write(generation_pb2.SessionRequest(hello=generation_pb2.SessionHello()))
    count = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        count += len(message.tokens) // 4
    return count


async def measure(pid: int, rounds: int, kinds: dict[str, Run], steps: Callable[[], Awaitable[int]] | None = None) -> Any:
    """Each kind in each round, after one that does not count; medians by kind."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, run in kinds.items():
            first = await steps() if steps else 0
            began, used = time.perf_counter(), cpu_s(pid)
            count = await run(f"{kind}{number}")
            seconds, used = time.perf_counter() - began, cpu_s(pid) - used
            case = {"tokens_per_s": count / seconds, "server_us_per_token": used / count * 1e6}
            if steps:
                case["step_ms"] = seconds / max(1, await steps() - first) * 1e3
            if number:
                found[kind].append(case)
    return {kind: {key: median(case[key] for case in cases) for key in cases[0]} for kind, cases in found.items()}


async def measure_stream(args: argparse.Namespace) -> Any:
    """The streams alone."""
    requests = Requests(args.streams, args.tokens)
    command = (str(FOLDER / "_stream_pump.py"), str(args.streams), str(args.tokens))
    async with process(*command) as (pid, address), Client(address) as client:
        kinds: dict[str, Run] = {
            "Generate": lambda name: requests.generate([client], name),
            "Session": lambda name: raw_session(client),
        }
        return await measure(pid, args.rounds, kinds)


async def measure_served(args: argparse.Namespace) -> Any:
    """A scheduler, a runtime, and a front end of two workers."""
    requests = Requests(args.streams, args.tokens)
    anywhere, rows = ("--listen", "127.0.0.1:0"), ("--max-rows", str(args.streams), "--num-pages", "65536")
    quiet = ("--log-level", "error", "--max-streams", "4096")
    scheduler = ("-m", "scheduler_service.cli", "scheduler", *anywhere, *quiet)
    front_end = ("-m", "scheduler_service.cli", "frontend", *anywhere, *quiet, "--workers", "2")
    async with (
        process("-m", "runtime_service", "--model", "fingerprint", *anywhere, *rows) as (_, runtime),
        process(*scheduler, "--runtime", runtime) as (pid, address),
        process(*front_end, "--scheduler", address) as (_, front),
        contextlib.AsyncExitStack() as stack,
    ):
        client = await stack.enter_async_context(Client(address))
        clients = [await stack.enter_async_context(Client(front)) for _ in range(FRONT_CLIENTS)]
        kinds: dict[str, Run] = {
            "Generate": lambda name: requests.generate([client], name),
            "front end": lambda name: requests.generate(clients, name),
            "Session": lambda name: requests.session(client, name),
        }

        async def steps() -> int:
            return (await client.info()).raw.num_steps

        return await measure(pid, args.rounds, kinds, steps)


def show(title: str, cases: dict[str, dict[str, float]]) -> None:
    """One table; ratios are to Generate."""
    base = cases["Generate"]
    step = f"{'step ms':>9}" if "step_ms" in base else ""
    print(f"\n{title:<12}{'tokens/s':>12}{'×':>8}{'µs/token':>10}{'of':>8}{step}")
    for kind, case in cases.items():
        rate, cost = (case[key] / base[key] for key in ("tokens_per_s", "server_us_per_token"))
        step = f"{case['step_ms']:>9.2f}" if "step_ms" in case else ""
        print(f"{kind:<12}{case['tokens_per_s']:>12,.0f}{rate:>8.1f}{case['server_us_per_token']:>10.2f}{cost:>8.3f}{step}")


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "stream": await measure_stream(args),
        "served": await measure_served(args),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the public streams.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    report = asyncio.run(bench(args))
    print(f"{args.streams} streams of {args.tokens} tokens, medians of {args.rounds} rounds; µs: CPU time of the server")
    show("stream", report["stream"])
    show("served", report["served"])
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
