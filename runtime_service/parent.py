"""Waiting for the end of another process, so that a runtime does not outlive whoever started it."""

from __future__ import annotations

import asyncio
import os

from runtime_service.errors import SettingError


async def watch_process(pid: int) -> None:
    """Return when the process `pid` has ended, or at once when there is none.

    By a pidfd, which becomes readable at that moment and, unlike a process id, is never given to another process. Raises
    SettingError on a system without pidfds (Linux has them since 5.3).
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError) as error:
        raise SettingError("--exit-with-parent", pid, f"cannot be watched on this system: {error}") from None
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
