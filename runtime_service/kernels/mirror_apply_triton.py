"""The Triton kernel behind `mirror_apply`; `mirror_apply_naive` is its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Entries of one mirror row per program. The only compile-time constant, and it never changes.
BLOCK = 256


# Nothing that differs from step to step, or from one mirror to another, may select a new compilation: not the value of an
# integer, and not the alignment of a pointer, which is another one for a view.
@triton.jit(
    do_not_specialize=["num_rows", "row_stride", "entry_stride"],
    do_not_specialize_on_alignment=["mirror_ptr", "staged_ptr"],
)
def mirror_apply_kernel(mirror_ptr, staged_ptr, num_rows, row_stride, entry_stride, BLOCK: tl.constexpr):
    """One program writes up to BLOCK entries of one row; grid (num_rows, blocks of the longest write)."""
    num_rows_64 = tl.cast(num_rows, tl.int64)
    meta = staged_ptr + tl.program_id(0)
    row = tl.load(meta).to(tl.int64)
    src_begin = tl.load(meta + num_rows_64).to(tl.int64)
    copy_begin = tl.load(meta + 2 * num_rows_64).to(tl.int64)
    copy_len = tl.load(meta + 3 * num_rows_64).to(tl.int64)
    write_begin = tl.load(meta + 4 * num_rows_64).to(tl.int64)
    write_end = tl.load(meta + 5 * num_rows_64).to(tl.int64)

    block = tl.program_id(1).to(tl.int64)
    entry = write_begin + block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    written = entry < write_end
    offset = entry - copy_begin
    copied = written & (offset >= 0) & (offset < copy_len)

    page = tl.load(staged_ptr + 6 * num_rows_64 + src_begin + offset, mask=copied, other=0)
    # Products of a row or entry number and a stride pass 2^31 in large tables, hence int64 on both sides.
    target = row * tl.cast(row_stride, tl.int64) + entry * tl.cast(entry_stride, tl.int64)
    tl.store(mirror_ptr + target, page, mask=written)


def mirror_apply_triton(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
    """Launch the kernel once; arguments as in `mirror_apply`, already checked, and neither count is 0."""
    grid = (num_rows, triton.cdiv(max_write_len, BLOCK))
    mirror_apply_kernel[grid](mirror, staged, num_rows, mirror.stride(0), mirror.stride(1), BLOCK=BLOCK)
