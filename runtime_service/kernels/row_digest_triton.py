"""The Triton kernel behind `row_digest`; `row_digest_naive` is its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime_service.kernels.launch import Launch
from runtime_service.kernels.row_digest import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

# Entries that one program mixes at a time.
BLOCK = 256

_GOLDEN = tl.constexpr(GOLDEN)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)


@triton.jit
def mixed(value):
    """splitmix64 of each entry of an int64 block, as int64 of the same bits."""
    x = value.to(tl.uint64) + tl.full(value.shape, _GOLDEN, tl.uint64)  # unsigned: shifts bring in zeros, products wrap
    x = (x ^ (x >> 30)) * tl.full(value.shape, _MULTIPLIER_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full(value.shape, _MULTIPLIER_2, tl.uint64)
    return (x ^ (x >> 31)).to(tl.int64)


@triton.jit(
    do_not_specialize=["row_stride"],
    do_not_specialize_on_alignment=["req_to_page_ptr", "rows_ptr", "row_lens_ptr", "valid_lens_ptr", "digests_ptr"],
)
def row_digest_kernel(
    req_to_page_ptr,
    rows_ptr,
    row_lens_ptr,
    valid_lens_ptr,
    digests_ptr,
    row_stride,
    BLOCK: tl.constexpr,
):
    """One program does one row; grid (rows,)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    row_len = tl.load(row_lens_ptr + index)
    valid_len = tl.load(valid_lens_ptr + index).to(tl.int32)
    entries_ptr = req_to_page_ptr + row * tl.cast(row_stride, tl.int64)
    lane = tl.arange(0, BLOCK)

    # The length's term is the first lane's first summand.
    length = tl.full([BLOCK], 0, tl.int64) + (-1 - row_len)
    total = tl.where(lane == 0, mixed(length), 0)
    for start in range(0, valid_len, BLOCK):
        place = start + lane
        valid = place < valid_len
        entry = tl.load(entries_ptr + place, mask=valid, other=0)
        total += tl.where(valid, mixed((place.to(tl.int64) << 32) + entry.to(tl.int64)), 0)
    tl.store(digests_ptr + index, tl.sum(total, axis=0))


def row_digest_launch(
    req_to_page: torch.Tensor, rows: torch.Tensor, row_lens: torch.Tensor, valid_lens: torch.Tensor, digests: torch.Tensor
) -> Launch:
    """The one launch of `row_digest` into `digests`; arguments checked, and at least one row."""
    return Launch(
        row_digest_kernel,
        (len(rows),),
        (req_to_page, rows, row_lens, valid_lens, digests, req_to_page.stride(0)),
        {"BLOCK": BLOCK, "num_warps": 4},
    )
