"""Write the page rows of one step into the mirror: one packed input, one launch.

The staged buffer is one int32 array of `6 * n + P` entries for n rows and P pages. First come six columns of n entries each,
in this order, then the concatenated page ids, addressed from the end of the columns:

    row           row number in the mirror
    src_begin     where the row's pages start among the P page ids
    copy_begin    first mirror entry that takes a page id
    copy_len      how many entries take page ids `[src_begin, src_begin + copy_len)`
    write_begin   first mirror entry that is written at all
    write_end     one past the last

Entries `[write_begin, write_end)` are written, those outside `[copy_begin, copy_begin + copy_len)` with 0; all others are left
alone. So a tail update, a rewrite that also clears a longer predecessor, and the clearing of a released row (copy_len 0) are
the same operation, and rows of all three kinds go into one launch. A row number may appear once only.
"""

from __future__ import annotations

import numpy as np
import torch

NUM_META_COLUMNS = 6


def mirror_apply(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
    """Apply `staged` to `mirror` in place: the Triton kernel on a GPU, its naive twin on the CPU.

    `mirror` is int32 [rows, width] of any positive strides (a view of a wider table is fine). `staged` is int32, contiguous, on
    the same device, laid out as the module says. `num_rows` counts its rows, and `max_write_len` is the largest
    `write_end - write_begin` among them, known on the host so that the launch needs no look at device memory. Either being 0
    launches nothing.

    The numbers inside `staged` are the caller's promise and are not looked at here. Raises TypeError for another dtype and
    ValueError for a shape, layout or device that the kernel cannot address, both before anything is written.
    """
    check_arguments(mirror, staged, num_rows, max_write_len)
    if num_rows == 0 or max_write_len == 0:
        return
    if mirror.device.type == "cpu":
        mirror_apply_naive(mirror, staged, num_rows)
        return
    # Imported here because triton is neither needed nor everywhere installed where only CPUs are.
    from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton

    mirror_apply_triton(mirror, staged, num_rows, max_write_len)


def check_arguments(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
    """Raise TypeError or ValueError for arguments that `mirror_apply` cannot address."""
    for name, tensor, num_dims in (("mirror", mirror, 2), ("staged", staged, 1)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {tensor.dtype}")
        if tensor.dim() != num_dims:
            raise ValueError(f"{name} must have {num_dims} dimension(s), not shape {tuple(tensor.shape)}")
    if mirror.device != staged.device:
        raise ValueError(f"mirror is on {mirror.device}, staged on {staged.device}")
    if any(stride == 0 and size > 1 for stride, size in zip(mirror.stride(), mirror.shape, strict=True)):
        raise ValueError(f"mirror entries overlap in memory: strides {mirror.stride()}")
    if not staged.is_contiguous():
        raise ValueError(f"staged must be contiguous, not of stride {staged.stride(0)}")
    if num_rows < 0 or max_write_len < 0:
        raise ValueError(f"num_rows {num_rows} and max_write_len {max_write_len} must not be negative")
    if staged.numel() < NUM_META_COLUMNS * num_rows:
        raise ValueError(f"staged has {staged.numel()} entries, {num_rows} rows need {NUM_META_COLUMNS * num_rows}")


def mirror_apply_naive(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int) -> None:
    """Do what the kernel does, with numpy on the memory of two CPU tensors: one flat index over all written entries."""
    table, packed = mirror.numpy(), staged.numpy()
    num_meta = NUM_META_COLUMNS * num_rows
    rows, src_begins, copy_begins, copy_lens, write_begins, write_ends = packed[:num_meta].reshape(NUM_META_COLUMNS, num_rows)
    pages = packed[num_meta:]

    write_lens = (write_ends - write_begins).astype(np.int64)
    flat_begins = np.cumsum(write_lens) - write_lens
    owner = np.repeat(np.arange(num_rows), write_lens)
    entry = np.arange(len(owner)) - (flat_begins - write_begins)[owner]
    offset = entry - copy_begins[owner]
    copied = (offset >= 0) & (offset < copy_lens[owner])

    values = np.zeros(len(owner), dtype=np.int32)
    values[copied] = pages[(src_begins[owner] + offset)[copied]]
    table[rows[owner], entry] = values
