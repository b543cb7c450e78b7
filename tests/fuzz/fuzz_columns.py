"""Columns of the wire and digests of page rows, by their definitions in forward.proto."""

from __future__ import annotations

import struct
from collections.abc import Sequence

WORD = 2**64


def ints(data: bytes) -> list[int] | None:
    """A column of int32; None where it is none."""
    return list(struct.unpack(f"<{len(data) // 4}i", data)) if len(data) % 4 == 0 else None


def longs(data: bytes) -> list[int] | None:
    """A column of uint64; None where it is none."""
    return list(struct.unpack(f"<{len(data) // 8}Q", data)) if len(data) % 8 == 0 else None


def pack(values: Sequence[int]) -> bytes:
    """A column of int32; a value that is none loses its upper bits."""
    return struct.pack(f"<{len(values)}I", *(value % 2**32 for value in values))


def pack_longs(values: Sequence[int]) -> bytes:
    """A column of uint64."""
    return struct.pack(f"<{len(values)}Q", *(value % WORD for value in values))


def row_digest(valid_pages: list[int], row_len: int) -> int:
    """Digest of a row whose first pages, as far as the mirror holds them, are these."""
    digest = splitmix64(~row_len % WORD)
    for i, page in enumerate(valid_pages):
        digest += splitmix64((i << 32) + page)
    return digest % WORD


def splitmix64(x: int) -> int:
    """One output of the generator of Steele, Lea and Flood (2014)."""
    x = (x + 0x9E37_79B9_7F4A_7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB % WORD
    return x ^ (x >> 31)


def varint(value: int) -> bytes:
    """A number as the wire format writes it."""
    groups = []
    while value >= 128:
        groups.append(value % 128 + 128)
        value //= 128
    return bytes([*groups, value])


def tagged(field: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return varint(field << 3 | 2) + varint(len(data)) + data
