"""Child processes of `pagemirror up` and `pagemirror frontend`: how they start and end, and when one is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence

BAD_CONFIGURATION = 2
"""Exit status of a process that refuses what it was told."""

_MAX_DEATHS = 5
_DEATHS_WITHIN_S = 60.0
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 4.0


class RestartPolicy:
    """Whether, and after which pause, a process that ended is started again. Pure: times are given, in seconds."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._has_served = False

    def note_ready(self) -> None:
        """It serves: what was before is forgiven."""
        self._has_served = True
        self._deaths.clear()

    def next_pause(self, status: int, now: float) -> float | None:
        """Seconds to wait before the next start after an end with `status`; None: there is to be none."""
        if status == BAD_CONFIGURATION or (status > 0 and not self._has_served):
            return None
        self._deaths.append(now)
        while now - self._deaths[0] > _DEATHS_WITHIN_S:
            self._deaths.popleft()
        count = len(self._deaths)
        if count >= _MAX_DEATHS:
            return None
        # The first death since it served may be an accident: no pause, clients wait.
        return 0.0 if count == 1 else float(min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (count - 2)))


async def spawn(
    module_and_args: Sequence[str],
    environment: dict[str, str] | None = None,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> asyncio.subprocess.Process:
    """Start a module of this installation as a program."""
    # A session of its own: Ctrl-C reaches this process alone, which ends its children in order. -P: the current folder is no
    # place to import from.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        *module_and_args,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def exit_with_parent() -> Sequence[str]:
    """Arguments with which our programs end when this process does."""
    return ("--exit-with-parent", str(os.getpid()))


async def parent_gone(parent: int) -> None:
    """Return when process `parent` has ended, however it ends; at once where there is none."""
    with contextlib.suppress(ProcessLookupError):
        # A pidfd becomes readable when its process ends, and never means another process that gets the same number.
        descriptor = os.pidfd_open(parent)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def terminate(process: asyncio.subprocess.Process | None) -> None:
    """Ask it to end, where it has not."""
    if process is not None and process.returncode is None:
        process.terminate()


def kill(process: asyncio.subprocess.Process | None) -> None:
    """End it, where it has not ended."""
    if process is not None and process.returncode is None:
        process.kill()


async def end(process: asyncio.subprocess.Process | None, limit_s: float) -> None:
    """Ask it to end, and wait; after `limit_s` seconds it is killed."""
    terminate(process)
    await wait_or_kill(process, limit_s)


async def wait_or_kill(process: asyncio.subprocess.Process | None, limit_s: float) -> None:
    """Wait for its end; after `limit_s` seconds it is killed."""
    if process is None:
        return
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        kill(process)
        await process.wait()


async def cancel(*tasks: asyncio.Task[int] | asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait until they are over."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


def say(what: str, status: int | None, then: str = "") -> None:
    """Tell on stderr that a child of `up` ended."""
    how = f"by signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
    sys.stderr.write(f"pagemirror up: {what} {how}{then}\n")
    sys.stderr.flush()


def say_again(what: str, status: int, pause: float | None) -> None:
    """Tell on stderr that a child of `up` ended, and whether it is started again (None: no)."""
    say(what, status, "" if pause is None else f"; it is started again{f' in {pause:g} s' if pause else ''}")
