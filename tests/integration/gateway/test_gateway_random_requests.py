"""Requests with any values in their fields: each is served or refused with a status that says why, and nothing breaks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

GatewayOf = Callable[..., AbstractAsyncContextManager[Any]]

WORDS = ["", "x", "-1", "5", "996", "99999999999999999999", "w5 ", "é😀", "\0", "y" * 2000]
REALS = [0.0, -0.0, 0.5, 1.0, -1.0, 2.5, 1e-45, 3e38, math.inf, -math.inf, math.nan]
SIGNED = [0, 1, -1, 2, 5, 996, 997, 2**31 - 1, -(2**31)]
UNSIGNED = [0, 1, 2, 5, 30, 996, 997, 2**31, 2**32 - 1]
LARGE = [0, 1, 2**63, 2**64 - 1]

EXPECTED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


def value_of(dice: random.Random, field: FieldDescriptor) -> Any:
    """Any value of the field's type, extremes above all."""
    kinds: dict[int, Any] = {
        FieldDescriptor.TYPE_STRING: WORDS,
        FieldDescriptor.TYPE_BYTES: [b"", b"\0\xff"],
        FieldDescriptor.TYPE_BOOL: [True, False],
        FieldDescriptor.TYPE_FLOAT: REALS,
        FieldDescriptor.TYPE_DOUBLE: REALS,
        FieldDescriptor.TYPE_INT32: SIGNED,
        FieldDescriptor.TYPE_INT64: SIGNED,
        FieldDescriptor.TYPE_UINT64: LARGE,
        FieldDescriptor.TYPE_ENUM: [0, 1],
    }
    return dice.choice(kinds.get(field.type, UNSIGNED))


def fill(dice: random.Random, message: Message, share: float) -> None:
    """Give about this share of a message's fields a value."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            if entry["value"].message_type is None:
                getattr(message, field.name)[value_of(dice, entry["key"])] = value_of(dice, entry["value"])
        elif field.message_type is not None:
            target = getattr(message, field.name)
            inner = target.add() if field.is_repeated else target
            inner.SetInParent()
            if not field.message_type.full_name.startswith("google."):
                fill(dice, inner, share)
        elif field.is_repeated:
            getattr(message, field.name).extend(value_of(dice, field) for _ in range(dice.randrange(4)))
        else:
            setattr(message, field.name, value_of(dice, field))


async def test_any_request_is_served_or_refused_with_a_reason(gateway: GatewayOf, word_tokenizer: Path) -> None:
    """Good requests with a few fields changed, and messages of nothing but chance."""
    dice = random.Random(31)
    async with gateway(max_context=60, gateway_tokenizer=word_tokenizer, max_waiting=200) as served:
        served_well = 0
        for _ in range(300):
            request = served.api.request([1, 2, 3], 5, stream=dice.random() < 0.5)
            if dice.random() < 0.2:
                request.Clear()
                fill(dice, request, dice.random())
            else:
                fill(dice, request.sampling_params, 0.15 * dice.random())
            call = served.stub.Generate(request)
            code, ends, details = grpc.StatusCode.OK, 0, ""
            try:
                async for message in call:
                    ends += message.HasField("complete")
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
            assert code in EXPECTED, (code, details, request)
            if code is grpc.StatusCode.OK:
                served_well += 1
                assert ends == max(1, request.sampling_params.n)
            else:
                assert len(details) > 10
        assert served_well >= 30
        assert not served.engine.core.requests
