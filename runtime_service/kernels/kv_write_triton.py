"""The Triton kernel behind `kv_write`; `kv_write_naive` is its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime_service.kernels.launch import Launch, next_power_of_2

MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["keys_stride", "values_stride"], do_not_specialize_on_alignment=["out_cache_loc_ptr"])
def kv_write_kernel(
    keys_ptr,
    values_ptr,
    key_cache_ptr,
    value_cache_ptr,
    out_cache_loc_ptr,
    keys_stride,
    values_stride,
    TOKEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program copies up to BLOCK of the TOKEN_SIZE elements of one token; grid (tokens, blocks of a token)."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < TOKEN_SIZE
    target = tl.load(out_cache_loc_ptr + token) * TOKEN_SIZE + element
    # The hints are what the host has checked.
    keys_at = tl.multiple_of(token * tl.cast(keys_stride, tl.int64), 8) + element
    values_at = tl.multiple_of(token * tl.cast(values_stride, tl.int64), 8) + element
    tl.store(key_cache_ptr + target, tl.load(keys_ptr + keys_at, mask=inside), mask=inside)
    tl.store(value_cache_ptr + target, tl.load(values_ptr + values_at, mask=inside), mask=inside)


def kv_write_launch(keys: torch.Tensor, values: torch.Tensor, layer_cache: torch.Tensor, out_cache_loc: torch.Tensor) -> Launch:
    """The one launch of `kv_write`; arguments checked, and at least one token."""
    token_size = layer_cache.shape[3] * layer_cache.shape[4]
    block = min(next_power_of_2(token_size), MAX_BLOCK)
    return Launch(
        kv_write_kernel,
        (len(keys), triton.cdiv(token_size, block)),
        (keys, values, layer_cache[0], layer_cache[1], out_cache_loc, keys.stride(0), values.stride(0)),
        {"TOKEN_SIZE": token_size, "BLOCK": block, "num_warps": 4},
    )
