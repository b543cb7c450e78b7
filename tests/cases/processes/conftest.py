"""Both services as processes, and asking for what they do."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.channels import CLIENT_OPTIONS
from scheduler_service.client import Client

LIMIT_S = 60.0
VOCAB_SIZE = 997
NO_PROXY_AT_ALL = "http://127.0.0.1:9"  # nobody listens on the discard port
QUICK = ("--page-size", "4", "--heartbeat-interval-s", "0.2", "--grace-s", "0.5")
RUNTIME = ("runtime_service", "--listen", "127.0.0.1:0", *QUICK)
SCHEDULER = ("scheduler_service.cli", "scheduler", "--listen", "127.0.0.1:0")


def i32(*values: int) -> bytes:
    """Values as an int32 column."""
    return np.array(values, "<i4").tobytes()


@dataclass
class Process:
    """One process of ours; `address` is where it said that it serves."""

    popen: subprocess.Popen[bytes]
    errors: Path
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log(self) -> str:
        """Its stderr so far."""
        return self.errors.read_text()

    def num_handles(self) -> tuple[int, int]:
        """Open file descriptors and threads."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return len(os.listdir(f"/proc/{self.pid}/fd")), int(status.partition("Threads:")[2].split()[0])

    def resident_mib(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

    async def end(self) -> int:
        """Its exit status."""
        await until(lambda: self.popen.poll() is not None)
        return self.popen.returncode


class Spawner:
    """Starts processes and kills what is left of them."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.env = env
        self._folder = folder
        self._started: list[Process] = []

    def start(self, *module_and_arguments: str, env: dict[str, str] | None = None) -> Process:
        """Start `python -m …` without waiting."""
        errors = self._folder / f"stderr-{len(self._started)}"
        with errors.open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", *module_and_arguments],
                env=self.env | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(Process(popen, errors))
        return self._started[-1]

    def ready(self, process: Process) -> Process:
        """Wait for its readiness line."""
        assert process.popen.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.popen.stdout, selectors.EVENT_READ)
            assert selector.select(LIMIT_S), f"not ready: {process.log()}"
        line = process.popen.stdout.readline().decode()
        match = re.match(r"pagemirror (?:runtime )?ready on (\S+) ", line)
        assert match, f"{line!r} is no readiness line; stderr: {process.log()}"
        process.address = match[1]
        return process

    def serve(self, *module_and_arguments: str, env: dict[str, str] | None = None) -> Process:
        """Start and wait for the readiness line."""
        return self.ready(self.start(*module_and_arguments, env=env))

    def close(self) -> None:
        """Kill what is left."""
        for process in self._started:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.kill()
            process.popen.wait()
            assert process.popen.stdout is not None
            process.popen.stdout.close()


@dataclass
class Pair:
    """Both services as processes over TCP, with proxy variables in their environment that lead nowhere."""

    runtime: Process
    scheduler: Process
    metrics_port: int
    num_pages: int
    max_unread: int


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], limit_s: float = LIMIT_S) -> None:
    """Ask again and again until it is so."""
    async with asyncio.timeout(limit_s):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.03)


class Harness:
    """What the process cases share."""

    limit_s = LIMIT_S
    runtime_command, scheduler_command, quick = RUNTIME, SCHEDULER, QUICK
    dead_proxy = NO_PROXY_AT_ALL
    until, i32 = staticmethod(until), staticmethod(i32)

    @staticmethod
    async def generate(client: Client, prompt: list[int], count: int, **options: Any) -> list[int]:
        """One request of a client, start to end."""
        tokens: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            async for piece in client.generate(prompt, max_tokens=count, **options):
                tokens += piece.tokens
        return tokens

    @staticmethod
    async def idle(client: Client) -> bool:
        """Whether no request is alive."""
        info = (await client.info()).raw
        return (info.num_waiting, info.num_running, info.num_retracted) == (0, 0, 0)

    @staticmethod
    async def health(target: str) -> str:
        """What the health service says; the status where it says nothing."""
        async with aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            except aio.AioRpcError as error:
                return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    """Commands, clients, and waiting."""
    return Harness


@pytest.fixture(scope="session")
def spawner(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawner]:
    """Starts processes; what they leave is killed at the end."""
    spawner = Spawner(child_env, tmp_path_factory.mktemp("processes"))
    yield spawner
    spawner.close()


@pytest.fixture(scope="session")
def pair(spawner: Spawner) -> Pair:
    """A runtime and a scheduler that several cases use, each leaving them as they were."""
    names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    proxies = dict.fromkeys(names, NO_PROXY_AT_ALL) | {"no_proxy": "", "NO_PROXY": ""}
    num_pages, max_unread = 2048, 600
    shape = ("--max-rows", "64", "--num-pages", str(num_pages), "--max-pages-per-row", "1024")
    runtime = spawner.serve(*RUNTIME, *shape, env=proxies)
    options = ("--check", "--metrics-port", "0", "--log-json", "--heartbeat-timeout", "30")
    options += ("--max-unread-tokens", str(max_unread))
    scheduler = spawner.serve(*SCHEDULER, "--runtime", runtime.address, *options, env=proxies)
    match = re.search(r'"port": (\d+)', scheduler.log())
    assert match, scheduler.log()
    return Pair(runtime, scheduler, int(match[1]), num_pages, max_unread)


@pytest.fixture(scope="session")
def continuation() -> Callable[[Sequence[int], int], list[int]]:
    """The fingerprint model by its definition, summed up as it goes."""

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        total = sum((i + 1) * (token + 1) for i, token in enumerate(prompt))
        output: list[int] = []
        for length in range(len(prompt), len(prompt) + count):
            output.append(total % VOCAB_SIZE)
            total += (length + 1) * (output[-1] + 1)
        return output

    return tokens
