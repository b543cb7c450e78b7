"""The Triton kernel behind `paged_prefill_attention`; `paged_prefill_attention_naive` is its definition."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from runtime_service.kernels.attention_triton import attend_block, load_heads
from runtime_service.kernels.launch import Launch, next_power_of_2


@triton.jit(
    do_not_specialize=["width_tokens", "row_stride", "query_stride"],
    do_not_specialize_on_alignment=["req_to_page_ptr", "rows_ptr", "query_indptr_ptr", "num_computed_ptr"],
)
def prefill_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    req_to_page_ptr,
    rows_ptr,
    query_indptr_ptr,
    num_computed_ptr,
    out_ptr,
    scale,
    width_tokens,
    row_stride,
    query_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program does a tile of BLOCK_M // GROUP tokens of one row for one KV head.

    Grid (tiles of the longest row, KV heads, rows). The last tile of a row sees most and is started first.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2).to(tl.int64)
    first = tl.load(query_indptr_ptr + index)
    num_queries = (tl.load(query_indptr_ptr + index + 1) - first).to(tl.int32)
    tile_begin = (tile * TILE_TOKENS).to(tl.int32)
    if tile_begin >= num_queries:
        return
    row = tl.load(rows_ptr + index)
    computed = tl.load(num_computed_ptr + index).to(tl.int32)
    width = tl.cast(width_tokens, tl.int32)

    lane = tl.arange(0, BLOCK_M)
    number = tile_begin + lane // GROUP
    used = (lane < TILE_TOKENS * GROUP) & (number < num_queries)
    limit = tl.where(used, tl.minimum(computed + number + 1, width), 0)
    token = first + number
    head = kv_head * GROUP + lane % GROUP
    # The hint is what the host has checked.
    query_at = tl.multiple_of(token * tl.cast(query_stride, tl.int64), 8) + head * HEAD_DIM
    query = load_heads(query_ptr, query_at, used, HEAD_DIM, HEAD_DIM_PADDED, True)

    keys_at = key_ptr + kv_head * HEAD_DIM
    values_at = value_ptr + kv_head * HEAD_DIM
    entries_at = req_to_page_ptr + row * tl.cast(row_stride, tl.int64)
    # Every token of the tile sees all of what its first one sees; of that, whole blocks need no mask.
    shared = tl.minimum(computed + tile_begin + 1, width)
    shared = shared - shared % BLOCK_N
    end = tl.minimum(computed + tl.minimum(tile_begin + TILE_TOKENS, num_queries), width)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    for start in range(0, shared, BLOCK_N):
        peak, total, mixed = attend_block(
            query,
            peak,
            total,
            mixed,
            keys_at,
            values_at,
            entries_at,
            start,
            end,
            limit,
            scale,
            PAGE_SIZE,
            TOKEN_STRIDE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_N,
            False,
        )
    for start in range(shared, end, BLOCK_N):
        peak, total, mixed = attend_block(
            query,
            peak,
            total,
            mixed,
            keys_at,
            values_at,
            entries_at,
            start,
            end,
            limit,
            scale,
            PAGE_SIZE,
            TOKEN_STRIDE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_N,
            True,
        )

    dim = tl.arange(0, HEAD_DIM_PADDED)
    stored = used[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=stored)


def prefill_attention_launch(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    query_indptr: torch.Tensor,
    num_computed: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    max_query_len: int,
) -> Launch:
    """The one launch of `paged_prefill_attention` into `out`; arguments checked, at least one token."""
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = layer_cache.shape[2:4]
    group = num_heads // num_kv_heads
    head_dim_padded = max(next_power_of_2(head_dim), 16)
    block_m, block_n, num_warps = _tile(head_dim_padded, query.dtype)
    return Launch(
        prefill_attention_kernel,
        (triton.cdiv(max_query_len, block_m // group), num_kv_heads, len(rows)),
        (
            *(query, layer_cache[0], layer_cache[1], req_to_page, rows, query_indptr, num_computed, out),
            *(scale * math.log2(math.e), req_to_page.shape[1] * page_size, req_to_page.stride(0), query.stride(0)),
        ),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": head_dim_padded,
            "PAGE_SIZE": page_size,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": num_warps,
            "num_stages": 2,
        },
    )


def _tile(head_dim_padded: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Lanes, positions a block, and warps; what the tests that compile for real GPUs hold to be free of spills."""
    if dtype == torch.float32:
        return (64, 32, 8) if head_dim_padded <= 128 else (64, 16, 8)
    if head_dim_padded <= 64:
        return 128, 64, 8
    return (64, 64, 8) if head_dim_padded == 128 else (64, 32, 8)
