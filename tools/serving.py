"""`pagemirror up` as a child process, for tools and benchmarks that need the served product and its address."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

START_LIMIT_S = 180.0
_END_LIMIT_S = 30.0
_READY = re.compile(r"pagemirror ready on (\S+) ")


class ServingError(Exception):
    """The pair of processes did not come up; the message ends with the last lines they wrote."""


@asynccontextmanager
async def served(*arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[str]:
    """Start `pagemirror up` with these arguments on a free port, yield its address, end it when the context is left.

    Raises:
        ServingError: it ended, or was not ready within START_LIMIT_S.
    """
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "scheduler_service.cli", "up", "--port", "0", "--log-level", "warning", *arguments,
            env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            line = ""
            if process.stdout is not None:
                try:
                    async with asyncio.timeout(START_LIMIT_S):
                        line = (await process.stdout.readline()).decode(errors="replace")
                except TimeoutError:
                    line = ""
            match = _READY.match(line)
            if match is None:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().splitlines()[-6:]
                raise ServingError("pagemirror up did not become ready:\n" + "\n".join(last))
            yield match[1]
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(_END_LIMIT_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()  # its children end with it: they watch their parent
                    await process.wait()


def project_root() -> Path:
    """The repository's top folder."""
    return Path(__file__).resolve().parent.parent
