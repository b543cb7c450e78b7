"""Keeping a runtime: the first connection, and a new session after any trouble.

There is one answer to a refusal, a failed step, a broken stream and an expired watchdog alike: a new session with a higher
number, on the same stream while that works and on a new one otherwise, with backoff, for as long as it takes. After
`runtime_timeout` clients are told; the attempts go on.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable

import structlog

from scheduler_service.agreement import ExpectedShape
from scheduler_service.errors import RuntimeLinkError, RuntimeMismatchError, RuntimeUnavailableError, StartError
from scheduler_service.runtime_group import RuntimeGroup
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire_facts import RuntimeFacts

log = structlog.get_logger("pagemirror.connection")

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 2.0


class RuntimeConnection:
    """The present link to the runtime and the numbers of the session on it."""

    link: RuntimeGroup
    facts: RuntimeFacts

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        wake: Callable[[], None],
        on_connected: Callable[[bool], None],
        on_new_session: Callable[[int], None],
        on_give_up: Callable[[RuntimeUnavailableError], None],
    ) -> None:
        """`wake`: an answer arrived or the link broke. `on_new_session`: forget what was in flight, the next ops belong to this
        session. `on_give_up`: there has been no working runtime for `runtime_timeout`; later attempts may still succeed.
        """
        self.session_no = 0
        self.connected = False
        self.unavailable: RuntimeUnavailableError | None = None
        """Set from the moment of giving up to the next success."""
        self.trouble = ""
        """Why the last session was lost."""
        self._settings = settings
        self._on_connected = on_connected
        self._on_new_session = on_new_session
        self._on_give_up = on_give_up
        self.link = RuntimeGroup(
            settings.runtimes,
            scheduler_epoch=secrets.randbits(64) | 1,  # never 0
            overlap_depth=settings.overlap_depth,
            limits=settings.limits,
            wake=wake,
        )
        self._failures = 0  # sessions lost since the last completed step
        self._down_s = 0.0  # time without a session since then

    async def start(self) -> None:
        """Connect for the first time, waiting for a runtime that is still starting.

        Raises:
            RuntimeMismatchError: a configured value disagrees with the runtime's.
            StartError: no runtime within `startup_timeout`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.startup_timeout
        attempt, said = 0, ""
        while True:
            self.session_no += 1
            try:
                self.facts = await self.link.begin(self.session_no, self._settings.expected)
                return
            except RuntimeLinkError as error:
                # Ranks that were reached are let go: another scheduler may wait for them, and have the one that is missing.
                await self.link.close()
                if isinstance(error, RuntimeMismatchError):
                    raise
                if loop.time() > deadline:
                    limit = f"{self._settings.startup_timeout:g} s (--startup-timeout)"
                    raise StartError(f"no runtime within {limit}: {error}") from error
                say = log.info if str(error) != said else log.debug
                said = str(error)
                say("waiting_for_runtime", target=self._settings.runtime, error=said)
                await asyncio.sleep(_backoff(attempt))
                attempt += 1

    async def recover(self, trouble: str) -> None:
        """Start a new session, however long it takes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._failures += 1
        self.set_connected(False)
        self._next_session(trouble)
        log.warning("session_lost", reason=trouble, next_session_no=self.session_no)
        timer = loop.call_later(max(0.0, self._settings.runtime_timeout - self._down_s), self._give_up)
        attempt = self._failures - 1
        said = trouble
        try:
            while True:
                if attempt:
                    await asyncio.sleep(_backoff(attempt - 1))
                attempt += 1
                try:
                    self.facts = await self.link.begin(self.session_no, ExpectedShape.of(self.facts))
                    break
                except RuntimeLinkError as error:
                    # Attempts follow each other quickly: one that fails like the one before is no news.
                    say = log.warning if str(error) != said else log.debug
                    said = str(error)
                    say("reconnect_failed", reason=said)
                    self._next_session(said)
        finally:
            timer.cancel()
            self._down_s += loop.time() - began
        if self.unavailable is not None:
            self.trouble_is_over()
        self.set_connected(True)
        log.info("session_started", session_no=self.session_no)

    def trouble_is_over(self) -> None:
        """A step was completed, or nothing is left that the trouble could have concerned: the next trouble is a new one."""
        self.unavailable = None
        self._down_s = 0.0
        self._failures = 0

    def cause_is_gone(self) -> None:
        """What made the last sessions fail has ended, as far as is known: the next one need not be waited for."""
        self._failures = 0

    def set_connected(self, connected: bool) -> None:
        """Note, and tell, whether a runtime serves us now."""
        if connected is not self.connected:
            self.connected = connected
            self._on_connected(connected)

    async def close(self) -> None:
        """End the streams."""
        await self.link.close()
        self.set_connected(False)

    def _next_session(self, trouble: str) -> None:
        self.session_no += 1
        self.trouble = trouble
        self._on_new_session(self.session_no)

    def _give_up(self) -> None:
        self.unavailable = RuntimeUnavailableError(self._settings.runtime_timeout, self.trouble)
        log.error("runtime_unavailable", reason=self.trouble)
        self._on_give_up(self.unavailable)


def _backoff(attempt: int) -> float:
    """Seconds before the next attempt: exponential, of which a random half to whole is waited."""
    longest: float = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempt, 16))
    return longest * random.uniform(0.5, 1.0)
