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
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NUM_META_COLUMNS = 6
_MANY = 16
"""Up to so many rows are sooner written one by one."""


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
    if mirror.is_cpu:
        mirror_apply_naive(mirror, staged, num_rows)
        return
    # Imported here because triton is neither needed nor everywhere installed where only CPUs are.
    from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton

    mirror_apply_triton(mirror, staged, num_rows, max_write_len)


def check_arguments(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
    """Raise TypeError or ValueError for arguments that `mirror_apply` cannot address."""
    if mirror.dtype is not torch.int32 or staged.dtype is not torch.int32 or mirror.dim() != 2 or staged.dim() != 1:
        _refuse_kind(mirror, staged)
    if mirror.device != staged.device:
        raise ValueError(f"mirror is on {mirror.device}, staged on {staged.device}")
    if not mirror.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(mirror.stride(), mirror.shape, strict=True)
    ):
        raise ValueError(f"mirror entries overlap in memory: strides {mirror.stride()}")
    if not staged.is_contiguous():
        raise ValueError(f"staged must be contiguous, not of stride {staged.stride(0)}")
    if num_rows < 0 or max_write_len < 0:
        raise ValueError(f"num_rows {num_rows} and max_write_len {max_write_len} must not be negative")
    if staged.numel() < NUM_META_COLUMNS * num_rows:
        raise ValueError(f"staged has {staged.numel()} entries, {num_rows} rows need {NUM_META_COLUMNS * num_rows}")


def _refuse_kind(mirror: torch.Tensor, staged: torch.Tensor) -> None:
    for name, tensor, num_dims in (("mirror", mirror, 2), ("staged", staged, 1)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {tensor.dtype}")
        if tensor.dim() != num_dims:
            raise ValueError(f"{name} must have {num_dims} dimension(s), not shape {tuple(tensor.shape)}")


def mirror_apply_naive(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int) -> None:
    """Do what the kernel does, with numpy on the memory of two CPU tensors."""
    table, packed = mirror.numpy(), staged.numpy()
    num_meta = NUM_META_COLUMNS * num_rows
    # In 64 bits: the product of a row number and a width passes 2^31 in large tables.
    meta = packed[:num_meta].astype(np.int64).reshape(NUM_META_COLUMNS, num_rows)
    rows, src_begins, copy_begins, copy_lens, write_begins, write_ends = meta
    copy_ends = copy_begins + copy_lens
    if copy_begins.tobytes() != write_begins.tobytes():
        _fill(table, rows, write_begins, np.minimum(copy_begins, write_ends))
        front = np.maximum(write_begins - copy_begins, 0)
        src_begins, copy_begins = src_begins + front, copy_begins + front
    if copy_ends.tobytes() != write_ends.tobytes():
        _clear(table, rows, np.maximum(copy_ends, write_begins), write_ends)
        copy_ends = np.minimum(copy_ends, write_ends)
    _fill(table, rows, copy_begins, copy_ends, packed[num_meta:], src_begins)


def _clear(table: Int32Array, rows: Int64Array, begins: Int64Array, ends: Int64Array) -> None:
    """Entries `[begins, ends)` of each row get 0; of most rows there are none."""
    cleared = (ends > begins).nonzero()[0]
    if len(cleared) > _MANY:
        _fill(table, rows, begins, ends)
        return
    columns = (column.take(cleared).tolist() for column in (rows, begins, ends))
    for row, begin, end in zip(*columns, strict=True):
        table[row, begin:end] = 0


def _fill(
    table: Int32Array,
    rows: Int64Array,
    begins: Int64Array,
    ends: Int64Array,
    pages: Int32Array | None = None,
    src_begins: Int64Array | None = None,
) -> None:
    """Entries `[begins, ends)` of each row get its pages from `src_begins` on, or 0; where end is not past begin, none does."""
    lens = ends - begins
    ones = lens == 1
    num_others = len(lens) - np.count_nonzero(ones)
    if not num_others:  # a step of decode rows
        table[rows, begins] = 0 if pages is None else pages[src_begins]
        return
    if num_others <= _MANY and pages is not None and src_begins is not None:  # the same, and a few more
        singles = ones.nonzero()[0]
        if len(singles):
            table[rows.take(singles), begins.take(singles)] = pages.take(src_begins.take(singles))
        for i in (~ones).nonzero()[0].tolist():
            if (length := lens.item(i)) > 0:
                begin, src_begin = begins.item(i), src_begins.item(i)
                table[rows.item(i), begin : begin + length] = pages[src_begin : src_begin + length]
        return
    longest, shortest = int(lens.max()), int(lens.min())
    if longest <= 0:
        return
    if longest == shortest and _fill_block(table, rows, begins, longest, pages, src_begins):
        return
    if shortest < 0:
        np.maximum(lens, 0, out=lens)
    flat_ends = lens.cumsum()
    flat_begins = flat_ends - lens
    counts = _counts(int(flat_ends[-1]))
    values: Int32Array | int = 0
    if pages is not None and src_begins is not None:
        shifts = src_begins - flat_begins
        first = int(shifts[0])
        in_one_piece = first >= 0 and not np.count_nonzero(shifts != first)
        values = pages[first : first + len(counts)] if in_one_piece else pages[np.repeat(shifts, lens) + counts]
    if table.flags.c_contiguous:  # one flat index costs a third of two
        entries = np.repeat(rows * table.shape[1] + begins - flat_begins, lens)
        entries += counts
        table.reshape(-1)[entries] = values
    else:
        entries = np.repeat(begins - flat_begins, lens)
        entries += counts
        table[np.repeat(rows, lens), entries] = values


def _fill_block(
    table: Int32Array,
    rows: Int64Array,
    begins: Int64Array,
    num_entries: int,
    pages: Int32Array | None,
    src_begins: Int64Array | None,
) -> bool:
    """The same, where all rows are written at the same entries, from pages that follow one another; False: they are not."""
    begin = int(begins[0])
    if np.count_nonzero(begins != begin):
        return False
    block: Int32Array | int = 0
    if pages is not None and src_begins is not None:
        first = int(src_begins[0])
        if np.count_nonzero(src_begins[1:] - src_begins[:-1] != num_entries):
            return False
        block = pages[first : first + len(rows) * num_entries].reshape(len(rows), num_entries)
    table[rows, begin : begin + num_entries] = block
    return True


class _Counts:
    """0, 1, 2, …; the longest so far is kept, since new memory of that size costs more than what is done with it."""

    def __init__(self) -> None:
        self._longest: Int64Array = np.arange(1 << 12)

    def __call__(self, num_entries: int) -> Int64Array:
        """The first so many; not to be written to."""
        if len(self._longest) < num_entries:
            self._longest = np.arange(max(num_entries, 2 * len(self._longest)))
        return self._longest[:num_entries]


_counts = _Counts()
