"""Attention by the Triton kernels: extend rows by one launch, decode rows by another, pages read in place.

On CPU tensors the kernels' public functions run their naive twins, so this path is tested without a GPU.
"""

from __future__ import annotations

import torch

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kernels.decode_attention import DecodeWorkspace, paged_decode_attention
from runtime_service.kernels.kv_write import kv_write
from runtime_service.kernels.prefill_attention import paged_prefill_attention
from runtime_service.kv_cache import PagedKVCache


class KernelPlan:
    """The launches of one step; an `AttentionPlan`.

    `max_seq_len` comes from the batch's host columns: a batch to be captured states the longest rows it may be replayed with.
    """

    def __init__(self, batch: ForwardBatch, workspace: DecodeWorkspace | None = None) -> None:
        self._batch = batch
        self._workspace = workspace
        num_extend_rows = batch.num_extend_rows
        width = batch.req_to_page.shape[1] * batch.page_size
        ends = batch.host_num_computed.astype("int64") + batch.host_input_lens
        self._num_extend_tokens = int(batch.host_input_lens[:num_extend_rows].sum())
        self._max_query_len = int(batch.host_input_lens[:num_extend_rows].max(initial=1))
        self._max_extend_len = max(int(ends[:num_extend_rows].max(initial=1)), self._max_query_len)
        self._max_decode_len = min(int(ends[num_extend_rows:].max(initial=1)), width)

    def write(self, cache: PagedKVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `AttentionPlan`."""
        kv_write(keys, values, cache.layers[layer], self._batch.out_cache_loc)

    def attend(self, cache: PagedKVCache, layer: int, query: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan`."""
        batch, num_extend_rows, num_extend_tokens = self._batch, self._batch.num_extend_rows, self._num_extend_tokens
        scale = query.shape[-1] ** -0.5
        parts = []
        if num_extend_rows:
            parts.append(
                paged_prefill_attention(
                    query[:num_extend_tokens],
                    cache.layers[layer],
                    batch.req_to_page,
                    batch.rows[:num_extend_rows],
                    batch.query_indptr[: num_extend_rows + 1],
                    batch.num_computed[:num_extend_rows],
                    scale=scale,
                    max_query_len=self._max_query_len,
                    max_seq_len=self._max_extend_len,
                )
            )
        if num_extend_rows < len(batch.rows):
            parts.append(
                paged_decode_attention(
                    query[num_extend_tokens:],
                    cache.layers[layer],
                    batch.req_to_page,
                    batch.rows[num_extend_rows:],
                    batch.seq_lens[num_extend_rows:],
                    scale=scale,
                    max_seq_len=self._max_decode_len,
                    workspace=self._workspace,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
