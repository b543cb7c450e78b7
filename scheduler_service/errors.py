"""Errors of the scheduler's shell: everything around the core that can go wrong.

    PagemirrorError
    ├── ServiceError                    a call cannot be served now; the request itself may be fine
    │   ├── DrainingError               the scheduler is shutting down
    │   ├── RuntimeUnavailableError     there has been no runtime for longer than the limit
    │   ├── QueueWaitError              the request waited longer than it was willing to
    │   ├── DataLossError               the runtime's page rows were found damaged, and not for the first time
    │   ├── OutputUnreadError           the client did not take its tokens
    │   ├── ListingTooLargeError        an answer that no message can hold
    │   ├── NoTokenizerError            the tokenizer's files are not on this machine
    │   ├── EventsOffError              page events are not served here
    │   ├── EventsGoneError             the batches of page events that are asked for are not kept
    │   ├── EventsMissedError           a reader of page events was too slow
    │   ├── TooManyFollowersError       page events have as many readers as they may
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

MAX_DETAIL_BYTES = 1024
"""Longest text of a status, and of what a peer says in a refusal or a status of its own."""


def shorten(text: str, most: int = MAX_DETAIL_BYTES) -> str:
    """`text`, cut to `most` bytes of UTF-8 with an ellipsis at the end; what UTF-8 cannot say becomes a question mark."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "…"


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


class DataLossError(ServiceError):
    """The runtime's page rows were other than they should be, twice within the window."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        super().__init__(
            f"the runtime's page rows were found damaged twice within {window_s:g} s (--verify-window);"
            " the output of this request may be wrong, submit it again"
        )


class OutputUnreadError(ServiceError):
    """A client left more of its request's output unread than may be kept for it."""

    def __init__(self, request_id: str, limit: int) -> None:
        self.request_id, self.limit = request_id, limit
        super().__init__(f"request {request_id!r}: its output was left unread beyond {limit} values (--max-unread-tokens)")


class ListingTooLargeError(ServiceError):
    """The rows in use do not fit into one message."""

    def __init__(self, num_bytes: int, limit: int) -> None:
        self.num_bytes, self.limit = num_bytes, limit
        super().__init__(f"the rows in use take {num_bytes} bytes, a message has at most {limit}")


class NoTokenizerError(ServiceError):
    """The tokenizer's files are not here."""

    def __init__(self, path: str) -> None:
        self.path = path
        where = f"there is no tokenizer.json in {path}" if path else "the model that is served has no tokenizer"
        super().__init__(f"{where}; name a folder that has one with --gateway-tokenizer")


class EventsOffError(ServiceError):
    """Page events are not served on this port."""

    def __init__(self) -> None:
        super().__init__("page events, which have the token ids of cached prompts, are not served here (--page-events)")


class EventsGoneError(ServiceError):
    """A reader wants to go on after a batch of page events from which on not everything is kept."""

    def __init__(self, after: int) -> None:
        self.after = after
        super().__init__(f"what came after batch {after} is not kept any more, or is none of this process's; begin with 0")


class EventsMissedError(ServiceError):
    """A reader of page events was so slow that batches are gone which it has not read."""

    def __init__(self, after: int) -> None:
        self.after = after
        super().__init__(f"what came after batch {after} was not read in time and is not kept any more; begin with 0")


class TooManyFollowersError(ServiceError):
    """Page events are read by as many as may."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"page events are being sent to {limit} readers already, which is the limit")


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
