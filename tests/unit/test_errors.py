"""The errors of the core: what they say, the data they keep, and the code they are reported with."""

from __future__ import annotations

import inspect

import pytest

from scheduler_service.core import errors

_TEXTS = [
    (
        errors.ConfigError("page_size", 0, "an integer from 1 to 9"),
        "page_size is 0, but must be an integer from 1 to 9",
        {"key": "page_size", "value": 0, "expected": "an integer from 1 to 9"},
    ),
    (
        errors.EmptyPromptError("r"),
        "request 'r': the prompt is empty, but must have at least 1 token",
        {"request_id": "r"},
    ),
    (
        errors.BadTokenError("r", 2, -1, 997),
        "request 'r': prompt token 2 is -1, but ids are in [0, 997)",
        {"request_id": "r", "position": 2, "token": -1, "vocab_size": 997},
    ),
    (
        errors.BadParameterError("r", "top_p", 1.5, "in (0, 1]"),
        "request 'r': top_p is 1.5, but must be in (0, 1]",
        {"request_id": "r", "name": "top_p", "value": 1.5, "expected": "in (0, 1]"},
    ),
    (
        errors.PromptTooLongError("r", 20, 16, "the pool of 4 pages"),
        "request 'r': the prompt has 20 tokens, but the pool of 4 pages allows 16",
        {"request_id": "r", "prompt_len": 20, "limit": 16, "why": "the pool of 4 pages"},
    ),
    (
        errors.QueueFullError("r", 4),
        "request 'r': the queue is full, 4 requests wait already; try again later",
        {"request_id": "r", "limit": 4},
    ),
    (
        errors.DuplicateRequestError("r"),
        "request 'r' is still running; choose another id or wait for its end",
        {"request_id": "r"},
    ),
    (errors.UnknownRequestError("r"), "no live request 'r'", {"request_id": "r"}),
    (
        errors.NotRunningError("r", "submitted"),
        "request 'r' is submitted and holds no row",
        {"request_id": "r", "state": "submitted"},
    ),
    (
        errors.CacheInUseError(3),
        "the prefix cache was not reset: running requests use 3 of its pages; wait, or force it",
        {"locked_pages": 3},
    ),
    (
        errors.IllegalTransitionError("r", "finished", "Retract"),
        "request 'r': no transition for Retract in state finished",
        {"request_id": "r", "state": "finished", "event": "Retract"},
    ),
    (errors.InvariantViolation(["one", "two"]), "one; two", {"findings": ["one", "two"]}),
]


@pytest.mark.parametrize(("error", "text", "data"), _TEXTS, ids=lambda value: type(value).__name__)
def test_text_and_data(error: errors.PagemirrorError, text: str, data: dict[str, object]) -> None:
    """Each error formats its data once and keeps it as attributes."""
    assert str(error) == text
    assert {name: getattr(error, name) for name in data} == data


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.EmptyPromptError, "INVALID_ARGUMENT"),
        (errors.BadTokenError, "INVALID_ARGUMENT"),
        (errors.BadParameterError, "INVALID_ARGUMENT"),
        (errors.PromptTooLongError, "INVALID_ARGUMENT"),
        (errors.QueueFullError, "RESOURCE_EXHAUSTED"),
        (errors.DuplicateRequestError, "ALREADY_EXISTS"),
        (errors.UnknownRequestError, "NOT_FOUND"),
        (errors.NotRunningError, "FAILED_PRECONDITION"),
        (errors.CacheInUseError, "FAILED_PRECONDITION"),
    ],
)
def test_codes(kind: type[errors.RequestError], code: str) -> None:
    """The status that every edge reports is fixed per class."""
    assert kind.code == code


def test_codes_are_names_of_grpc_statuses() -> None:
    """A code that gRPC does not know could not be reported."""
    import grpc

    names = {status.name for status in grpc.StatusCode}
    assert {kind.code for kind in _all_errors() if issubclass(kind, errors.RequestError)} <= names


def test_faults_of_clients_operators_and_our_own_are_apart() -> None:
    """Every error has one of three bases below the common one, so an edge can tell whose fault it was."""
    bases = (errors.ConfigError, errors.RequestError, errors.InternalError)
    for kind in _all_errors():
        if kind is not errors.PagemirrorError:
            assert sum(issubclass(kind, base) for base in bases) == 1, kind


def test_module_docstring_shows_every_error() -> None:
    """The tree at the head of the module is complete."""
    assert errors.__doc__ is not None
    for kind in _all_errors():
        assert kind.__name__ in errors.__doc__


def _all_errors() -> list[type[errors.PagemirrorError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return [kind for _, kind in members if issubclass(kind, errors.PagemirrorError)]
