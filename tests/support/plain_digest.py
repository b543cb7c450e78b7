"""Digests of page rows by their definition in forward.proto, on Python's own integers."""

from __future__ import annotations

from collections.abc import Sequence

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """As its authors wrote it down."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_digest(pages: Sequence[int], row_len: int | None = None) -> int:
    """Of the entries that the mirror holds, in a row of `row_len` pages; None: it holds the whole row."""
    length = len(pages) if row_len is None else row_len
    return (sum(splitmix64((i << 32) + page) for i, page in enumerate(pages)) + splitmix64(~length & MASK)) & MASK
