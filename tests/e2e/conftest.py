"""The installed command as processes of their own, and what the model that they serve must answer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.client import Client

LIMIT_S = 60.0
VOCAB_SIZE = 997
READY = re.compile(r"pagemirror ready on (\S+) \(model (\S+)\)")


@dataclass
class Served:
    """A process that serves, and where."""

    process: asyncio.subprocess.Process
    target: str
    errors: Path

    async def end(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    def children(self) -> dict[str, int]:
        """Process ids of its two children by what they are; none when it has ended."""
        found: dict[str, int] = {}
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return found
        for child in children:
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it has ended meanwhile
            if words == [""]:
                continue  # ended, and not waited for yet
            found["runtime" if "runtime_service" in words else "scheduler"] = int(child)
        return found


class Commands:
    """`pagemirror` commands, and waiting for what they do."""

    LIMIT_S = LIMIT_S

    @staticmethod
    def up(*options: str) -> list[str]:
        """`pagemirror up` on any free port; a busy machine must not look like a dead runtime."""
        return ["up", "--port", "0", "--heartbeat-timeout", "30", *options]

    @staticmethod
    @contextlib.asynccontextmanager
    async def serving(
        command: list[str], env: dict[str, str], errors: Path, ready: re.Pattern[str] = READY
    ) -> AsyncIterator[Served]:
        """Start a command, wait for its readiness line, and kill whatever is left of it at the end."""
        with errors.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                "pagemirror", *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(LIMIT_S):
                line = (await process.stdout.readline()).decode()
            match = ready.match(line)
            assert match, f"{line!r} is no readiness line; stderr: {errors.read_text()}"
            yield Served(process, match[1], errors)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(20):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()

    @staticmethod
    async def run(env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
        """One client command to its end: status, stdout, stderr."""
        process = await asyncio.create_subprocess_exec(
            "pagemirror", *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    @staticmethod
    async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
        """Ask again and again until it is so."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                result = condition()
                if result if isinstance(result, bool) else await result:
                    return
                await asyncio.sleep(0.02)

    @staticmethod
    def is_running(pid: int) -> bool:
        """Whether a process exists and is more than its exit status."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False


@pytest.fixture
def commands() -> type[Commands]:
    """Runs commands of the interpreter under test."""
    return Commands


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary directory whose name is short enough to hold a socket."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def continuation() -> Callable[[list[int], int], list[int]]:
    """The fingerprint model by its definition, summed up as it goes."""

    def tokens(prompt: list[int], count: int) -> list[int]:
        total = sum((i + 1) * (token + 1) for i, token in enumerate(prompt))
        output: list[int] = []
        for length in range(len(prompt), len(prompt) + count):
            token = total % VOCAB_SIZE
            output.append(token)
            total += (length + 1) * (token + 1)
        return output

    return tokens


@pytest.fixture(scope="session")
def soak_parts(project_root: Path) -> Callable[[str], Any]:
    """Modules of benchmarks/, which is no package, by name."""

    def load(name: str) -> Any:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, project_root / "benchmarks" / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[name]

    return load


@dataclass
class Pair:
    """A runtime that can be killed, stopped and told to fail, a line that can be cut, and a scheduler behind it."""

    runtime: Any
    scheduler: Any
    link: Any
    target: str


@pytest.fixture
def pair_of(
    soak_parts: Callable[[str], Any], child_env: dict[str, str], short_tmp: Path
) -> Callable[..., contextlib.AbstractAsyncContextManager[Pair]]:
    """Starts both services as processes; a runtime that dies is started again. Ends both, which must end well."""
    line, services = soak_parts("_soak_proxy").Line, soak_parts("_soak_services")

    @contextlib.asynccontextmanager
    async def start(runtime: list[str], scheduler: list[str]) -> AsyncIterator[Pair]:
        link, front = line(f"{short_tmp}/r.sock"), line(f"{short_tmp}/s.sock")
        await link.listen_on_path(f"{short_tmp}/link.sock")
        ours = ["--listen", f"unix:{short_tmp}/r.sock", "--model", "fingerprint", *runtime]
        theirs = ["--runtime", f"unix:{short_tmp}/link.sock", "--listen", f"unix:{short_tmp}/s.sock", "--check", *scheduler]
        pair = Pair(
            services.Service("runtime", "runtime", ours, short_tmp, link, environment=child_env),
            services.Service("scheduler", "scheduler", theirs, short_tmp, front, environment=child_env),
            link,
            f"unix:{short_tmp}/s.sock",
        )
        lives = [asyncio.create_task(service.run()) for service in (pair.runtime, pair.scheduler)]
        try:
            async with asyncio.timeout(LIMIT_S):
                await pair.scheduler.ready.wait()
            yield pair
            for service in (pair.scheduler, pair.runtime):
                await service.end()
                assert service.findings == [], service.log.read_text()
        finally:
            link.close()
            for task in lives:
                task.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
            for service in (pair.scheduler, pair.runtime):
                if service.process is not None and service.process.returncode is None:
                    service.process.kill()
                    await service.process.wait()

    return start


class Load:
    """Generations one after another in several tasks, each held against the definition."""

    def __init__(self, target: str, continuation: Callable[[list[int], int], list[int]], num_streams: int) -> None:
        self.num_finished = 0
        self._target, self._continuation = target, continuation
        self._num_streams = num_streams
        self._ending = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run them meanwhile; at the end each may finish what it has begun. Any error of any stream is raised."""
        async with asyncio.timeout(4 * LIMIT_S), Client(self._target) as client, asyncio.TaskGroup() as tasks:
            for number in range(self._num_streams):
                tasks.create_task(self._stream(client, number))
            yield
            self._ending = True

    async def _stream(self, client: Client, number: int) -> None:
        for turn in range(1_000_000):
            if self._ending:
                return
            prompt = [5] * (turn % 7) + [6, number, turn % VOCAB_SIZE]
            count = 30 + 7 * number
            tokens: list[int] = []
            async for piece in client.generate(prompt, max_tokens=count):
                tokens += piece.tokens
            assert tokens == self._continuation(prompt, count)
            self.num_finished += 1


@pytest.fixture
def load_on(continuation: Callable[[list[int], int], list[int]]) -> Callable[..., Load]:
    """Makes a load on an address."""

    def make(target: str, num_streams: int = 8) -> Load:
        return Load(target, continuation, num_streams)

    return make
