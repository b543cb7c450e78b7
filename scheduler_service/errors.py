"""Errors of the scheduler's shell: everything around the core that can go wrong.

    PagemirrorError
    ├── ServiceError                    a call cannot be served now; the request itself may be fine
    │   ├── DrainingError               the scheduler is shutting down
    │   ├── RuntimeUnavailableError     there has been no runtime for longer than the limit
    │   ├── QueueWaitError              the request waited longer than it was willing to
    │   └── RequestFailedError          the request's own step failed
    ├── RuntimeLinkError                the link to the runtime
    │   ├── RuntimeMismatchError        the two sides are configured differently; trying again cannot help
    │   ├── RuntimeBusyError            the runtime does not take this scheduler now
    │   ├── LinkBrokenError             the stream ended, or the peer stopped answering
    │   └── ProtocolError               the peer said something that the protocol does not allow
    └── StartError                      the process cannot start: a port in use, a missing package

Errors of the core are in `scheduler_service.core.errors`.
"""

from __future__ import annotations

from scheduler_service.core.errors import PagemirrorError


class ServiceError(PagemirrorError):
    """A call cannot be served now."""


class DrainingError(ServiceError):
    """The scheduler is shutting down."""

    def __init__(self) -> None:
        super().__init__("the scheduler is shutting down; try another one, or later")


class RuntimeUnavailableError(ServiceError):
    """There is no runtime, and there has been none for longer than the limit."""

    def __init__(self, limit_s: float, reason: str) -> None:
        self.limit_s, self.reason = limit_s, reason
        super().__init__(f"no working runtime for {limit_s:g} s (--runtime-timeout); last trouble: {reason}")


class QueueWaitError(ServiceError):
    """The request waited longer than max_queue_wait_ms."""

    def __init__(self, request_id: str, limit_ms: int) -> None:
        self.request_id, self.limit_ms = request_id, limit_ms
        super().__init__(f"request {request_id!r} was not admitted within max_queue_wait_ms = {limit_ms}")


class RequestFailedError(ServiceError):
    """The runtime could compute the step, but not this request."""

    def __init__(self, request_id: str, detail: str) -> None:
        self.request_id, self.detail = request_id, detail
        super().__init__(f"request {request_id!r} failed: {detail}")


class RuntimeLinkError(PagemirrorError):
    """Something is wrong between scheduler and runtime."""


class RuntimeMismatchError(RuntimeLinkError):
    """A configured value and the runtime's disagree."""

    def __init__(self, key: str, configured: object, actual: object, why: str = "") -> None:
        self.key, self.configured, self.actual, self.why = key, configured, actual, why
        super().__init__(f"{key}: the scheduler says {configured}, the runtime says {actual}{'; ' if why else ''}{why}")


class RuntimeBusyError(RuntimeLinkError):
    """The runtime refuses this scheduler for now, as a rule because another one's stream is alive."""


class LinkBrokenError(RuntimeLinkError):
    """The stream ended, or the peer stopped answering."""


class ProtocolError(RuntimeLinkError):
    """The runtime said something that the protocol does not allow."""


class StartError(PagemirrorError):
    """The process cannot start."""
