"""Attention of one row in plain torch: what both attention kernels must compute, written for reading."""

from __future__ import annotations

import torch


def read_row(layer_cache: torch.Tensor, entries: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions `[0, length)` of a row with pages `entries`, each float32 [length, kv heads, head_dim]."""
    page_size = layer_cache.shape[2]
    position = torch.arange(length, device=layer_cache.device)
    pages, offsets = entries[position // page_size].long(), position % page_size
    return layer_cache[0, pages, offsets].float(), layer_cache[1, pages, offsets].float()


def attend_token(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one token.

    Args:
        query: [num_heads, head_dim]; head h reads KV head `h // (num_heads / num_kv_heads)`.
        keys: what the token sees, float32 [length, num_kv_heads, head_dim]. Seeing nothing gives zeros.
        values: likewise.
        scale: factor of the scores before the softmax.

    Returns:
        [num_heads, head_dim] in the query's dtype.
    """
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    weights = (torch.einsum("hd,lhd->hl", query.float(), keys) * scale).softmax(dim=-1)
    return torch.einsum("hl,lhd->hd", weights, values).to(query.dtype)
