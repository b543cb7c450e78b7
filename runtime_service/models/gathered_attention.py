"""Attention in plain torch: gather the slots that the mirror names, then one scaled dot product for many rows.

Rows are batched by length. A batch pads its rows to the longest one, so its rows are of similar length; but rows that differ
more share a batch where the padding costs less than one more call. Everything that depends on lengths is worked out on the host
once a step, in numpy, without a loop over rows.

A row never gathers a slot that it did not write: padding repeats the row's own first slot. Masking foreign slots would not do,
since a weight of zero times a not-a-number left in a page is not a number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime_service.forward_batch import ForwardBatch
from runtime_service.kv_cache import PagedKVCache
from runtime_service.upload import upload

MAX_GATHERED_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
"""Keys and values of one call; longer batches are cut. On a CPU the copies are then still in its cache when they are read, on a
GPU they stay small beside its memory."""
MAX_MASK_ELEMENTS = 1 << 22
"""Queries times keys of one call that needs a mask over both."""
CALL_ELEMENTS = 1 << 16
"""Gathered keys, in elements, that take about as much time as one more call, measured on a CPU."""

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """Rows of a batch on the host, or pieces of their chunks: M of each."""

    index: Int64Array  # [M] into the rows of the batch
    first: Int64Array  # [M] their first token in the batch
    starts: Int64Array  # [M] position of that token
    num_queries: Int64Array  # [M]
    lens: Int64Array  # [M] keys that the last query may see

    def __len__(self) -> int:
        return len(self.index)

    def select(self, which: npt.NDArray[np.intp]) -> Rows:
        """Some of them."""
        return Rows(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(slots=True)
class Reads:
    """N rows that attend in one call, padded to Q queries and L keys."""

    num_rows: int
    num_queries: int
    length: int
    slots: torch.Tensor  # int64 [2 * N * L], lines of the layer's keys, then of its values
    mask: torch.Tensor | None  # [N, 1, Q, L], 0 or minus infinity; None: all keys, or the causal ones
    causal: bool  # query i sees keys [0, i]
    tokens: slice | torch.Tensor  # of the batch, N * Q of them: int64 [N * Q] where padded or apart
    real: torch.Tensor | None  # int64, which of the N * Q are no padding; None: all
    real_tokens: torch.Tensor | None  # the tokens of the batch that these are


class GatherPlan:
    """The calls of one step; an `AttentionPlan`."""

    def __init__(self, reads: list[Reads], out_cache_loc: torch.Tensor) -> None:
        self.reads = reads
        self._out_cache_loc = out_cache_loc

    def write(self, cache: PagedKVCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `AttentionPlan`."""
        cache.write(layer, self._out_cache_loc, keys, values)

    def attend(self, cache: PagedKVCache, layer: int, query: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan`."""
        num_tokens, _, head_dim = query.shape
        num_kv_heads = cache.layers[layer].shape[3]
        out = None
        for reads in self.reads:
            keys, values = cache.gather(layer, reads.slots).view(2, reads.num_rows, reads.length, num_kv_heads, head_dim)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            queries = query[reads.tokens]
            if reads.num_queries == 1:
                # One query token a row: the heads of a group (GQA) take the place of query positions.
                grouped = queries.view(reads.num_rows, num_kv_heads, -1, head_dim)
                mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=reads.mask).reshape(queries.shape)
            else:
                several = queries.view(reads.num_rows, reads.num_queries, -1, head_dim).transpose(1, 2)
                mixed = scaled_dot_product_attention(
                    several, keys, values, attn_mask=reads.mask, is_causal=reads.causal, enable_gqa=True
                )
                mixed = mixed.transpose(1, 2).reshape(queries.shape)
            if reads.real is not None:
                mixed = mixed.index_select(0, reads.real)
            if len(mixed) == num_tokens and reads.real is None:
                return mixed if isinstance(reads.tokens, slice) else torch.empty_like(mixed).index_copy_(0, reads.tokens, mixed)
            out = torch.empty_like(query) if out is None else out
            if reads.real_tokens is not None:
                out.index_copy_(0, reads.real_tokens, mixed)
            else:
                out[reads.tokens] = mixed
        assert out is not None
        return out


def plan_gathers(batch: ForwardBatch, cache: PagedKVCache) -> GatherPlan:
    """Batches the rows of a step by their lengths."""
    width = batch.req_to_page.shape[1] * batch.page_size
    starts, num_queries = batch.host_num_computed.astype(np.int64), batch.host_input_lens.astype(np.int64)
    first = np.cumsum(num_queries) - num_queries
    rows = Rows(np.arange(batch.num_rows), first, starts, num_queries, np.minimum(starts + num_queries, width))
    elements = cache.layers[0].shape[3] * cache.layers[0].shape[4]
    max_tokens = max(1, MAX_GATHERED_BYTES[batch.req_to_page.device.type] // (2 * elements * cache.layers[0].element_size()))
    single = rows.num_queries == 1
    reads = []
    if single.any():
        ones = rows.select(np.flatnonzero(single))
        for which in _decode_batches(ones.lens, CALL_ELEMENTS // elements):
            reads += _decode_reads(batch, cache, ones.select(which), max_tokens)
    if not single.all():
        several = rows.select(np.flatnonzero(~single))
        fresh = several.starts == 0
        for part, masked in ((several.select(np.flatnonzero(fresh)), False), (several.select(np.flatnonzero(~fresh)), True)):
            pieces = _cut(part) if masked else part
            parts = _extend_batches(pieces, masked, max_tokens)
            reads += [_extend_reads(batch, cache, pieces.select(which), masked) for which in parts]
    return GatherPlan(reads, batch.out_cache_loc)


def _rounded_up(lens: Int64Array, steps: int) -> Int64Array:
    """Lengths rounded up to one of `steps` values between a power of two and the next: the padding is below 1 / steps."""
    step = np.exp2(np.floor(np.log2(np.maximum(lens, 1)))).astype(np.int64) // steps
    step = np.maximum(step, 1)
    return -(-lens // step) * step


def _decode_batches(lens: Int64Array, call_tokens: int) -> list[npt.NDArray[np.intp]]:
    """Splits rows of one query each; each part is ascending.

    From the longest rows down, those of the next length join a batch where padding them is cheaper than a call of their own.
    """
    if int(lens.min()) == (longest := int(lens.max())):
        return [np.arange(len(lens))]
    lengths, which, counts = np.unique(_rounded_up(lens, 8), return_inverse=True, return_counts=True)
    batch_of = np.zeros(len(lengths), dtype=np.int64)
    batch = 0
    for i in range(len(lengths) - 1, -1, -1):  # over lengths, of which there are at most 8 for each power of two
        length = int(lengths[i])
        if (longest - length) * int(counts[i]) > call_tokens:
            batch, longest = batch + 1, length
        batch_of[i] = batch
    return _parts(batch_of[which])


def _extend_batches(rows: Rows, masked: bool, max_tokens: int) -> list[npt.NDArray[np.intp]]:
    """Splits rows of several queries by the number of queries, and of keys where that is another number."""
    if not len(rows):
        return []
    key = _rounded_up(rows.num_queries, 4)
    if masked:
        key = (key << 32) + _rounded_up(rows.lens, 4)
    limited: list[npt.NDArray[np.intp]] = []
    for part in _parts(key):
        longest = int(rows.lens[part].max())
        limit = max_tokens // longest
        if masked:
            limit = min(limit, MAX_MASK_ELEMENTS // (longest * int(rows.num_queries[part].max())))
        limited += np.array_split(part, -(-len(part) // max(1, limit)))
    return limited


def _parts(key: Int64Array) -> list[npt.NDArray[np.intp]]:
    """Indices of equal keys together, by ascending key."""
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _cut(rows: Rows) -> Rows:
    """Cuts chunks whose mask would be too large into pieces of consecutive queries."""
    piece = np.maximum(1, MAX_MASK_ELEMENTS // np.maximum(rows.lens, 1))
    num_pieces = -(-rows.num_queries // piece)
    if (num_pieces == 1).all():
        return rows
    of = np.repeat(np.arange(len(rows)), num_pieces)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * piece[of]
    num_queries = np.minimum(rows.num_queries[of] - offset, piece[of])
    starts = rows.starts[of] + offset
    return Rows(rows.index[of], rows.first[of] + offset, starts, num_queries, np.minimum(starts + num_queries, rows.lens[of]))


def _decode_reads(batch: ForwardBatch, cache: PagedKVCache, rows: Rows, max_tokens: int) -> list[Reads]:
    """The calls of a batch of rows of one query, cut evenly where it gathers too much for one."""
    device, length = batch.req_to_page.device, int(rows.lens.max())
    slots, valid = _slots(batch, rows, length)
    mask = None if valid is None else _additive(valid, cache.layers[0].dtype)[:, None, None, :]
    num_calls = -(-len(rows) // max(1, max_tokens // length))
    bounds = [len(rows) * i // num_calls for i in range(num_calls + 1)]
    return [
        Reads(
            num_rows=end - begin,
            num_queries=1,
            length=length,
            slots=cache.lines(slots[begin:end]),
            mask=None if mask is None else mask[begin:end],
            causal=False,
            tokens=_consecutive(rows.first[begin:end]) or upload(rows.first[begin:end], device),
            real=None,
            real_tokens=None,
        )
        for begin, end in itertools.pairwise(bounds)
    ]


def _extend_reads(batch: ForwardBatch, cache: PagedKVCache, rows: Rows, masked: bool) -> Reads:
    device, dtype = batch.req_to_page.device, cache.layers[0].dtype
    num_queries = int(rows.num_queries.max())
    slots, _ = _slots(batch, rows, int(rows.lens.max()))
    offsets = np.minimum(np.arange(num_queries), rows.num_queries[:, None] - 1)  # padding repeats the row's last query
    mask = None
    if masked:
        positions = upload(rows.starts[:, None] + offsets, device)
        mask = _additive(torch.arange(slots.shape[1], device=device) <= positions[:, :, None], dtype)[:, None]
    tokens = (rows.first[:, None] + offsets).reshape(-1)
    real = real_tokens = None
    if (rows.num_queries < num_queries).any():
        kept = np.flatnonzero((np.arange(num_queries) < rows.num_queries[:, None]).reshape(-1))
        real, real_tokens = upload(kept, device), upload(tokens[kept], device)
    return Reads(
        num_rows=len(rows),
        num_queries=num_queries,
        length=slots.shape[1],
        slots=cache.lines(slots),
        mask=mask,
        causal=not masked,
        tokens=_consecutive(tokens) or upload(tokens, device),
        real=real,
        real_tokens=real_tokens,
    )


def _slots(batch: ForwardBatch, rows: Rows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots of positions [0, length) of each row, int64 [N, length], and which of them are the row's; None: all."""
    device, page_size = batch.req_to_page.device, batch.page_size
    table_rows = (
        batch.rows if len(rows) == batch.num_rows else batch.rows[_consecutive(rows.index) or upload(rows.index, device)]
    )
    pages = batch.req_to_page.index_select(0, table_rows)[:, : -(-length // page_size)].long()
    slots = (pages[:, :, None] * page_size + torch.arange(page_size, device=device)).flatten(1)[:, :length]
    if (rows.lens == length).all():
        return slots, None
    valid = torch.arange(length, device=device) < upload(rows.lens, device)[:, None]
    return torch.where(valid, slots, slots[:, :1]), valid


def _additive(valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores. Made once a step: from a boolean one, every call of every layer would make it again."""
    return torch.zeros(valid.shape, dtype=dtype, device=valid.device).masked_fill_(~valid, -torch.inf)


def _consecutive(numbers: Int64Array) -> slice | None:
    """The numbers as a slice, where they are one: slicing makes no copy."""
    begin, end = int(numbers[0]), int(numbers[-1]) + 1
    return slice(begin, end) if end - begin == len(numbers) and bool((np.diff(numbers) == 1).all()) else None
