"""What an adapter raises besides `Refusal`."""

from __future__ import annotations

from typing import Any

from runtime_service.errors import RuntimeServiceError


class MissingAttributeError(RuntimeServiceError, AttributeError):
    """An object does not look like what the adapter's producer makes."""

    def __init__(self, producer: str, attribute: str, found: object) -> None:
        RuntimeServiceError.__init__(self, f"{type(found).__name__!r} has no attribute {attribute!r}; expected {producer}")
        self.producer = producer
        self.attribute = attribute


class UnsupportedPlanError(RuntimeServiceError, ValueError):
    """A producer planned something that this runtime does not do; the message names it."""

    def __init__(self, producer: str, what: str) -> None:
        super().__init__(f"{producer}: {what}")
        self.producer = producer
        self.what = what


_NONE = object()


def read(source: object, attribute: str, producer: str) -> Any:
    """An attribute, or what it returns where it is a method. Raises MissingAttributeError."""
    value = getattr(source, attribute, _NONE)
    if value is _NONE:
        raise MissingAttributeError(producer, attribute, source)
    return value() if callable(value) else value
