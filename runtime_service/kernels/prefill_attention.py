"""Attention of prefill chunks over KV pages: ragged queries over a cached prefix and their own chunk, causal."""

from __future__ import annotations

import torch

from runtime_service.kernels.arguments import check_cache, check_index, check_query, check_table, on_host
from runtime_service.kernels.naive_attention import attend_token, read_row

MAX_GROUP = 64
"""Query heads that may share a KV head: they lie in one tile."""


def paged_prefill_attention(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    query_indptr: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Attend from every token of R rows to all tokens of its row up to itself.

    The Triton kernel on a GPU, the naive twin on the CPU.

    Args:
        query: [T, num_heads, head_dim], row by row. Head h reads KV head `h // (num_heads / num_kv_heads)`.
        layer_cache: [2, num_pages + 1, page_size, num_kv_heads, head_dim]; the tokens' own keys and values are in it.
        req_to_page: int32 [max_rows + 1, width], the mirror; page ids come from it and from nowhere else.
        rows: int64 [R], row numbers.
        query_indptr: int64 [R + 1]; tokens `[query_indptr[i], query_indptr[i + 1])` are row i's, all T of them someone's. A row
            without tokens is fine.
        num_computed: int64 [R], tokens of each row before these. What would lie past the mirror's width is not read: such
            tokens see the row up to its width.
        scale: factor of the scores before the softmax.
        max_query_len: at least the most tokens of a row, known on the host; a promise.
        max_seq_len: at least the longest row, its tokens included; likewise. The kernel reads true lengths, and no launch
            depends on it.

    Returns:
        [T, num_heads, head_dim] in the query's dtype, contiguous.

    Raises TypeError or ValueError for arguments the kernel cannot address, before anything is launched.
    """
    check_cache(layer_cache)
    check_query(query, layer_cache)
    check_table(req_to_page, layer_cache.device)
    check_index("rows", rows, None, layer_cache.device)
    check_index("query_indptr", query_indptr, len(rows) + 1, layer_cache.device)
    check_index("num_computed", num_computed, len(rows), layer_cache.device)
    group = query.shape[1] // layer_cache.shape[3]
    if group > MAX_GROUP:
        raise ValueError(f"{group} query heads share a KV head, more than {MAX_GROUP}")
    if len(query) == 0 or len(rows) == 0:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not 1 <= max_query_len <= max_seq_len:
        raise ValueError(f"max_query_len {max_query_len} is outside [1, max_seq_len {max_seq_len}]")
    if on_host(layer_cache):
        return paged_prefill_attention_naive(query, layer_cache, req_to_page, rows, query_indptr, num_computed, scale=scale)
    from runtime_service.kernels.prefill_attention_triton import prefill_attention_launch

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    prefill_attention_launch(query, layer_cache, req_to_page, rows, query_indptr, num_computed, out, scale, max_query_len).run()
    return out


def paged_prefill_attention_naive(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    query_indptr: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Do what the kernel does, token by token."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    width_tokens = req_to_page.shape[1] * layer_cache.shape[2]
    begins = query_indptr.tolist()
    for index, (row, computed) in enumerate(zip(rows.tolist(), num_computed.tolist(), strict=True)):
        begin, end = begins[index], begins[index + 1]
        keys, values = read_row(layer_cache, req_to_page[row], min(computed + end - begin, width_tokens))
        for token in range(begin, end):
            seen = computed + token - begin + 1  # past the width, slices end by themselves
            out[token] = attend_token(query[token], keys[:seen], values[:seen], scale)
    return out
