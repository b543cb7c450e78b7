"""The decode-inputs kernel and its naive twin against a loop in plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime_service.kernels.decode_inputs import decode_inputs, decode_inputs_naive
from runtime_service.kernels.decode_inputs_triton import BLOCK, decode_inputs_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], Result]


def run_triton(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, page_size: int, width_tokens: int) -> Result:
    """The kernel, past the choice by device; results start as garbage in larger buffers that must not change around them."""
    buffers = [torch.full((len(rows) + 2,), -9, dtype=torch.int64, device=DEVICE) for _ in range(3)]
    positions, seq_lens, out_cache_loc = (buffer[1:-1] for buffer in buffers)
    decode_inputs_launch(table, rows, lengths, page_size, width_tokens, positions, seq_lens, out_cache_loc).run()
    assert all(int(buffer[0]) == int(buffer[-1]) == -9 for buffer in buffers)
    return positions, seq_lens, out_cache_loc


both = pytest.mark.parametrize("compute", [decode_inputs_naive, run_triton], ids=["naive", "triton"])


@both
@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 48, 128, 129])
@pytest.mark.parametrize("num_rows", [1, 17, BLOCK + 1])
def test_results_match_a_loop(compute: Implementation, page_size: int, num_rows: int) -> None:
    """Any page size and row count gives the plain-Python answer, rows at page ends and past the width included (B47, B49)."""
    generator = torch.Generator().manual_seed(page_size)
    width = 3
    base = torch.randint(1, 1 << 30, (num_rows + 1, width + 4), generator=generator, dtype=torch.int32)
    base[0] = 0
    table = base.to(DEVICE)[:, 2 : 2 + width]  # a view of a wider table (B48)
    lengths = torch.randint(0, width * page_size + 3, (num_rows + 1,), generator=generator)
    lengths[1] = width * page_size  # the first position past the width
    rows = torch.randperm(num_rows, generator=generator) + 1
    want = []
    for row in rows.tolist():
        position = int(lengths[row])
        inside = position < width * page_size
        page = int(table[row, position // page_size]) if inside else 0
        want.append((position, min(position + 1, width * page_size), page * page_size + position % page_size))
    got = compute(table, rows.to(DEVICE), lengths.to(DEVICE), page_size, width * page_size)
    assert list(zip(*(column.tolist() for column in got), strict=True)) == want


@both
def test_padding_rows_stay_on_the_dummy_page(compute: Implementation) -> None:
    """Row 0 is empty whatever its length says, and its slot is the first of page 0 (B46)."""
    table = torch.tensor([[0, 0], [5, 6]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 1, 0], device=DEVICE)
    for length in (0, 7, 1 << 40):
        positions, seq_lens, slots = compute(table, rows, torch.tensor([length, 3]).to(DEVICE), 2, 4)
        assert positions.tolist() == [0, 3, 0]
        assert seq_lens.tolist() == [1, 4, 1]
        assert slots.tolist() == [0, 13, 0]


@both
def test_slots_pass_32_bits(compute: Implementation) -> None:
    """The largest page id times the page size keeps all its bits (B42)."""
    table = torch.tensor([[0], [(1 << 31) - 1]], dtype=torch.int32, device=DEVICE)
    _, _, slots = compute(table, torch.ones(1, dtype=torch.int64, device=DEVICE), torch.tensor([0, 255]).to(DEVICE), 256, 256)
    assert slots.tolist() == [((1 << 31) - 1) * 256 + 255]


@pytest.mark.usefixtures("either_side")
def test_public_function_picks_by_device() -> None:
    """`decode_inputs` computes where its tensors are, and launches nothing for no rows (B45)."""
    table = torch.tensor([[0, 0], [5, 6]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([0, 2], device=DEVICE)
    rows = torch.ones(1, dtype=torch.int64, device=DEVICE)
    assert [column.tolist() for column in decode_inputs(table, rows, lengths, 2, width_tokens=4)] == [[2], [3], [12]]
    assert [column.tolist() for column in decode_inputs(table, rows[:0], lengths, 2, width_tokens=4)] == [[], [], []]


TABLE = torch.zeros((2, 3), dtype=torch.int32)
ROWS = torch.zeros(1, dtype=torch.int64)
LENGTHS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("table", "rows", "lengths", "page_size", "width_tokens", "error", "message"),
    [
        (TABLE.long(), ROWS, LENGTHS, 2, 6, TypeError, "req_to_page must be int32"),
        (TABLE.T, ROWS, LENGTHS.new_zeros(3), 2, 4, ValueError, "side by side"),
        (TABLE, ROWS.int(), LENGTHS, 2, 6, TypeError, "rows must be int64"),
        (TABLE, ROWS, LENGTHS.new_zeros(4)[::2], 2, 6, ValueError, "lengths must be contiguous"),
        (TABLE, ROWS, LENGTHS[:1], 2, 6, ValueError, r"lengths must be \[2\]"),
        (TABLE, ROWS, LENGTHS, 257, 6, ValueError, "page_size 257"),
        (TABLE, ROWS, LENGTHS, 2, 7, ValueError, "width_tokens 7"),
    ],
)
def test_unaddressable_arguments_are_refused(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    width_tokens: int,
    error: type[Exception],
    message: str,
) -> None:
    """A wrong dtype, layout, length or size raises before a launch (B48, B52)."""
    with pytest.raises(error, match=message):
        decode_inputs(table, rows, lengths, page_size, width_tokens=width_tokens)
