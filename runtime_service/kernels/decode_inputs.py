"""Positions, lengths and KV slots of all decode rows, from the mirror and the device's own lengths, in one launch."""

from __future__ import annotations

import torch

from runtime_service.kernels.arguments import MAX_PAGE_SIZE, check_index, check_table, on_host


def decode_inputs(
    req_to_page: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page_size: int, *, width_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a decode step computes for each row, one new token each: the Triton kernel on a GPU, its naive twin on the CPU.

    Args:
        req_to_page: int32 [max_rows + 1, width], the mirror.
        rows: int64 [R], row numbers; 0 is padding, may come often, and counts as an empty row whatever `lengths[0]` says.
        lengths: int64 [max_rows + 1], tokens of each row whose KV is written. Not changed.
        page_size: tokens in a page.
        width_tokens: tokens that a row can hold, at most width * page_size.

    Returns:
        Three int64 [R] tensors. Positions: the row's length, where its new token goes. Sequence lengths: one more, cut to
        `width_tokens`. Slots: of the new token; past `width_tokens` a slot of the dummy page 0, since a lookup clamped into
        the row's last page would overwrite live KV.

    Raises TypeError or ValueError for arguments the kernel cannot address; the numbers in `rows` and `lengths` are the
    caller's promise.
    """
    check_table(req_to_page, req_to_page.device)
    check_index("rows", rows, None, req_to_page.device)
    check_index("lengths", lengths, len(req_to_page), req_to_page.device)
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size {page_size} is outside [1, {MAX_PAGE_SIZE}]")
    if not 1 <= width_tokens <= req_to_page.shape[1] * page_size:
        raise ValueError(f"width_tokens {width_tokens} is outside [1, {req_to_page.shape[1]} * {page_size}]")
    if len(rows) == 0:
        return rows.new_empty(0), rows.new_empty(0), rows.new_empty(0)
    if on_host(req_to_page):
        return decode_inputs_naive(req_to_page, rows, lengths, page_size, width_tokens)
    from runtime_service.kernels.decode_inputs_triton import decode_inputs_launch

    positions, seq_lens, out_cache_loc = torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows)
    decode_inputs_launch(req_to_page, rows, lengths, page_size, width_tokens, positions, seq_lens, out_cache_loc).run()
    return positions, seq_lens, out_cache_loc


def decode_inputs_naive(
    req_to_page: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page_size: int, width_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what the kernel does, one expression a result."""
    positions = torch.where(rows == 0, 0, lengths[rows])
    inside = positions < width_tokens
    pages = torch.where(inside, req_to_page[rows, torch.where(inside, positions // page_size, 0)], 0)
    return positions, (positions + 1).clamp(max=width_tokens), pages.long() * page_size + positions % page_size
