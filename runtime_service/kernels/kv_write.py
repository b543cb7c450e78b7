"""Store the keys and values of a step's new tokens at their slots."""

from __future__ import annotations

import torch

from runtime_service.kernels.arguments import check_cache, check_heads, check_index, on_host


def kv_write(keys: torch.Tensor, values: torch.Tensor, layer_cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
    """Write T tokens into one layer's cache: the Triton kernel on a GPU, its naive twin on the CPU.

    Args:
        keys: [T, num_kv_heads, head_dim] in the cache's dtype; tokens may be apart (a view of fused projections).
        values: likewise.
        layer_cache: [2, num_pages + 1, page_size, num_kv_heads, head_dim], index 0 keys, 1 values.
        out_cache_loc: int64 [T], slots `page * page_size + offset`. Tokens past the mirror's width and padding rows have slots
            of the dummy page 0, several perhaps the same, of which any write may win; all other slots are distinct. Their
            range is the caller's promise.

    Raises TypeError or ValueError for arguments the kernel cannot address, before anything is written.
    """
    check_cache(layer_cache)
    for name, heads in (("keys", keys), ("values", values)):
        check_heads(name, heads, layer_cache)
        if heads.shape[1] != layer_cache.shape[3]:
            raise ValueError(f"{name} have {heads.shape[1]} heads, the cache {layer_cache.shape[3]}")
    check_index("out_cache_loc", out_cache_loc, len(keys), layer_cache.device)
    if len(values) != len(keys):
        raise ValueError(f"{len(values)} values for {len(keys)} keys")
    if len(keys) == 0:
        return
    if on_host(layer_cache):
        kv_write_naive(keys, values, layer_cache, out_cache_loc)
        return
    from runtime_service.kernels.kv_write_triton import kv_write_launch

    kv_write_launch(keys, values, layer_cache, out_cache_loc).run()


def kv_write_naive(keys: torch.Tensor, values: torch.Tensor, layer_cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
    """Do what the kernel does, by slot."""
    layer_cache[0].flatten(0, 1).index_copy_(0, out_cache_loc, keys)
    layer_cache[1].flatten(0, 1).index_copy_(0, out_cache_loc, values)
