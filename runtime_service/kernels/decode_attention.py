"""Attention of decode rows over KV pages, read through the mirror's rows: one query token a row, or a few to be verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime_service.kernels.arguments import check_cache, check_index, check_query, check_table, on_host
from runtime_service.kernels.launch import next_power_of_2
from runtime_service.kernels.naive_attention import attend_token, read_row

MAX_LANES = 64
"""Query heads of a group times queries of a row that fit one tile."""

MIN_SPLIT = 256
"""Positions of a split at the least. What a split hands to the reduction is a few per cent of the KV that it reads."""

MANY_PROGRAMS = 512
"""Rows times KV heads that fill a GPU without splitting."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Memory between the two kernels of a split launch, for many launches one after another on one stream.

    Needed where a launch must not allocate or must find its memory again: one workspace serves all layers and all captured
    graphs. Contents before and after a launch mean nothing.
    """

    partial: torch.Tensor  # float32, weighted sums of values
    stats: torch.Tensor  # float32, two for each head_dim elements of `partial`: largest score, sum of weights

    @classmethod
    def create(
        cls,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        queries_per_row: int = 1,
        device: torch.device | str,
    ) -> DecodeWorkspace:
        """Make one that is enough for every batch of up to `max_rows` rows of up to `max_seq_len` tokens."""
        num_splits = count_splits(1, num_kv_heads, max_seq_len)
        rows = 0
        if num_splits > 1:
            # The largest power of two that is still split, see `count_splits`; one row more already is not.
            rows = min(max_rows, next_power_of_2(-(-MANY_PROGRAMS // num_kv_heads)) // 2)
        return cls.empty(rows * queries_per_row * num_heads * num_splits, head_dim, device)

    @classmethod
    def empty(cls, num_partials: int, head_dim: int, device: torch.device | str) -> DecodeWorkspace:
        """Make one for this many partial results of a head."""
        partial = torch.empty(num_partials * head_dim, dtype=torch.float32, device=device)
        return cls(partial, torch.empty(num_partials * 2, dtype=torch.float32, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.partial.nbytes + self.stats.nbytes


def max_splits(num_kv_heads: int) -> int:
    """Into how many splits one row is cut at the most: as many as fill a GPU when the row is alone, between 8 and 128."""
    return min(max(next_power_of_2(MANY_PROGRAMS // num_kv_heads), 8), 128)


def count_splits(num_rows: int, num_kv_heads: int, max_seq_len: int) -> int:
    """Splits of the longest row, 1 when splitting is not worth a second launch: rows are short, or many.

    Rows are counted in powers of two, so that a batch is split as the captured batch that it is padded to.
    """
    if max_seq_len <= MIN_SPLIT or next_power_of_2(num_rows) * num_kv_heads >= MANY_PROGRAMS:
        return 1
    return min(-(-max_seq_len // MIN_SPLIT), max_splits(num_kv_heads))


def paged_decode_attention(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    queries_per_row: int = 1,
    max_seq_len: int,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Attend from the last Q = `queries_per_row` tokens of each of R rows to all tokens of the row up to themselves.

    The Triton kernels on a GPU, the naive twin on the CPU. A long row is cut into splits that work side by side, and a second
    kernel joins them (flash-decoding); where its cuts lie depends on the row's length alone. The launch depends on R and
    `max_seq_len` alone, so a captured launch serves any rows within them.

    Args:
        query: [R * Q, num_heads, head_dim], row by row. Head h reads KV head `h // (num_heads / num_kv_heads)`.
        layer_cache: [2, num_pages + 1, page_size, num_kv_heads, head_dim]; the tokens' own keys and values are in it.
        req_to_page: int32 [max_rows + 1, width], the mirror; page ids come from it and from nowhere else.
        rows: int64 [R], row numbers. Row 0 is padding: it reads the dummy page, and its result means nothing.
        seq_lens: int64 [R], tokens of each row, the Q new ones included. More than the mirror is wide is cut. A token with
            nothing to see (a length of 0) gets zeros. Nothing at or past the length is read.
        scale: factor of the scores before the softmax.
        queries_per_row: Q, the same for all rows; fixed for the life of a process, since each value is compiled for.
        max_seq_len: at least the largest of `seq_lens`, known on the host; a promise.
        workspace: memory of a split launch; allocated by the call when None.

    Returns:
        [R * Q, num_heads, head_dim] in the query's dtype, contiguous.

    Raises TypeError or ValueError for arguments the kernels cannot address, before anything is launched.
    """
    check_cache(layer_cache)
    check_query(query, layer_cache)
    check_table(req_to_page, layer_cache.device)
    check_index("rows", rows, None, layer_cache.device)
    check_index("seq_lens", seq_lens, len(rows), layer_cache.device)
    num_kv_heads = layer_cache.shape[3]
    if queries_per_row < 1 or len(query) != len(rows) * queries_per_row:
        raise ValueError(f"{len(query)} queries for {len(rows)} rows of {queries_per_row}")
    lanes = query.shape[1] // num_kv_heads * queries_per_row
    if lanes > MAX_LANES:
        raise ValueError(f"{lanes} queries share a KV head of a row, more than {MAX_LANES}")
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len {max_seq_len} must be at least 1")
    num_splits = count_splits(len(rows), num_kv_heads, max_seq_len)
    num_partials = query.shape[0] * query.shape[1] * num_splits if num_splits > 1 else 0
    if workspace is not None and (
        len(workspace.stats) < 2 * num_partials or len(workspace.partial) < num_partials * query.shape[2]
    ):
        raise ValueError(f"the workspace has room for {len(workspace.stats) // 2} partial results of {num_partials}")
    if len(rows) == 0:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if on_host(layer_cache):
        return paged_decode_attention_naive(
            query, layer_cache, req_to_page, rows, seq_lens, scale=scale, queries_per_row=queries_per_row
        )
    from runtime_service.kernels.decode_attention_triton import decode_attention_launches

    if workspace is None:
        workspace = DecodeWorkspace.empty(num_partials, query.shape[2], query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for launch in decode_attention_launches(
        query, layer_cache, req_to_page, rows, seq_lens, out, workspace, scale, queries_per_row, num_splits
    ):
        launch.run()
    return out


def paged_decode_attention_naive(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    req_to_page: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    queries_per_row: int = 1,
) -> torch.Tensor:
    """Do what the kernels do, token by token."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    width_tokens = req_to_page.shape[1] * layer_cache.shape[2]
    for index, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        length = min(seq_len, width_tokens)
        keys, values = read_row(layer_cache, req_to_page[row], length)
        for number in range(queries_per_row):
            seen = length - (queries_per_row - 1 - number)
            if seen > 0:
                token = index * queries_per_row + number
                out[token] = attend_token(query[token], keys[:seen], values[:seen], scale)
    return out
