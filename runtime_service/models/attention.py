"""Attention over KV pages in plain torch: gather the pages that the mirror names, then one scaled dot product.

What a batch reads is worked out once per step (`plan_attention`) and used by every layer. Decode rows are padded to the
longest and attend in one call; extend rows (prefill chunks, also behind a cached prefix) attend one by one, because their
shapes differ. A row never gathers a slot that it did not write: padding repeats the row's own first slot. Masking foreign
slots would not do, since a weight of zero times a not-a-number left in a page is not a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache

MAX_GATHERED_TOKENS = 1 << 18
"""Decode rows times padded length of one call; longer batches are cut, so that the copies stay small beside the cache."""


@dataclass(slots=True)
class DecodeReads:
    """D decode rows that attend together, padded to L tokens."""

    begin: int  # their tokens are [begin, end) of the batch
    end: int
    slots: torch.Tensor  # int64 [D, L]
    mask: torch.Tensor  # bool [D, 1, 1, L], True: attend


@dataclass(slots=True)
class ExtendReads:
    """One extend row: Q query tokens over N cached and new ones."""

    begin: int  # its tokens are [begin, end) of the batch
    end: int
    slots: torch.Tensor  # int64 [N]
    mask: torch.Tensor  # bool [Q, N], True: attend


@dataclass(slots=True)
class AttentionPlan:
    """What each row of a step reads, the same for every layer."""

    extend: list[ExtendReads]
    decode: list[DecodeReads]


def plan_attention(batch: ForwardBatch) -> AttentionPlan:
    """Works out from the mirror which slots each row reads."""
    device = batch.req_to_page.device
    width = batch.req_to_page.shape[1] * batch.page_size
    lens = [min(length, width) for length in (batch.host_num_computed + batch.host_input_lens).tolist()]
    num_queries = batch.host_input_lens.tolist()
    extend, begin = [], 0
    for row in range(batch.num_extend_rows):
        end = begin + num_queries[row]
        slots = _row_slots(batch, row, row + 1, lens[row])[0]
        mask = torch.arange(lens[row], device=device) <= batch.positions[begin:end, None]
        extend.append(ExtendReads(begin, end, slots, mask))
        begin = end
    decode, row = [], batch.num_extend_rows
    while row < batch.num_rows:
        stop, longest = row + 1, lens[row]
        while stop < batch.num_rows and max(longest, lens[stop]) * (stop + 1 - row) <= MAX_GATHERED_TOKENS:
            longest = max(longest, lens[stop])
            stop += 1
        slots = _row_slots(batch, row, stop, longest)
        valid = torch.arange(longest, device=device) < batch.seq_lens[row:stop, None]
        slots = torch.where(valid, slots, slots[:, :1])
        decode.append(DecodeReads(begin, begin + stop - row, slots, valid[:, None, None, :]))
        begin += stop - row
        row = stop
    return AttentionPlan(extend, decode)


def _row_slots(batch: ForwardBatch, first: int, stop: int, length: int) -> torch.Tensor:
    """Slots of positions [0, length) of rows [first, stop) of the batch, int64 [stop - first, length]."""
    num_pages = -(-length // batch.page_size)
    pages = batch.req_to_page[batch.rows[first:stop], :num_pages].long()
    offsets = torch.arange(batch.page_size, device=pages.device)
    return (pages[:, :, None] * batch.page_size + offsets).flatten(1)[:, :length]


def attend(plan: AttentionPlan, cache: PagedKVCache, layer: int, query: torch.Tensor) -> torch.Tensor:
    """Attention of all tokens of a step; their keys and values must have been written.

    Args:
        plan: of this batch.
        cache: KV pages.
        layer: layer number.
        query: [T, num_heads, head_dim], rotated. Query heads share KV heads in groups (GQA).

    Returns:
        [T, num_heads * head_dim].
    """
    num_kv_heads = cache.layers[layer].shape[3]
    grouped = query.reshape(len(query), num_kv_heads, -1, query.shape[-1])  # [T, kv heads, group, head_dim]
    out = torch.empty_like(grouped)
    for reads in plan.extend:
        keys, values = cache.read(layer, reads.slots)
        # Queries become [kv heads, group, Q, head_dim]; a KV head is repeated over its group without a copy.
        queries = grouped[reads.begin : reads.end].permute(1, 2, 0, 3)
        group = queries.shape[1]
        keys = keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        values = values.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=reads.mask)
        out[reads.begin : reads.end] = mixed.permute(2, 0, 1, 3)
    for several in plan.decode:
        keys, values = cache.read(layer, several.slots)
        # A decode row has one query token, so the heads of a group take the place of query positions.
        out[several.begin : several.end] = scaled_dot_product_attention(
            grouped[several.begin : several.end], keys.transpose(1, 2), values.transpose(1, 2), attn_mask=several.mask
        )
    return out.flatten(1)
