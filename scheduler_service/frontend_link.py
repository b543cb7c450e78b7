"""A front end's one session with its scheduler, opened again whenever it ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog
import tenacity

from scheduler_service.client import Client, RpcFailedError
from scheduler_service.client_security import ClientSecurity
from scheduler_service.session_client import Session
from scheduler_service.session_output import SessionCallError

log = structlog.get_logger("pagemirror.frontend")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_OPEN_TIMEOUT_S = 10.0


class SchedulerLink:
    """To be run as a task for as long as the front end serves. `on_connected` is told whether there is a session with a
    scheduler whose health is SERVING, whenever that changes.
    """

    def __init__(
        self,
        target: str,
        security: ClientSecurity,
        *,
        max_unread: int,
        on_connected: Callable[[bool], None] = lambda _: None,
        on_model: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._target = target
        self._security = security
        self._max_unread = max_unread
        self._on_connected, self._on_model = on_connected, on_model
        self._reason = "no session was opened yet"
        self._current: tuple[Client, Session] | None = None
        self.serving = False
        """There is a session with a scheduler whose health is SERVING."""
        self.tried = asyncio.Event()
        """The first attempt is over, whatever came of it."""

    @property
    def session(self) -> Session:
        """The open one. Raises SessionCallError with UNAVAILABLE while there is none."""
        return self._open()[1]

    @property
    def client(self) -> Client:
        """To pass other calls on with. Raises SessionCallError with UNAVAILABLE while there is no session."""
        return self._open()[0]

    def _open(self) -> tuple[Client, Session]:
        if self._current is None or self._current[1].broken is not None:
            details = f"this front end has no scheduler now, it keeps trying; last trouble: {self._reason}"
            raise SessionCallError(grpc.StatusCode.UNAVAILABLE, details)
        return self._current

    async def run(self) -> None:
        """Keep a session open until cancelled; then it is closed."""
        while True:
            client, session = await self._connect()
            self._current = client, session
            self.tried.set()
            health = asyncio.create_task(self._follow_health(client), name="scheduler-health")
            log.info("session_opened", scheduler=self._target, window=session.window)
            try:
                await session.over.wait()
            finally:
                self._current = None
                health.cancel()
                await asyncio.gather(health, return_exceptions=True)
                await session.close()
                await client.close()
            self._reason = str(session.broken)
            log.warning("session_lost", scheduler=self._target, reason=self._reason)
            self._tell(False)

    async def _follow_health(self, client: Client) -> None:
        """Tell which model is served, and what the scheduler's health service says, as long as there is a session."""
        with contextlib.suppress(RpcFailedError):
            self._on_model((await client.info()).model)
        async for serving in client.watch_health():
            self._tell(serving)

    def _tell(self, serving: bool) -> None:
        self.serving = serving
        self._on_connected(serving)

    async def _connect(self) -> tuple[Client, Session]:
        pause = tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S) + tenacity.wait_random(
            0, _FIRST_PAUSE_S
        )
        async for attempt in tenacity.AsyncRetrying(
            wait=pause,
            retry=tenacity.retry_if_exception_type((SessionCallError, TimeoutError)),
            before_sleep=self._note_failure,
        ):
            with attempt:
                # A new channel each time: it does not wait for the backoff of an older one.
                client = Client(self._target, self._security)
                try:
                    async with asyncio.timeout(_OPEN_TIMEOUT_S):
                        session = await Session.open(client.stub, client.metadata(), self._max_unread)
                    return client, session
                except SessionCallError as error:
                    await client.close()
                    raise SessionCallError(error.code, client.explain(error.code, error.details)) from error
                except BaseException:
                    await client.close()
                    raise
        raise AssertionError  # it is tried for ever

    def _note_failure(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        reason = str(error) or f"no answer within {_OPEN_TIMEOUT_S:g} s"
        say = log.warning if reason != self._reason else log.debug
        say("scheduler_unreachable", scheduler=self._target, reason=reason)
        self._reason = reason
        self.tried.set()
