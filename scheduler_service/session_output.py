"""Output of one request of a session, as its front end keeps it until the request's own reader takes it."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

import grpc

from pagemirror.v1 import generation_pb2
from scheduler_service.core.errors import PagemirrorError

_PIECE_VALUES = 8192  # of 4 bytes each


class SessionCallError(PagemirrorError):
    """A request of a session ended with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(f"{code.name}: {details}")


@dataclass(slots=True)
class OutputPiece:
    """Tokens since the last piece, and log probabilities where the request wants them: for each token its own and `num_top`
    pairs. `finished` comes with the last piece, and only where the request ended with OK.
    """

    tokens: array[int]
    logprobs: array[float]
    top_tokens: array[int]
    top_logprobs: array[float]
    finished: generation_pb2.Finished | None = None


class SessionOutput:
    """One request. `num_logprobs` is the request's; None: it wants no log probabilities."""

    __slots__ = (
        "_accepted",
        "_changed",
        "_logprobs",
        "_most",
        "_piece",
        "_tokens",
        "_top_logprobs",
        "_top_tokens",
        "error",
        "finished",
        "num_logprobs",
        "number",
        "overflowed",
        "request_id",
    )

    def __init__(self, request_id: str, num_logprobs: int | None, max_unread: int) -> None:
        self.request_id = request_id
        self.num_logprobs = num_logprobs
        self.number = 0
        """In its session; 0: not sent yet."""
        self.error: SessionCallError | None = None
        self.finished: generation_pb2.Finished | None = None
        self.overflowed = False
        """Its reader left too much unread; the request is being ended."""
        values = 1 if num_logprobs is None else 2 + 2 * num_logprobs
        self._most = max(1, max_unread // values)
        self._piece = max(1, _PIECE_VALUES // values)
        self._changed = asyncio.Event()
        self._accepted = False
        self._clear()

    def _clear(self) -> None:
        self._tokens = array("i")
        self._logprobs, self._top_tokens, self._top_logprobs = array("f"), array("i"), array("f")

    # --- of the session -------------------------------------------------------------------------------------------------------

    def accept(self) -> None:
        """The scheduler has taken the request."""
        self._accepted = True
        self._changed.set()

    def add(self, token: int) -> bool:
        """Append a token. False: there is no room for it; everything unread is dropped."""
        if len(self._tokens) >= self._most or self.overflowed:
            self.overflowed = True
            self._clear()
            return False
        if not self._tokens:
            self._changed.set()
        self._tokens.append(token)
        return True

    def add_logprobs(self, logprob: float, top_tokens: list[int], top_logprobs: list[float]) -> None:
        """Of the token that was added last."""
        self._logprobs.append(logprob)
        self._top_tokens.extend(top_tokens)
        self._top_logprobs.extend(top_logprobs)

    def end(self, finished: generation_pb2.Finished | None, error: SessionCallError | None = None) -> None:
        """Nothing more comes. An error that was set before stays."""
        self.error = self.error or error
        self.finished = finished
        self._changed.set()

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None

    # --- of the reader --------------------------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Return when the scheduler has taken the request. Raises SessionCallError when it has refused it."""
        while not self._accepted:
            if self.error is not None and not self._tokens:
                raise self.error
            await self._wait()

    async def take(self) -> OutputPiece:
        """What has come since the last call, as much as makes one message; waits until there is some, or the request is over.

        Raises:
            SessionCallError: the request ended with this status, after everything that was taken before.
        """
        while not self._tokens and not self.is_over:
            await self._wait()
        if not self._tokens and self.error is not None:
            raise self.error
        piece = OutputPiece(self._tokens, self._logprobs, self._top_tokens, self._top_logprobs)
        if len(self._tokens) <= self._piece:
            self._clear()
            piece.finished = None if self.error is not None else self.finished
        else:
            piece = self._split(self._piece)
        return piece

    def _split(self, count: int) -> OutputPiece:
        num_top = count * (self.num_logprobs or 0)
        piece = OutputPiece(
            self._tokens[:count], self._logprobs[:count], self._top_tokens[:num_top], self._top_logprobs[:num_top]
        )
        self._tokens, self._logprobs = self._tokens[count:], self._logprobs[count:]
        self._top_tokens, self._top_logprobs = self._top_tokens[num_top:], self._top_logprobs[num_top:]
        return piece

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
