"""Columns of the wire: little-endian arrays in `bytes` fields, and what is wrong with bytes that are none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler_service.core.errors import InvalidRequestError
from scheduler_service.core.ops import Float32Array, Int32Array, UInt64Array
from scheduler_service.errors import ProtocolError

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT64 = np.dtype("<u8")


class BadColumnError(InvalidRequestError):
    """A column of a client's request is no array of int32."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes = name, num_bytes
        super().__init__(f"{name} has {num_bytes} bytes, but is a column of little-endian int32: a multiple of 4")


def int32_to_bytes(values: Int32Array | Sequence[int]) -> bytes:
    """A column of little-endian int32. Raises OverflowError when a value does not fit."""
    if type(values) is np.ndarray and values.dtype is _INT32:
        return values.tobytes()
    return np.asarray(values, dtype=_INT32).tobytes()


def int32_from_bytes(data: bytes, name: str) -> Int32Array:
    """The int32 array in a column of a client's request. Raises BadColumnError when the length is no multiple of 4."""
    if len(data) % 4:
        raise BadColumnError(name, len(data))
    return np.frombuffer(data, dtype=_INT32)


def float32_to_bytes(values: Sequence[float]) -> bytes:
    """A column of little-endian float32."""
    return np.asarray(values, dtype=_FLOAT32).tobytes()


def float32_from_bytes(data: bytes) -> list[float]:
    """The values in a column of float32; a rest that is no whole entry raises ValueError."""
    values: list[float] = np.frombuffer(data, dtype=_FLOAT32).tolist()
    return values


def uint64_to_bytes(values: UInt64Array | None) -> bytes:
    """A column of little-endian uint64; None: the empty one."""
    return b"" if values is None else values.astype(_UINT64, copy=False).tobytes()


def uint64_of_peer(data: bytes, what: str) -> UInt64Array:
    """A column of uint64 that the runtime sent. Raises ProtocolError when it is none."""
    if len(data) % 8:
        raise ProtocolError(f"{what}: {len(data)} bytes are no column of uint64")
    return np.frombuffer(data, dtype=_UINT64)


def float32_of_peer(data: bytes, what: str, length: int) -> Float32Array:
    """A column of `length` float32 that the runtime sent. Raises ProtocolError when it is none."""
    if len(data) != 4 * length:
        raise ProtocolError(f"{what}: {len(data)} bytes, but {length} float32 take {4 * length}")
    return np.frombuffer(data, dtype=_FLOAT32)


def int32_of_peer(data: bytes, what: str) -> Int32Array:
    """A column of int32 that the runtime sent. Raises ProtocolError when it is none."""
    if len(data) % 4:
        raise ProtocolError(f"{what}: {len(data)} bytes are no column of int32")
    return np.frombuffer(data, dtype=_INT32)
