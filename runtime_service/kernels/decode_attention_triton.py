"""The Triton kernels behind `paged_decode_attention`; `paged_decode_attention_naive` is their definition.

Flash-decoding (Dao, Haziza, Massa, Sizov, 2023): splits of a row's KV length are attended to side by side, each leaving its
unnormalised result, its largest score and its sum of weights, and a second kernel joins them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from runtime_service.kernels.attention_triton import attend_block, load_heads
from runtime_service.kernels.decode_attention import MIN_SPLIT, DecodeWorkspace, max_splits
from runtime_service.kernels.launch import Launch, next_power_of_2

# Splits that the second kernel loads at once.
REDUCE_BLOCK = 16


@triton.jit
def positions_per_split(length, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Length of a row's splits, int64, from the row's own length alone: the batch must not move its cuts."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, MAX_SPLITS), MIN_SPLIT), 1).to(tl.int64) * MIN_SPLIT


@triton.jit(
    do_not_specialize=["num_splits", "width_tokens", "row_stride", "query_stride"],
    do_not_specialize_on_alignment=["req_to_page_ptr", "rows_ptr", "seq_lens_ptr", "partial_ptr", "stats_ptr"],
)
def decode_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    req_to_page_ptr,
    rows_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale,
    num_splits,
    width_tokens,
    row_stride,
    query_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program does one split of one row for one KV head and all queries on it; grid (rows, KV heads, splits).

    With one split it writes the result itself, else what `reduce_splits_kernel` needs.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + index)
    length = tl.minimum(tl.load(seq_lens_ptr + index), tl.cast(width_tokens, tl.int64)).to(tl.int32)
    begin = 0
    end = length
    if num_splits > 1:
        split_len = positions_per_split(length, MIN_SPLIT, MAX_SPLITS)
        begin = tl.minimum(split * split_len, length).to(tl.int32)
        end = tl.minimum(begin + split_len, length).to(tl.int32)
    if (num_splits > 1) & (begin >= end):
        return

    lane = tl.arange(0, BLOCK_M)
    number = lane // GROUP
    used = lane < GROUP * QUERIES
    limit = tl.where(used, tl.minimum(end, length - (QUERIES - 1 - number)), 0)
    token = index * QUERIES + number
    head = kv_head * GROUP + lane % GROUP
    # The hint is what the host has checked.
    query_at = tl.multiple_of(token * tl.cast(query_stride, tl.int64), 8) + head * HEAD_DIM
    query = load_heads(query_ptr, query_at, used, HEAD_DIM, HEAD_DIM_PADDED, True)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    for start in range(begin, end, BLOCK_N):
        peak, total, mixed = attend_block(
            query,
            peak,
            total,
            mixed,
            key_ptr + kv_head * HEAD_DIM,
            value_ptr + kv_head * HEAD_DIM,
            req_to_page_ptr + row * tl.cast(row_stride, tl.int64),
            start,
            end,
            limit,
            scale,
            PAGE_SIZE,
            NUM_KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_N,
            True,
        )

    dim = tl.arange(0, HEAD_DIM_PADDED)
    stored = used[:, None] & (dim < HEAD_DIM)[None, :]
    out_at = token * NUM_HEADS + head
    if num_splits == 1:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + out_at[:, None] * HEAD_DIM + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        partial_at = out_at * tl.cast(num_splits, tl.int64) + split
        tl.store(partial_ptr + partial_at[:, None] * HEAD_DIM + dim[None, :], mixed, mask=stored)
        tl.store(stats_ptr + partial_at * 2, peak, mask=used)
        tl.store(stats_ptr + partial_at * 2 + 1, total, mask=used)


@triton.jit(
    do_not_specialize=["num_splits", "width_tokens"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "partial_ptr", "stats_ptr"],
)
def reduce_splits_kernel(
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    num_splits,
    width_tokens,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program joins the splits of one head of one token, of which those past the row's length were never written.

    Grid (tokens, heads).
    """
    token = tl.program_id(0).to(tl.int64)
    out_at = token * tl.num_programs(1) + tl.program_id(1)
    length = tl.minimum(tl.load(seq_lens_ptr + token // QUERIES), tl.cast(width_tokens, tl.int64)).to(tl.int32)
    written = tl.cdiv(length, positions_per_split(length, MIN_SPLIT, MAX_SPLITS).to(tl.int32))
    dim = tl.arange(0, HEAD_DIM_PADDED)
    inside = dim < HEAD_DIM

    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for start in range(0, written, BLOCK):
        split = start + tl.arange(0, BLOCK)
        used = split < written
        at = out_at * tl.cast(num_splits, tl.int64) + split
        peaks = tl.load(stats_ptr + at * 2, mask=used, other=float("-inf"))
        totals = tl.load(stats_ptr + at * 2 + 1, mask=used, other=0.0)
        parts = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        carry = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base)
        total = total * carry + tl.sum(totals * weights, axis=0)
        mixed = mixed * carry + tl.sum(parts * weights[:, None], axis=0)
        peak = new_peak
    result = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + out_at * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=inside)


def decode_attention_launches(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    scale: float,
    queries_per_row: int,
    num_splits: int,
    min_split: int = MIN_SPLIT,
) -> list[Launch]:
    """The launches of `paged_decode_attention` into `out`, two of them when split; arguments checked, at least one row.

    A `min_split` below MIN_SPLIT is for tests of splitting short rows.
    """
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = layer_cache.shape[2:4]
    group = num_heads // num_kv_heads
    head_dim_padded = max(next_power_of_2(head_dim), 16)
    # The matrix units take 16 lanes at the least.
    block_m = max(next_power_of_2(group * queries_per_row), 16)
    block_n, num_warps = _tile(head_dim_padded, block_m, query.dtype)
    splits = {"MIN_SPLIT": min_split, "MAX_SPLITS": max_splits(num_kv_heads)}
    heads = {"QUERIES": queries_per_row, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": head_dim_padded}
    width_tokens = req_to_page.shape[1] * page_size
    partial = (workspace.partial, workspace.stats)
    attend = Launch(
        decode_attention_kernel,
        (len(rows), num_kv_heads, num_splits),
        (
            *(query, layer_cache[0], layer_cache[1], req_to_page, rows, seq_lens, out, *partial),
            *(scale * math.log2(math.e), num_splits, width_tokens, req_to_page.stride(0), query.stride(0)),
        ),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "PAGE_SIZE": page_size,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": num_warps,
            "num_stages": 2,
            **heads,
            **splits,
        },
    )
    if num_splits == 1:
        return [attend]
    reduce = Launch(
        reduce_splits_kernel,
        (len(query), num_heads),
        (seq_lens, out, *partial, num_splits, width_tokens),
        {"BLOCK": REDUCE_BLOCK, "num_warps": 4, **heads, **splits},
    )
    return [attend, reduce]


def _tile(head_dim_padded: int, block_m: int, dtype: torch.dtype) -> tuple[int, int]:
    """Positions a block and warps; what the tests that compile for real GPUs hold to be free of spills."""
    if dtype == torch.float32:
        return (32, 4) if head_dim_padded <= 128 else (16, 4)
    if block_m > 32:
        return 32, 8
    if head_dim_padded <= 64:
        return 64, 4
    return (64, 8) if head_dim_padded == 128 else (32, 4)
