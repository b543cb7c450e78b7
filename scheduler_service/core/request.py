"""One request: its tokens, its limits, and where it is in its life."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import BadTokenError, EmptyPromptError, IllegalTransitionError, PromptTooLongError
from scheduler_service.core.journal import Restore
from scheduler_service.core.late_tokens import NEVER_LATE, LateTokens
from scheduler_service.core.ops import GREEDY, Int32Array, SamplingParams
from scheduler_service.core.radix_node import Node
from scheduler_service.core.states import Event, State, transition_of

_INT32 = np.dtype(np.int32)
_UINT32 = np.dtype(np.uint32)
_INT32_MAX = 2**31 - 1
_BIAS_ENTRY_BYTES = 16  # of one LogitBias message, rounded up


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    CAPACITY = "capacity"
    DEADLINE = "deadline"
    FAILED = "failed"


class Request:
    """A request of L prompt tokens that may return up to k more.

    `tokens` holds every known token, the prompt first; `stored` lacks those that `late` has not handed out yet. While the
    request holds a row, `RowTable` is the authority on how much of it is computed; `num_outstanding` counts ops in flight of
    leases that are over.
    """

    __slots__ = (
        "arrival",
        "cache_namespace",
        "cached_tokens",
        "finish_detail",
        "finish_reason",
        "late",
        "limit_len",
        "limit_reason",
        "max_tokens",
        "node",
        "num_computed",
        "num_outstanding",
        "num_retractions",
        "prefix_cache",
        "priority",
        "prompt_len",
        "request_id",
        "retracted_in_plan",
        "row",
        "sampling",
        "sent_len",
        "state",
        "stop_ids",
        "stored",
        "traceparent",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Int32Array,
        *,
        max_tokens: int,
        limit_len: int,
        limit_reason: FinishReason,
        arrival: int,
        sampling: SamplingParams = GREEDY,
        stop_ids: tuple[int, ...] = (),
        priority: int = 0,
        prefix_cache: bool = True,
        cache_namespace: str = "",
        traceparent: str = "",
        late: LateTokens = NEVER_LATE,
    ) -> None:
        self.request_id = request_id
        self.stored = array("i", prompt.tobytes())
        self.late = late
        self.prompt_len = len(prompt)
        self.max_tokens = max_tokens
        self.limit_len = limit_len  # L + k: the request ends when it knows so many tokens
        self.limit_reason = limit_reason
        self.arrival = arrival
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.priority = priority
        self.prefix_cache = prefix_cache
        self.cache_namespace = cache_namespace
        self.traceparent = traceparent
        self.state = State.SUBMITTED
        self.row = 0
        self.node: Node | None = None  # the deepest locked node of its prefix, while it holds a row
        self.num_computed = 0  # brought up to date when the request leaves its row
        self.num_outstanding = 0
        self.num_retractions = 0
        self.cached_tokens = 0
        self.was_admitted = False
        self.retracted_in_plan = -1  # number of the plan in or before which it lost its row; it resumes in a later one
        self.sent_len = 0  # pages sent for the request in any lease; read by the tail_only policy alone
        self.finish_reason: FinishReason | None = None
        self.finish_detail = ""

    @property
    def tokens(self) -> array[int]:
        """Every known token, the prompt first."""
        if self.late.count:
            self.late.hand_out()
        return self.stored

    @property
    def order(self) -> tuple[int, int]:
        """(priority, arrival): who goes first."""
        return (self.priority, self.arrival)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """The tokens returned so far."""
        return self.tokens[self.prompt_len :].tolist()

    def token_slice(self, start: int, stop: int) -> Int32Array:
        """Copy of the known tokens [start, stop), int32."""
        part = self.tokens[start:stop]
        return np.frombuffer(part, dtype=_INT32) if part else np.empty(0, dtype=_INT32)

    def lease_bytes(self, num_computed: int) -> int:
        """About what its LeaseStart takes in an op when the first `num_computed` tokens are in the prefix cache."""
        names = 4 * len(self.request_id) + len(self.traceparent)
        if self.sampling is GREEDY:
            return names
        history = 4 * num_computed if self.sampling.has_penalty else 0
        stop_ids = 4 * len(self.stop_ids) if self.sampling.min_new_tokens else 0
        return history + stop_ids + _BIAS_ENTRY_BYTES * len(self.sampling.logit_bias) + names

    def move(self, event: Event, target: State) -> None:
        """Change state along the table.

        Raises:
            IllegalTransitionError: the table has no entry, or `target` is none of its targets; nothing was changed.
        """
        if target not in transition_of(self.request_id, self.state, event).targets:
            raise IllegalTransitionError(self.request_id, self.state, f"{event} to {target}")
        self.state = target

    def saved(self) -> Restore:
        """Puts back what the request is now, except for tokens that were added, whatever has become of it."""
        values = _VALUES_OF(self)

        def restore() -> None:
            for name, value in zip(_CHANGING, values, strict=True):
                setattr(self, name, value)

        return restore

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} {self.state} row={self.row} tokens={len(self.tokens)}/{self.limit_len}>"


_CHANGING = (
    "cached_tokens",
    "finish_detail",
    "finish_reason",
    "node",
    "num_computed",
    "num_outstanding",
    "num_retractions",
    "retracted_in_plan",
    "row",
    "sent_len",
    "state",
    "was_admitted",
)
"""What is ever written after a request is made, other than its tokens."""
_VALUES_OF = attrgetter(*_CHANGING)


def check_prompt(request_id: str, prompt: Sequence[int] | Int32Array, config: SchedulerConfig) -> Int32Array:
    """The prompt as int32 tokens.

    Raises:
        EmptyPromptError, BadTokenError, PromptTooLongError: see their messages.
    """
    if len(prompt) == 0:
        raise EmptyPromptError(request_id)
    tokens = prompt if isinstance(prompt, np.ndarray) else np.array(list(prompt), dtype=object)
    if tokens.dtype != _INT32 or tokens.ndim != 1 or np.maximum.reduce(tokens.view(_UINT32)) >= config.vocab_size:
        _check_tokens(request_id, tokens, config)
    length = len(tokens)
    if length > config.room:
        if config.max_pages_per_row <= config.num_pages:
            why = f"a row of max_pages_per_row = {config.max_pages_per_row} pages of {config.page_size} tokens"
        else:
            why = f"the pool of num_pages = {config.num_pages} pages of {config.page_size} tokens"
        raise PromptTooLongError(request_id, length, config.room, why)
    if config.max_context and length >= config.max_context:
        why = f"max_context = {config.max_context}, of which at least 1 is for the answer,"
        raise PromptTooLongError(request_id, length, config.max_context - 1, why)
    return tokens.astype(_INT32, copy=False)


def _check_tokens(request_id: str, tokens: npt.NDArray[Any], config: SchedulerConfig) -> None:
    """The words for what is wrong with tokens, if anything is."""
    if tokens.dtype == object or not np.issubdtype(tokens.dtype, np.integer):
        for position, token in enumerate(tokens.tolist()):
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < config.vocab_size:
                raise BadTokenError(request_id, position, token, config.vocab_size)
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    if bad.any():
        position = int(bad.argmax())
        raise BadTokenError(request_id, position, int(tokens[position]), config.vocab_size)


def output_limit(prompt_len: int, max_tokens: int, config: SchedulerConfig) -> tuple[int, FinishReason]:
    """How many tokens a request may return, and the reason with which it ends when it has returned so many.

    A request that returns k tokens stores prompt_len + k - 1 positions: the last token needs no KV.
    """
    if prompt_len + max_tokens <= min(config.max_context or _INT32_MAX, config.room):
        return max_tokens, FinishReason.LENGTH
    by_row = config.max_pages_per_row * config.page_size - prompt_len + 1
    by_pool = config.num_pages * config.page_size - prompt_len + 1
    by_context = config.max_context - prompt_len if config.max_context else max_tokens
    by_row = min(by_row, _INT32_MAX - prompt_len)  # lengths are int32
    limit = min(max_tokens, by_row, by_pool, by_context)
    pool_alone = limit < max_tokens and limit < min(by_row, by_context)
    return limit, FinishReason.CAPACITY if pool_alone else FinishReason.LENGTH
