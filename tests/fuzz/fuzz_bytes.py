"""Messages with bytes changed that no field asked for."""

from __future__ import annotations

import random

from fuzz_columns import tagged, varint


class ByteMutator:
    """Changes serialised messages at random, in all the ways that the wire format can be wrong."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """Another message of bytes; `other` is one to splice with."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            data = self._once(data, other)
        return data

    def mutate_inside(self, data: bytes, other: bytes, field: int) -> bytes:
        """Change what field `field` of a message holds, and give it the right length, so that the outer message can be read."""
        return tagged(field, self.mutate(data, other))

    def _once(self, data: bytes, other: bytes) -> bytes:
        rng = self.rng
        at = rng.randint(0, len(data))
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 40)))
        kind = rng.randrange(10)
        if kind <= 2:
            return self._flip(data)
        if kind == 3:
            return data[:at]
        if kind == 4:
            return data[:at] + data[end:]
        if kind == 5:
            return data[:at] + rng.randbytes(rng.choice((1, 1, 4, 9))) + data[at:]
        if kind == 6:
            return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
        if kind == 7:
            return data[:at] + other[rng.randint(0, len(other)) :]
        if kind == 8:
            return data[:at] + self._field() + data[at:] if rng.random() < 0.5 else data + self._field()
        return rng.randbytes(rng.choice((0, 1, 3, 20, 200)))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\0"
        changed = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 1, 2, 8))):
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def _field(self) -> bytes:
        """A field that is unknown, of a wrong type, too long, deep, or a number that does not end."""
        rng = self.rng
        number = rng.choice((*range(22), 100, 19_000, 2**29 - 1))
        kind = rng.randrange(8)
        if kind == 0:
            return varint(number << 3) + varint(rng.choice((0, 1, 2, 2**31, 2**32, 2**64 - 1)))
        if kind == 1:
            return varint(number << 3) + b"\xff" * rng.choice((9, 10, 11)) + b"\x01"
        if kind == 2:
            return tagged(number, rng.randbytes(rng.choice((0, 1, 4, 8, 300))))
        if kind == 3:
            return varint(number << 3 | 2) + varint(rng.choice((2**31 - 1, 2**31, 2**32 - 1, 2**63))) + b"x"
        if kind == 4:
            return varint(number << 3 | rng.choice((1, 5))) + rng.randbytes(rng.choice((4, 8)))
        if kind == 5:
            depth = rng.choice((1, 50, 99, 101, 1000, 20_000))
            return varint(number << 3 | 3) * depth + varint(number << 3 | 4) * rng.choice((depth, depth - 1))
        if kind == 6:
            nested = b""
            for _ in range(rng.choice((2, 90, 120))):
                nested = tagged(number, nested)
            return nested
        return varint(number << 3 | rng.choice((6, 7)))
