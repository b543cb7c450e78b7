"""Fields of a gateway's request: each is honoured, or the request is refused and told which one it was.

A servicer lists what it honours. Everything else that a request sets is refused, fields that a later version of the gateway
brings included: what a client asked for is never left out in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from google.protobuf.message import Message

from scheduler_service.core.errors import BadParameterError, BadTokenError, InvalidRequestError
from scheduler_service.core.ops import Int32Array

MAX_CHOICES = 128
"""Completions of one request (`n`) at most."""


class UnsupportedFieldError(InvalidRequestError):
    """A field is set that this server cannot honour."""

    def __init__(self, request_id: str, field: str, why: str) -> None:
        self.request_id, self.field, self.why = request_id, field, why
        super().__init__(f"request {request_id!r}: {field} cannot be honoured: {why}")


def refuse_others(request_id: str, message: Message, honoured: Collection[str], why: dict[str, str]) -> None:
    """Refuse a message that sets a field which is not in `honoured`; `why` has the words for some of them.

    A field counts as set when it is present, or, where its type knows no presence, when it is not the type's zero.

    Raises:
        UnsupportedFieldError: names the first such field.
    """
    for field, _ in message.ListFields():
        if field.name not in honoured:
            raise UnsupportedFieldError(request_id, field.name, why.get(field.name, "this server does not know it"))


def prompt_of(request_id: str, ids: Iterable[int], vocab_size: int) -> Int32Array:
    """A prompt's token ids, of which the engine checks the rest. Raises BadTokenError for one that is no int32."""
    tokens = np.fromiter(ids, dtype=np.uint32)
    if len(tokens) and tokens.max() >= 2**31:
        position = int((tokens >= 2**31).argmax())
        raise BadTokenError(request_id, position, int(tokens[position]), vocab_size)
    return tokens.view(np.int32)


def choices_of(request_id: str, n: int) -> int:
    """How many completions are wanted; 0 is an unset field. Raises BadParameterError."""
    if n > MAX_CHOICES:
        raise BadParameterError(request_id, "n", n, f"at most {MAX_CHOICES}")
    return max(1, n)


def limit_of(request_id: str, name: str, value: int) -> int:
    """A count of tokens, which may exceed an int32 on the wire. Raises BadParameterError."""
    if value >= 2**31:
        raise BadParameterError(request_id, name, value, f"an integer up to {2**31 - 1}")
    return value
