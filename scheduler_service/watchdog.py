"""Whether steps go on: what health is told of a runtime that is there, but does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger("pagemirror.engine")

_TICKS = 4  # looks at a step that does not move until it counts as stuck


class Watchdog:
    """Looks at a number that moves with every step, and tells when it stands still while something is awaited.

    Looks are counted, not seconds: when this process itself was stopped for a while, that is one look, not the runtime's fault.

    Args:
        awaited: what is awaited now, any value that changes when it comes; None: nothing.
        limit_s: how long it may stay the same.
        tell: called with True when it has, and with False when it moves again.
    """

    def __init__(self, awaited: Callable[[], object], limit_s: float, tell: Callable[[bool], None]) -> None:
        self._awaited = awaited
        self._tick_s = limit_s / _TICKS
        self._tell = tell
        self._limit_s = limit_s

    async def run(self) -> None:
        """Until cancelled."""
        before: object = None
        ticks, is_stuck = 0, False
        while True:
            await asyncio.sleep(self._tick_s)
            now = self._awaited()
            ticks = ticks + 1 if now is not None and now == before else 0
            before = now
            if (ticks >= _TICKS) is not is_stuck:
                is_stuck = not is_stuck
                if is_stuck:
                    log.warning("step_stuck", limit_s=self._limit_s)
                else:
                    log.info("steps_go_on")
                self._tell(is_stuck)
