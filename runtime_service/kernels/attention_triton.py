"""The part that both attention kernels share: one block of cached positions against one tile of queries.

Online softmax as in "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018) and FlashAttention (Dao et al.,
2022), kept in float32 and in base 2: the caller's scale includes log2(e).

A tile has BLOCK_M lanes. The query heads that share a KV head lie in one tile, so that a key or value is loaded once for all
of them. Lanes past the tile's queries hold zeros and are never stored; positions that a lane must not see get the score
-inf, and memory at positions past `end` is not read at all, so that whatever lies there cannot matter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_heads(base_ptr, offset, used, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Load one head per lane, [lanes, HEAD_DIM_PADDED]; zeros past HEAD_DIM and, where MASKED, in lanes that are not used."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    pointers = base_ptr + offset[:, None] + dim[None, :]
    if MASKED:
        heads = tl.load(pointers, mask=used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != HEAD_DIM_PADDED:
        heads = tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        heads = tl.load(pointers)
    return heads


@triton.jit
def attend_block(
    query,
    peak,
    total,
    mixed,
    key_ptr,
    value_ptr,
    entries_ptr,
    start,
    end,
    limit,
    scale,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take positions `[start, start + BLOCK_N)` into the running softmax.

    `query` is [BLOCK_M, HEAD_DIM_PADDED]; `peak`, `total` and `mixed` are the largest score, the sum of weights and the
    weighted sum of values so far; `entries_ptr` is the row in req_to_page, `key_ptr` and `value_ptr` the KV head at slot 0.
    Lane m sees positions below `limit[m]`, which is at most `end`. Without MASKED all lanes see the whole block.
    """
    position = start + tl.arange(0, BLOCK_N)
    stored = position < end
    if MASKED:
        page = tl.load(entries_ptr + position // PAGE_SIZE, mask=stored, other=0)
    else:
        page = tl.load(entries_ptr + position // PAGE_SIZE)
    # A page id times the elements of a page passes 2^31 in large pools.
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    offset = slot * TOKEN_STRIDE

    keys = load_heads(key_ptr, offset, stored, HEAD_DIM, HEAD_DIM_PADDED, MASKED)
    # "ieee": float32 operands are multiplied as such and not as TF32; other dtypes do not look at it.
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(position[None, :] < limit[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = new_peak
    if MASKED:
        # A lane that has seen nothing has no peak to subtract: -inf minus -inf is not a number.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    carry = tl.exp2(peak - base)
    total = total * carry + tl.sum(weights, axis=1)
    values = load_heads(value_ptr, offset, stored, HEAD_DIM, HEAD_DIM_PADDED, MASKED)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * carry[:, None], input_precision="ieee")
    return new_peak, total, mixed
