"""Digests of page rows: what the runtime must find in its mirror, as one number a row.

    digest = sum over i in [0, valid_len) of mix(i * 2^32 + page_i)  +  mix(~row_len)     mod 2^64

with `mix` of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). Each entry is mixed with
its place, so that exchanged, shifted and missing entries change the sum. The last term tells apart rows of which the mirror
holds the same part. The definition and its test vectors are those of `ForwardOp.row_digests` in forward.proto.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.core.ops import Int32Array, UInt64Array

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MULTIPLIER_1 = np.uint64(0xBF58_476D_1CE4_E5B9)
_MULTIPLIER_2 = np.uint64(0x94D0_49BB_1331_11EB)


BLOCK = 256
"""Entries of a row that are mixed at a time: rows of very different lengths cost at most so many too much for each."""


def row_digests(
    table: Int32Array,
    rows: npt.NDArray[np.integer],
    valid_lens: npt.NDArray[np.integer],
    row_lens: npt.NDArray[np.integer],
) -> UInt64Array:
    """Digests of R rows, uint64 [R].

    Args:
        table: int32 [rows, width]; entries past a row's valid length are not looked at.
        rows: [R], lines of the table.
        valid_lens: [R], entries that the mirror holds.
        row_lens: [R], lengths of the whole rows in pages.
    """
    digests: UInt64Array = _mixed(~row_lens.astype(np.int64))
    longest = int(valid_lens.max(initial=0))
    for start in range(0, longest, BLOCK):
        stop = min(start + BLOCK, longest)
        which = np.flatnonzero(valid_lens > start)
        places = np.arange(start, stop)
        mixed = _mixed(table[rows[which], start:stop] + (places << 32))
        lens = valid_lens[which]
        if int(lens.min()) < stop:
            mixed *= places < lens[:, None]
        digests[which] += mixed.sum(axis=1)  # sums and products wrap at 2^64
    return digests


def _mixed(values: npt.NDArray[np.int64]) -> UInt64Array:
    """splitmix64 of each value, in its memory."""
    x: UInt64Array = values.view(np.uint64)
    shifted = np.empty_like(x)
    x += _GOLDEN
    x ^= np.right_shift(x, np.uint64(30), out=shifted)
    x *= _MULTIPLIER_1
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= _MULTIPLIER_2
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x
