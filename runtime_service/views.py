"""The mirror in the forms that attention libraries ask for.

    form                                    who                              here
    block table [batch, max_pages]          vLLM, FlashAttention, TRT-LLM    `block_table`
    kv_indptr, kv_indices, kv_last_page_len FlashInfer                       `paged_kv`
    slot_mapping / out_cache_loc            vLLM / SGLang                    `slot_mapping`
    req_to_token [rows, max_tokens]         SGLang                           `req_to_token`

Everything is on the mirror's device and read on the current stream: what was applied before is in it. Where the form allows it,
the result is the mirror's own memory and changes with it; each function says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.kernels.row_digest import row_digest
from runtime_service.ops import UInt64Array
from runtime_service.req_to_page import ReqToPage

Rows = npt.ArrayLike | torch.Tensor
_INT32_MAX = 2**31 - 1


class PagedKv(NamedTuple):
    """FlashInfer's form of B rows, int32 on the device."""

    kv_indptr: torch.Tensor  # [B + 1], pages of row i are kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
    kv_indices: torch.Tensor  # concatenated page ids
    kv_last_page_len: torch.Tensor  # [B], tokens in each row's last page, 1 ... page_size; 0 of an empty row


def _whole(name: str, values: Rows) -> npt.NDArray[np.int64]:
    """Whole numbers on the host, [B]. Raises TypeError for others, ValueError for another shape."""
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def _numbers(mirror: ReqToPage, rows: Rows) -> npt.NDArray[np.int64]:
    """Row numbers on the host. Raises IndexError for one outside [0, max_rows]."""
    numbers = _whole("rows", rows)
    if numbers.size and not (numbers.min() >= 0 and numbers.max() <= mirror.max_rows):
        raise IndexError(f"row numbers {numbers.tolist()} are not all within [0, {mirror.max_rows}]")
    return numbers


def block_table(mirror: ReqToPage, rows: Rows, max_pages: int | None = None) -> torch.Tensor:
    """Page ids of these rows, int32 [B, max_pages]; entries past a row's length are 0, the dummy page.

    `max_pages` None: the longest of the rows, at least 1. Consecutive ascending row numbers give a view of the mirror itself,
    without a copy; others are gathered by one kernel. Raises IndexError for a row number outside [0, max_rows], ValueError for
    more pages than the mirror is wide.
    """
    numbers = _numbers(mirror, rows)
    if max_pages is None:
        max_pages = max(1, int(mirror.valid_lens[numbers].max(initial=0)))
    if not 1 <= max_pages <= mirror.max_pages_per_row:
        raise ValueError(f"max_pages is {max_pages}, the mirror has {mirror.max_pages_per_row} pages a row")
    if len(numbers) and (np.diff(numbers) == 1).all():
        return mirror.table[int(numbers[0]) : int(numbers[-1]) + 1, :max_pages]
    return mirror.table[torch.from_numpy(numbers).to(mirror.device), :max_pages]


def paged_kv(mirror: ReqToPage, rows: Rows, seq_lens: Rows) -> PagedKv:
    """Pages that hold the first `seq_lens` [B] tokens of these rows, in compressed form.

    Raises IndexError for a row number outside [0, max_rows], ValueError where a row has fewer pages than its tokens need.
    """
    numbers, lens = _numbers(mirror, rows), _whole("seq_lens", seq_lens)
    if lens.shape != numbers.shape:
        raise ValueError(f"{lens.size} sequence lengths for {numbers.size} rows")
    page_size = mirror.page_size
    counts = -(-lens // page_size)
    short = np.flatnonzero((counts > mirror.valid_lens[numbers]) | (lens < 0))
    if len(short):
        row, length = int(numbers[short[0]]), int(lens[short[0]])
        raise ValueError(f"row {row} has {mirror.valid_lens[row]} pages of {page_size} tokens, its sequence length is {length}")
    indptr = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
    owners = np.repeat(numbers, counts)
    entries = owners * mirror.max_pages_per_row + np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    last = np.where(lens > 0, (lens - 1) % page_size + 1, 0)
    device = mirror.device
    return PagedKv(
        torch.from_numpy(indptr.astype(np.int32)).to(device),
        mirror.table.view(-1)[torch.from_numpy(entries).to(device)],
        torch.from_numpy(last.astype(np.int32)).to(device),
    )


def slot_mapping(mirror: ReqToPage, rows: Rows, begins: Rows, lens: Rows) -> torch.Tensor:
    """Slots (page · page_size + offset) of tokens `[begin, begin + len)` of each row, concatenated, int64 [T].

    A token past the row's pages gets a slot of the dummy page 0: what is written there is never read. Raises IndexError for a
    row number outside [0, max_rows].
    """
    numbers = _numbers(mirror, rows)
    first, counts = _whole("begins", begins), _whole("lens", lens)
    if not first.shape == counts.shape == numbers.shape or (counts < 0).any() or (first < 0).any():
        raise ValueError("begins and lens must have one entry a row, none of them negative")
    if len(first) and max(first.max(), counts.max()) > _INT32_MAX:
        raise ValueError(f"begins and lens are at most {_INT32_MAX}, the last token position")
    starts = counts.cumsum() - counts
    positions = np.arange(counts.sum()) + np.repeat(first - starts, counts)
    pages, offsets = np.divmod(positions, mirror.page_size)
    entries = np.repeat(numbers, counts) * mirror.max_pages_per_row + pages
    entries[pages >= mirror.max_pages_per_row] = 0  # of row 0, the padding sink
    device = mirror.device
    found = mirror.table.view(-1)[torch.from_numpy(entries).to(device)].to(torch.int64)
    return found * mirror.page_size + torch.from_numpy(offsets).to(device)


def req_to_token(mirror: ReqToPage, rows: Rows | None = None) -> torch.Tensor:
    """The token-level table, int32 [B, max_pages_per_row * page_size]: the slot of every token of these rows (None: of all).

    With page_size 1 it is the mirror itself (see `block_table`). Tokens past a row's pages get slots of the dummy page. Raises
    ValueError where the slots of the last page do not fit into int32.
    """
    if (mirror.num_pages + 1) * mirror.page_size > _INT32_MAX + 1:
        raise ValueError(f"slots of {mirror.num_pages} pages of {mirror.page_size} tokens do not fit into int32")
    width = mirror.max_pages_per_row
    table = mirror.table if rows is None else block_table(mirror, rows, width)
    if mirror.page_size == 1:
        return table
    offsets = torch.arange(mirror.page_size, dtype=torch.int32, device=mirror.device)
    return (table[:, :, None] * mirror.page_size + offsets).view(len(table), width * mirror.page_size)


def row_digests(mirror: ReqToPage, rows: Rows) -> UInt64Array:
    """The digest of each row, as `forward.proto` defines it, uint64 [B] on the host. Waits for the current stream."""
    numbers = _numbers(mirror, rows)
    columns = (numbers, mirror.row_lens[numbers].astype(np.int64), mirror.valid_lens[numbers].astype(np.int64))
    found = row_digest(mirror.table, *(torch.from_numpy(column).to(mirror.device) for column in columns))
    digests: UInt64Array = found.cpu().numpy().view(np.uint64)
    return digests
