"""The Triton kernel behind `decode_inputs`; `decode_inputs_naive` is its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime_service.kernels.launch import Launch

BLOCK = 128


@triton.jit(
    do_not_specialize=["num_rows", "row_stride", "width_tokens"],
    do_not_specialize_on_alignment=[
        "req_to_page_ptr",
        "rows_ptr",
        "lengths_ptr",
        "positions_ptr",
        "seq_lens_ptr",
        "out_cache_loc_ptr",
    ],
)
def decode_inputs_kernel(
    req_to_page_ptr,
    rows_ptr,
    lengths_ptr,
    positions_ptr,
    seq_lens_ptr,
    out_cache_loc_ptr,
    num_rows,
    row_stride,
    width_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program does BLOCK rows of the batch; grid (blocks,)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = index < num_rows
    row = tl.load(rows_ptr + index, mask=used, other=0)
    position = tl.load(lengths_ptr + row, mask=used & (row != 0), other=0)
    inside = used & (position < width_tokens)
    entry = row * tl.cast(row_stride, tl.int64) + position // PAGE_SIZE
    page = tl.load(req_to_page_ptr + entry, mask=inside, other=0).to(tl.int64)
    tl.store(positions_ptr + index, position, mask=used)
    tl.store(seq_lens_ptr + index, tl.minimum(position + 1, tl.cast(width_tokens, tl.int64)), mask=used)
    tl.store(out_cache_loc_ptr + index, page * PAGE_SIZE + position % PAGE_SIZE, mask=used)


def decode_inputs_launch(
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    width_tokens: int,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> Launch:
    """The one launch of `decode_inputs` into its three results; arguments checked, and at least one row."""
    tensors = (req_to_page, rows, lengths, positions, seq_lens, out_cache_loc)
    return Launch(
        decode_inputs_kernel,
        (triton.cdiv(len(rows), BLOCK),),
        (*tensors, len(rows), req_to_page.stride(0), width_tokens),
        {"PAGE_SIZE": page_size, "BLOCK": BLOCK, "num_warps": 4},
    )
