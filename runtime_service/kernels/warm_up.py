"""Compile every kernel of a model's step before it is needed, by running each once on the padding row."""

from __future__ import annotations

import torch

from runtime_service.kernels.decode_attention import MIN_SPLIT, paged_decode_attention
from runtime_service.kernels.decode_inputs import decode_inputs
from runtime_service.kernels.kv_write import kv_write
from runtime_service.kernels.mirror_apply import mirror_apply
from runtime_service.kernels.prefill_attention import paged_prefill_attention
from runtime_service.kernels.row_digest import row_digest


def warm_up_mirror_kernels(req_to_page: torch.Tensor) -> None:
    """Run the kernels that keep and check the mirror, int32 [max_rows + 1, width], on its padding row, which stays empty."""
    device = req_to_page.device
    # Row 0: no page is copied, and its first entry is cleared.
    meta = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32)
    mirror_apply(req_to_page, meta.to(device), 1, 1)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    row_digest(req_to_page, zero, zero, zero)


def warm_up_kernels(layer_cache: torch.Tensor, req_to_page: torch.Tensor, num_heads: int, *, queries_per_row: int = 1) -> None:
    """Run every kernel on row 0 and the dummy page; later launches of the same model then compile nothing.

    A kernel is compiled once per dtype, head shape, page size and `queries_per_row`. Layers of one model share all of these,
    so one layer's cache stands for all. Only the dummy page is written.

    Args:
        layer_cache: [2, num_pages + 1, page_size, num_kv_heads, head_dim].
        req_to_page: int32 [max_rows + 1, width], the mirror.
        num_heads: query heads of the model.
        queries_per_row: of decode rows.
    """
    page_size, num_kv_heads, head_dim = layer_cache.shape[2:]
    device = layer_cache.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    query = torch.zeros((queries_per_row, num_heads, head_dim), dtype=layer_cache.dtype, device=device)
    heads = torch.zeros((1, num_kv_heads, head_dim), dtype=layer_cache.dtype, device=device)
    kv_write(heads, heads, layer_cache, zero)
    lengths = torch.zeros(len(req_to_page), dtype=torch.int64, device=device)
    decode_inputs(req_to_page, zero, lengths, page_size, width_tokens=req_to_page.shape[1] * page_size)
    # The second length is split where splitting is in question at all, and so also compiles the reduction.
    for max_seq_len in (1, MIN_SPLIT + 1):
        paged_decode_attention(
            query,
            layer_cache,
            req_to_page,
            zero,
            zero + 1,
            scale=1.0,
            queries_per_row=queries_per_row,
            max_seq_len=max_seq_len,
        )
    paged_prefill_attention(
        query[:1],
        layer_cache,
        req_to_page,
        zero,
        torch.arange(2, device=device),
        zero,
        scale=1.0,
        max_query_len=1,
        max_seq_len=1,
    )
