"""Every field of a gateway's request is honoured or refused; none is left out in silence."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

from scheduler_service.core.errors import BadParameterError, BadTokenError
from scheduler_service.gateway import tokenspeed, vllm
from scheduler_service.gateway.fields import UnsupportedFieldError, choices_of, limit_of, prompt_of, refuse_others

SERVICES = [
    pytest.param(tokenspeed, tokenspeed_scheduler_pb2, id="tokenspeed"),
    pytest.param(vllm, vllm_engine_pb2, id="vllm"),
]
_VALUES: dict[int, Any] = {
    FieldDescriptor.TYPE_STRING: "x",
    FieldDescriptor.TYPE_BYTES: b"x",
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_FLOAT: 0.5,
    FieldDescriptor.TYPE_DOUBLE: 0.5,
}


def set_field(message: Message, field: FieldDescriptor) -> None:
    """Give a field a value that is not its zero."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        getattr(message, field.name)[_VALUES.get(entry["key"].type, 1)] = _VALUES.get(entry["value"].type, 1)
    elif field.message_type is not None:
        target = getattr(message, field.name)
        target.add() if field.is_repeated else target.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).append(_VALUES.get(field.type, 1))
    else:
        setattr(message, field.name, _VALUES.get(field.type, 1))


@pytest.mark.parametrize(("service", "pb2"), SERVICES)
def test_every_field_is_honoured_or_refused_by_name(service: Any, pb2: Any) -> None:
    """Each field of the installed stubs is in one of two lists, and a refusal says which it was and why."""
    refused = set()
    for kind, honoured in ((pb2.GenerateRequest, service.REQUEST_FIELDS), (pb2.SamplingParams, service.SAMPLING_FIELDS)):
        assert honoured <= set(kind.DESCRIPTOR.fields_by_name)
        for field in kind.DESCRIPTOR.fields:
            message = kind()
            set_field(message, field)
            if field.name in honoured:
                refuse_others("r", message, honoured, service.REFUSED)
                continue
            refused.add(field.name)
            with pytest.raises(UnsupportedFieldError) as caught:
                refuse_others("r", message, honoured, service.REFUSED)
            assert caught.value.field == field.name
            assert service.REFUSED[field.name] in str(caught.value)
    assert refused == set(service.REFUSED)


@pytest.mark.parametrize(("service", "pb2"), SERVICES)
def test_unset_fields_ask_for_nothing(service: Any, pb2: Any) -> None:
    """Empty messages are not refused, whatever their fields are."""
    refuse_others("r", pb2.GenerateRequest(), (), {})
    refuse_others("r", pb2.SamplingParams(), (), {})


def test_prompt_ids_beyond_an_int32_are_refused_as_they_are() -> None:
    """An id that would wrap around to another one is named with its place."""
    assert prompt_of("r", [0, 5, 2**31 - 1], 9).tolist() == [0, 5, 2**31 - 1]
    with pytest.raises(BadTokenError) as caught:
        prompt_of("r", [1, 2**31, 2**32 - 1], 9)
    assert (caught.value.position, caught.value.token) == (1, 2**31)


def test_counts_out_of_range() -> None:
    """`n` has a limit, counts of tokens are int32."""
    assert [choices_of("r", n) for n in (0, 1, 128)] == [1, 1, 128]
    with pytest.raises(BadParameterError, match="n is 129"):
        choices_of("r", 129)
    assert limit_of("r", "max_tokens", 2**31 - 1) == 2**31 - 1
    with pytest.raises(BadParameterError, match="max_tokens is 2147483648"):
        limit_of("r", "max_tokens", 2**31)
