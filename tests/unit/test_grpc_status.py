"""scheduler_service.grpc_status: one table from errors to statuses."""

from __future__ import annotations

import grpc
import pytest

from scheduler_service import errors
from scheduler_service.columns import BadColumnError
from scheduler_service.core import errors as core_errors
from scheduler_service.grpc_status import UNKNOWN_ERROR_MESSAGE, status_of

CASES = [
    (core_errors.EmptyPromptError("a"), grpc.StatusCode.INVALID_ARGUMENT),
    (core_errors.BadTokenError("a", 0, 9, 5), grpc.StatusCode.INVALID_ARGUMENT),
    (core_errors.BadParameterError("a", "top_k", 0, "at least 1"), grpc.StatusCode.INVALID_ARGUMENT),
    (core_errors.PromptTooLongError("a", 9, 5, "the pool"), grpc.StatusCode.INVALID_ARGUMENT),
    (BadColumnError("prompt", 3), grpc.StatusCode.INVALID_ARGUMENT),
    (core_errors.QueueFullError("a", 5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (core_errors.DuplicateRequestError("a"), grpc.StatusCode.ALREADY_EXISTS),
    (core_errors.UnknownRequestError("a"), grpc.StatusCode.NOT_FOUND),
    (core_errors.NotRunningError("a", "submitted"), grpc.StatusCode.FAILED_PRECONDITION),
    (core_errors.CacheInUseError(3), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.QueueWaitError("a", 5), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.OutputUnreadError("a", 5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ListingTooLargeError(6, 5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DataLossError(600), grpc.StatusCode.DATA_LOSS),
    (errors.RequestFailedError("a", "non-finite logits"), grpc.StatusCode.INTERNAL),
    (errors.DrainingError(), grpc.StatusCode.UNAVAILABLE),
    (errors.RuntimeUnavailableError(60, "gone"), grpc.StatusCode.UNAVAILABLE),
    (errors.LinkBrokenError("gone"), grpc.StatusCode.UNAVAILABLE),
    (errors.ProtocolError("odd"), grpc.StatusCode.UNAVAILABLE),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_status_and_keeps_its_words(error: Exception, code: grpc.StatusCode) -> None:
    """Errors that are somebody's to act on reach the client with their message."""
    assert status_of(error) == (code, str(error))


def test_the_cores_own_codes_agree() -> None:
    """Every request error of the core names the same status as the table."""
    for error, code in CASES:
        if isinstance(error, core_errors.RequestError):
            assert error.code == code.name


@pytest.mark.parametrize(
    "error", [KeyError("secret"), core_errors.InvariantViolation(["row 3"]), RuntimeError("secret")], ids=repr
)
def test_our_own_fault_is_bland(error: Exception) -> None:
    """An error that is not in the table is INTERNAL, and its words stay in the log."""
    assert status_of(error) == (grpc.StatusCode.INTERNAL, UNKNOWN_ERROR_MESSAGE)


def test_long_messages_are_cut() -> None:
    """A message fits into HTTP/2 trailers whatever a client sent."""
    _, message = status_of(core_errors.UnknownRequestError("x" * 5000))
    assert len(message.encode()) == 1024
    assert message.endswith("…")


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("x" * 1024, "x" * 1024),
        ("x" * 1025, "x" * 1021 + "…"),
        ("ü" * 512, "ü" * 512),
        ("ü" * 513, "ü" * 510 + "…"),
        ("a\ud800b", "a?b"),
    ],
    ids=["at the limit", "one more", "two bytes each", "not inside a character", "no text at all"],
)
def test_the_limit_is_in_bytes(text: str, cut: str) -> None:
    """1,024 bytes of UTF-8 are kept, one more is cut between characters, and what cannot be sent is replaced."""
    assert errors.shorten(text) == cut
