"""The row-digest kernel and its naive twin against a loop over Python's own integers, in a table full of garbage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_digest import MASK, plain_digest
from runtime_service.kernels import row_digest as row_digest_module
from runtime_service.kernels.row_digest import NAIVE_BLOCK, row_digest, row_digest_naive
from runtime_service.kernels.row_digest_triton import BLOCK, row_digest_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_naive(table: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """The twin, on copies in host memory where the table is elsewhere."""
    return row_digest_naive(table.cpu(), *(column.cpu() for column in columns))


def run_triton(table: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """The kernel, past the choice by device; results start as garbage in a larger buffer that must not change around them."""
    buffer = torch.full((len(columns[0]) + 2,), -9, dtype=torch.int64, device=DEVICE)
    row_digest_launch(table, *columns, buffer[1:-1]).run()
    assert int(buffer[0]) == int(buffer[-1]) == -9
    return buffer[1:-1]


Implementation = Callable[..., torch.Tensor]
both = pytest.mark.parametrize("compute", [run_naive, run_triton], ids=["naive", "triton"])


def unsigned(digests: torch.Tensor) -> list[int]:
    """The uint64 values whose bits these are."""
    return [value & MASK for value in digests.tolist()]


def columns_of(rows: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Columns of (row number, row_len, valid_len)."""
    return [torch.tensor(column, dtype=torch.int64, device=DEVICE) for column in zip(*rows, strict=True)]


@both
def test_vectors_of_the_protocol(compute: Implementation) -> None:
    """Rows [], [3, 2] and [3, 2, 1] have the digests that forward.proto states."""
    table = torch.tensor([[0, 0, 0], [3, 2, 1]], dtype=torch.int32, device=DEVICE)
    found = unsigned(compute(table, *columns_of([(1, 0, 0), (1, 2, 2), (1, 3, 3)])))
    assert found == [0xE4D971771B652C20, 0xC7DA548924F3A1EC, 0x56658E418081DA92]


@both
@pytest.mark.parametrize("width", [1, 3, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 2 * NAIVE_BLOCK + 1])
def test_every_length_gives_the_digest_of_the_valid_part(compute: Implementation, width: int) -> None:
    """Rows of 0, 1, width - 1 and width entries, in any width, whatever garbage lies behind the valid length."""
    generator = torch.Generator().manual_seed(width)
    lens = sorted({0, 1, width - 1, width})
    entries = torch.randint(1, 1 << 31, (len(lens) + 1, width), generator=generator, dtype=torch.int64).to(torch.int32)
    expected = [plain_digest(entries[row, :length].tolist(), length) for row, length in enumerate(lens, start=1)]
    for garbage in (0, -1, 1 << 30):
        base = torch.full((len(lens) + 2, width + 7), garbage, dtype=torch.int32)
        view = base[:-1, 3 : 3 + width]  # of a wider table
        for row, length in enumerate(lens, start=1):
            view[row, :length] = entries[row, :length]
        table = base.to(DEVICE)[:-1, 3 : 3 + width]
        found = compute(table, *columns_of([(row, length, length) for row, length in enumerate(lens, start=1)]))
        assert unsigned(found) == expected


@both
def test_clamped_rows_differ_by_their_length(compute: Implementation) -> None:
    """Of rows wider than the mirror the part that fits counts, and the length that the scheduler stated."""
    table = torch.tensor([[0, 0], [7, 5]], dtype=torch.int32, device=DEVICE)
    found = unsigned(compute(table, *columns_of([(1, row_len, 2) for row_len in (2, 3, 1 << 31)])))
    assert found == [plain_digest([7, 5], row_len) for row_len in (2, 3, 1 << 31)]
    assert len(set(found)) == 3


@both
def test_exchanged_shifted_and_changed_entries_show(compute: Implementation) -> None:
    """Every other arrangement of the same pages, every single changed bit and every shorter row has another digest."""
    rows = [[1, 2, 3], [1, 3, 2], [2, 1, 3], [3, 2, 1], [0, 1, 2], [1, 2, 0]]
    rows += [[1 ^ (1 << bit) if bit < 31 else 1 - (1 << 31), 2, 3] for bit in range(32)]
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    found = unsigned(compute(table, *columns_of([(row, 3, 3) for row in range(len(rows))])))
    found += unsigned(compute(table, *columns_of([(0, 2, 2), (0, 3, 2)])))
    assert len(set(found)) == len(rows) + 2


@both
@given(data=st.data())
@settings(max_examples=20)
def test_random_rows_match_the_loop(compute: Implementation, data: st.DataObject) -> None:
    """Any rows in any order, also repeated, are what the loop says."""
    width = data.draw(st.integers(1, 40))
    page = st.integers(0, (1 << 31) - 1)
    entries = data.draw(st.lists(st.lists(page, min_size=width, max_size=width), min_size=1, max_size=5))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(entries) - 1), st.integers(0, 1 << 31), st.integers(0, width)), min_size=1, max_size=6
        )
    )
    table = torch.tensor(entries, dtype=torch.int32, device=DEVICE)
    found = unsigned(compute(table, *columns_of(rows)))
    assert found == [plain_digest(entries[row][:valid_len], row_len) for row, row_len, valid_len in rows]


@pytest.mark.parametrize("kernels", [False, True], ids=["by device", "kernels"])
def test_public_function_picks_by_device(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`row_digest` computes where its tensors are, and launches nothing for no rows."""
    if kernels:
        monkeypatch.setattr(row_digest_module, "on_host", lambda tensor: False)
    table = torch.tensor([[0, 0], [5, 6]], dtype=torch.int32, device=DEVICE)
    columns = columns_of([(1, 2, 2)])
    assert unsigned(row_digest(table, *columns)) == [plain_digest([5, 6], 2)]
    assert row_digest(table, *(column[:0] for column in columns)).tolist() == []


TABLE = torch.zeros((2, 3), dtype=torch.int32)
ONE = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("table", "columns", "error", "message"),
    [
        (TABLE.long(), [ONE] * 3, TypeError, "req_to_page must be int32"),
        (TABLE.T, [ONE] * 3, ValueError, "side by side"),
        (TABLE, [ONE.int(), ONE, ONE], TypeError, "rows must be int64"),
        (TABLE, [ONE, ONE.new_zeros(2), ONE], ValueError, r"row_lens must be \[1\]"),
        (TABLE, [ONE, ONE, ONE.new_zeros(2)], ValueError, r"valid_lens must be \[1\]"),
        (TABLE, [ONE.new_zeros(4)[::2], ONE.new_zeros(2), ONE.new_zeros(2)], ValueError, "rows must be contiguous"),
    ],
)
def test_unaddressable_arguments_are_refused(
    table: torch.Tensor, columns: list[torch.Tensor], error: type[Exception], message: str
) -> None:
    """A wrong dtype, layout or length raises before a launch."""
    with pytest.raises(error, match=message):
        row_digest(table, *columns)
