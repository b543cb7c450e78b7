"""Digests of mirror rows, computed from the memory that the model reads through, in one launch.

    digest = sum over i in [0, valid_len) of mix(i * 2^32 + entry_i)  +  mix(~row_len)     mod 2^64

with `mix` of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). The definition and its
test vectors are those of `ForwardOp.row_digests` in forward.proto. Digests are kept as int64 of the same bits, since torch has
no arithmetic of unsigned numbers; they are only ever compared.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime_service.kernels.arguments import check_index, check_table, on_host

GOLDEN = 0x9E37_79B9_7F4A_7C15
MULTIPLIER_1 = 0xBF58_476D_1CE4_E5B9
MULTIPLIER_2 = 0x94D0_49BB_1331_11EB

NAIVE_BLOCK = 256
"""Entries of each row that the twin mixes at a time."""


def row_digest(req_to_page: torch.Tensor, rows: torch.Tensor, row_lens: torch.Tensor, valid_lens: torch.Tensor) -> torch.Tensor:
    """Digests of these rows, int64 [N]: the Triton kernel on a GPU, its naive twin on the CPU.

    Args:
        req_to_page: int32 [max_rows + 1, width], the mirror. Entries past a row's valid length are not looked at.
        rows: int64 [N], row numbers, in any order and also repeated.
        row_lens: int64 [N], lengths that the scheduler stated.
        valid_lens: int64 [N], entries that the mirror holds, at most `width`.

    Raises TypeError or ValueError for arguments the kernel cannot address; the numbers in them are the caller's promise.
    """
    check_table(req_to_page, req_to_page.device)
    check_index("rows", rows, None, req_to_page.device)
    check_index("row_lens", row_lens, len(rows), req_to_page.device)
    check_index("valid_lens", valid_lens, len(rows), req_to_page.device)
    if len(rows) == 0:
        return rows.new_empty(0)
    if on_host(req_to_page):
        return row_digest_naive(req_to_page, rows, row_lens, valid_lens)
    from runtime_service.kernels.row_digest_triton import row_digest_launch

    digests = torch.empty_like(rows)
    row_digest_launch(req_to_page, rows, row_lens, valid_lens, digests).run()
    return digests


def row_digest_naive(
    req_to_page: torch.Tensor, rows: torch.Tensor, row_lens: torch.Tensor, valid_lens: torch.Tensor
) -> torch.Tensor:
    """Do what the kernel does, with numpy on the memory of CPU tensors, some columns of all rows at a time."""
    table, numbers, lens = req_to_page.numpy(), rows.numpy(), valid_lens.numpy()
    digests = _mixed(~row_lens.numpy())
    longest = int(lens.max())
    for start in range(0, longest, NAIVE_BLOCK):
        stop = min(start + NAIVE_BLOCK, longest)
        which = np.flatnonzero(lens > start)
        places = np.arange(start, stop)
        mixed = _mixed(table[numbers[which], start:stop] + (places << 32))
        if int(lens[which].min()) < stop:
            mixed *= places < lens[which, None]
        digests[which] += mixed.sum(axis=1)
    return torch.from_numpy(digests.view(np.int64))


def _mixed(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each value, in its memory; arithmetic wraps at 2^64."""
    x: npt.NDArray[np.uint64] = values.view(np.uint64)
    shifted = np.empty_like(x)
    x += np.uint64(GOLDEN)
    x ^= np.right_shift(x, np.uint64(30), out=shifted)
    x *= np.uint64(MULTIPLIER_1)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(MULTIPLIER_2)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x
