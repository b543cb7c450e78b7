"""What the gateway's servicers need of whatever computes for them, and nothing more.

Two engines have this form: the engine loop of this process (`local_engine.py`), and the link of a front end's worker to a
scheduler. The servicers know neither.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Protocol

from scheduler_service.core.ops import Int32Array, TokenLogprobs
from scheduler_service.core.request import FinishReason
from scheduler_service.engine_loop import SubmitOptions
from scheduler_service.page_events import PageBatch

NO_LIMIT = 2**31 - 1
"""`SubmitOptions.max_tokens` of a request that may take all the room there is: the core cuts it to the row, the pool and the
model's context.
"""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is served, its limits, and how full it is: the contents of `ServerInfo`.

    `max_context` is the longest sequence that can be served, in tokens: the model's context, or where that has no limit, a row.
    """

    version: str
    model: str
    architecture: str
    tokenizer_path: str
    vocab_size: int
    max_context: int
    max_prompt_len: int
    default_stop_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    max_rows: int
    num_waiting: int
    num_running: int
    num_retracted: int
    free_pages: int
    cached_pages: int
    num_steps: int

    @property
    def served_name(self) -> str:
        """What clients of the gateway call the model: of a folder its own name, without the way there."""
        return PurePath(self.model).name or self.model

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pool."""
        return self.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Room of the pages that are not free, in tokens; what is cached counts."""
        return (self.num_pages - self.free_pages) * self.page_size

    @property
    def active_tokens(self) -> int:
        """Room of the pages that belong to running requests alone, in tokens."""
        return (self.num_pages - self.free_pages - self.cached_pages) * self.page_size


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended, and what it took; ends with an error raise it instead."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Piece:
    """Tokens since the last piece, with one entry each of log probabilities where the request wants them. `finished` comes with
    the last piece, which may have no tokens.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finish | None = None


class GatewayOutput(Protocol):
    """Output of one request."""

    async def take(self) -> Piece:
        """Everything since the last call; waits until there is something.

        Raises:
            PagemirrorError: the request ended by an error; after everything that came before it was taken.
        """

    def abort(self) -> None:
        """End the request if it is not over; its pages are free at once. Its output need not be taken any more."""

    def stop(self) -> None:
        """The same for a request that has come to its stop, where the engine tells the two apart."""
        self.abort()


class GatewayEngine(Protocol):
    """One model, served."""

    @property
    def connected(self) -> bool:
        """Requests can be taken now: there is a runtime, and this process is not on its way out."""

    async def info(self) -> EngineInfo:
        """As of now. Raises PagemirrorError where the answer cannot be had."""

    async def submit(self, request_id: str, prompt: Int32Array, options: SubmitOptions) -> GatewayOutput:
        """Queue a request; it is accepted when this returns.

        Raises:
            PagemirrorError: with the status that Generate would have ended with; nothing is changed then.
        """

    async def abort(self, request_id: str) -> bool:
        """End a live request, whoever submitted it; whether there was one."""

    async def flush_cache(self, timeout_s: float = 0.0) -> int:
        """Empty the prefix cache; returns the pages freed. Waits up to `timeout_s` for requests that use it to end.

        Raises:
            CacheInUseError: they did not; nothing is changed then.
        """

    def page_events(self, after: int | None) -> AsyncGenerator[PageBatch, None]:
        """Batches of page events, from the one that follows number `after`; None: the present state, and what comes after it.
        To be closed.

        Raises:
            PagemirrorError: at once or later, with the status that SubscribePageEvents would have ended with.
        """
