"""Errors of the scheduler core.

    PagemirrorError
    ├── ConfigError                     the operator's fault: a setting is out of range
    ├── RequestError                    the client's fault; nothing was changed
    │   ├── InvalidRequestError
    │   │   ├── EmptyPromptError
    │   │   ├── BadTokenError
    │   │   ├── BadParameterError
    │   │   ├── UnsupportedParameterError
    │   │   └── PromptTooLongError
    │   ├── QueueFullError
    │   ├── DuplicateRequestError
    │   ├── UnknownRequestError
    │   ├── NotRunningError
    │   └── CacheInUseError
    └── InternalError                   our fault
        ├── IllegalTransitionError
        ├── PageAccountingError
        ├── UnexpectedResultError
        ├── InvariantViolation
        └── NoProgressError

Each keeps its data as attributes and formats it once. `RequestError.code` is the name of the gRPC status with which every edge
of the product reports it.
"""

from __future__ import annotations

from typing import ClassVar


class PagemirrorError(Exception):
    """Base of every error the scheduler core raises on purpose."""


class ConfigError(PagemirrorError):
    """A setting is out of range."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key, self.value, self.expected = key, value, expected
        super().__init__(f"{key} is {value!r}, but must be {expected}")


class RequestError(PagemirrorError):
    """A request, or a call about one, cannot be served as it is. Nothing was changed."""

    code: ClassVar[str] = "INVALID_ARGUMENT"


class InvalidRequestError(RequestError):
    """The request itself is wrong and would be wrong again."""


class EmptyPromptError(InvalidRequestError):
    """The prompt has no token."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r}: the prompt is empty, but must have at least 1 token")


class BadTokenError(InvalidRequestError):
    """A token id is outside the vocabulary."""

    def __init__(self, request_id: str, position: int, token: int, vocab_size: int) -> None:
        self.request_id, self.position, self.token, self.vocab_size = request_id, position, token, vocab_size
        super().__init__(f"request {request_id!r}: prompt token {position} is {token}, but ids are in [0, {vocab_size})")


class BadParameterError(InvalidRequestError):
    """A parameter is out of range."""

    def __init__(self, request_id: str, name: str, value: object, expected: str) -> None:
        self.request_id, self.name, self.value, self.expected = request_id, name, value, expected
        super().__init__(f"request {request_id!r}: {name} is {value!r}, but must be {expected}")


class UnsupportedParameterError(InvalidRequestError):
    """The model that is served cannot honour a parameter."""

    def __init__(self, request_id: str, name: str, value: object) -> None:
        self.request_id, self.name, self.value = request_id, name, value
        super().__init__(
            f"request {request_id!r}: {name} is {value!r}, but the model that is served computes its tokens without logits "
            "and cannot honour it; leave it unset"
        )


class PromptTooLongError(InvalidRequestError):
    """The prompt can never be computed, however long it waits."""

    def __init__(self, request_id: str, prompt_len: int, limit: int, why: str) -> None:
        self.request_id, self.prompt_len, self.limit, self.why = request_id, prompt_len, limit, why
        super().__init__(f"request {request_id!r}: the prompt has {prompt_len} tokens, but {why} allows {limit}")


class QueueFullError(RequestError):
    """As many requests wait as may wait."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, request_id: str, limit: int) -> None:
        self.request_id, self.limit = request_id, limit
        super().__init__(f"request {request_id!r}: the queue is full, {limit} requests wait already; try again later")


class DuplicateRequestError(RequestError):
    """A live request has this id."""

    code = "ALREADY_EXISTS"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r} is still running; choose another id or wait for its end")


class UnknownRequestError(RequestError):
    """No live request has this id."""

    code = "NOT_FOUND"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"no live request {request_id!r}")


class NotRunningError(RequestError):
    """The request holds no row that could be taken away."""

    code = "FAILED_PRECONDITION"

    def __init__(self, request_id: str, state: str) -> None:
        self.request_id, self.state = request_id, state
        super().__init__(f"request {request_id!r} is {state} and holds no row")


class CacheInUseError(RequestError):
    """Running requests use cached pages."""

    code = "FAILED_PRECONDITION"

    def __init__(self, locked_pages: int) -> None:
        self.locked_pages = locked_pages
        super().__init__(f"the prefix cache was not reset: running requests use {locked_pages} of its pages; wait, or force it")


class InternalError(PagemirrorError):
    """The core contradicts itself. Nothing a client did can cause it."""


class IllegalTransitionError(InternalError):
    """The state machine has no such entry; nothing was changed."""

    def __init__(self, request_id: str, state: str, event: str) -> None:
        self.request_id, self.state, self.event = request_id, state, event
        super().__init__(f"request {request_id!r}: no transition for {event} in state {state}")


class PageAccountingError(InternalError):
    """A page was taken, given or published that is not in the state for it; nothing was changed."""


class UnexpectedResultError(InternalError):
    """A result does not answer the oldest op in flight; nothing was changed."""


class InvariantViolation(InternalError):
    """The audit found contradictions."""

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__("; ".join(findings))


class NoProgressError(InternalError):
    """Nothing is in flight, a request could run, and nothing was planned."""
