"""The installed command as processes of their own, and what the model that they serve must answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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
        """Process ids of its two children by what they are."""
        found = {}
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            found["runtime" if "runtime_service" in words else "scheduler"] = int(child)
        return found


class Commands:
    """`pagemirror` commands, and waiting for what they do."""

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
