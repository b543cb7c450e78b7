"""The mirror-apply kernel and its naive twin against a definition in plain Python, inside memory full of garbage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_service.kernels import mirror_apply as mirror_apply_module
from runtime_service.kernels import mirror_apply_triton as mirror_apply_triton_module
from runtime_service.kernels.mirror_apply import NUM_META_COLUMNS, mirror_apply, mirror_apply_naive
from runtime_service.kernels.mirror_apply_triton import BLOCK, mirror_apply_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = -123_456_789
GARBAGE = [0, -1, 1 << 30]
WIDTHS = [1, 3, 17, 100, 513]


@dataclass
class RowWrite:
    """One row of a launch; `pages` go to `[copy_begin, copy_begin + len(pages))`."""

    row: int
    copy_begin: int
    pages: list[int]
    write_begin: int
    write_end: int


def packed(writes: list[RowWrite], gap: int = 0, garbage: int = 0) -> tuple[torch.Tensor, int, int]:
    """The staged buffer inside a larger one full of garbage, with `gap` unused entries before each row's pages."""
    pages: list[int] = []
    meta = []
    for write in writes:
        pages += [garbage] * gap
        meta.append([write.row, len(pages), write.copy_begin, len(write.pages), write.write_begin, write.write_end])
        pages += write.pages
    entries = np.array(meta, dtype=np.int32).reshape(len(writes), NUM_META_COLUMNS).T.reshape(-1).tolist() + pages
    buffer = torch.full((64 + len(entries) + 2 * BLOCK,), garbage, dtype=torch.int32)
    buffer[64 : 64 + len(entries)] = torch.tensor(entries, dtype=torch.int32)
    staged = buffer.to(DEVICE)[64 : 64 + len(entries)]
    return staged, len(writes), max((write.write_end - write.write_begin for write in writes), default=0)


def expected(mirror: torch.Tensor, writes: list[RowWrite]) -> torch.Tensor:
    """The definition: an entry in the written range takes its page, or 0; every other entry stays."""
    result = mirror.cpu().clone()
    for write in writes:
        for entry in range(write.write_begin, write.write_end):
            offset = entry - write.copy_begin
            result[write.row, entry] = write.pages[offset] if 0 <= offset < len(write.pages) else 0
    return result


def run_naive(mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
    """The twin, on copies in host memory where the mirror is elsewhere."""
    on_host = mirror.cpu()
    mirror_apply_naive(on_host, staged.cpu(), num_rows)
    mirror.copy_(on_host)


Implementation = Callable[[torch.Tensor, torch.Tensor, int, int], None]
both = pytest.mark.parametrize("apply", [run_naive, mirror_apply_triton], ids=["naive", "triton"])


def check(apply: Implementation, num_rows: int, width: int, writes: list[RowWrite], garbage: int = 0) -> None:
    """Apply inside a canary-filled base, and compare every entry of the base."""
    base = torch.full((num_rows + 2, width + 7), CANARY, dtype=torch.int32, device=DEVICE)
    mirror = base[1:-1, 3 : 3 + width]
    want = base.cpu().clone()
    want[1:-1, 3 : 3 + width] = expected(mirror, writes)
    apply(mirror, *packed(writes, gap=3, garbage=garbage))
    assert torch.equal(base.cpu(), want)


@both
def test_tail_clear_and_release_in_one_launch(apply: Implementation) -> None:
    """A tail update, a shrinking rewrite, a cleared row and one written in front of its copy share one launch."""
    writes = [
        RowWrite(1, 5, [50, 51], 5, 7),
        RowWrite(2, 0, [7, 1], 0, 6),
        RowWrite(4, 0, [], 0, 8),
        RowWrite(6, 4, [60], 0, 8),
    ]
    check(apply, 7, 10, writes)


@both
def test_row_longer_than_a_block_beside_a_short_one(apply: Implementation) -> None:
    """The grid is as long as the longest write, and the blocks past a shorter row's end write nothing."""
    long = list(range(1, 2 * BLOCK + 2))
    check(apply, 3, 3 * BLOCK, [RowWrite(0, 0, long, 0, len(long)), RowWrite(2, BLOCK - 1, [9, 8], BLOCK - 1, BLOCK + 1)])


@both
def test_page_ids_keep_all_31_bits(apply: Implementation) -> None:
    """The largest int32 page ids come through unchanged."""
    check(apply, 2, 4, [RowWrite(1, 0, [(1 << 31) - 1, 1 << 24, (1 << 24) + 1], 0, 4)])


@both
@settings(max_examples=40)
@given(data=st.data())
def test_random_launches_match_the_definition(apply: Implementation, data: st.DataObject) -> None:
    """Any mix of ranges on distinct rows of any width matches the plain-Python definition."""
    width = data.draw(st.sampled_from([1, 2, 3, 17, 40]))
    num_rows = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    writes = []
    for row in rows:
        write_begin, copy_begin, copy_end, write_end = sorted(data.draw(st.integers(0, width)) for _ in range(4))
        pages = [data.draw(st.integers(1, 1 << 30)) for _ in range(copy_end - copy_begin)]
        writes.append(RowWrite(row, copy_begin, pages, write_begin, write_end))
    if all(write.write_begin == write.write_end for write in writes):
        return
    check(apply, num_rows, width, writes, garbage=data.draw(st.sampled_from(GARBAGE)))


def test_nothing_to_do_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows, or rows without an entry to write, reach neither the kernel nor the twin (B45)."""

    def fail(*args: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(mirror_apply_module, "mirror_apply_naive", fail)
    monkeypatch.setattr(mirror_apply_triton_module, "mirror_apply_triton", fail)
    mirror = torch.full((2, 4), 5, dtype=torch.int32, device=DEVICE)
    mirror_apply(mirror, *packed([]))
    mirror_apply(mirror, *packed([RowWrite(1, 2, [], 2, 2)]))
    assert bool((mirror == 5).all())


def test_public_function_picks_by_device() -> None:
    """`mirror_apply` writes on the device it is given."""
    mirror = torch.zeros((3, 4), dtype=torch.int32, device=DEVICE)
    mirror_apply(mirror, *packed([RowWrite(2, 1, [8, 9], 1, 4)]))
    assert mirror.tolist() == [[0] * 4, [0] * 4, [0, 8, 9, 0]]


@pytest.mark.parametrize(
    ("mirror", "staged", "num_rows", "error", "message"),
    [
        (torch.zeros((2, 4), dtype=torch.int64), torch.zeros(6, dtype=torch.int32), 1, TypeError, "mirror must be int32"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros(6, dtype=torch.int64), 1, TypeError, "staged must be int32"),
        (torch.zeros(8, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), 1, ValueError, "2 dimension"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros((2, 3), dtype=torch.int32), 1, ValueError, "1 dimension"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros(5, dtype=torch.int32), 1, ValueError, "5 entries, 1 rows need 6"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros(12, dtype=torch.int32)[::2], 1, ValueError, "contiguous"),
        (torch.zeros((1, 4), dtype=torch.int32).expand(2, 4), torch.zeros(6, dtype=torch.int32), 1, ValueError, "overlap"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros(6, dtype=torch.int32, device="meta"), 1, ValueError, "meta"),
        (torch.zeros((2, 4), dtype=torch.int32), torch.zeros(6, dtype=torch.int32), -1, ValueError, "not be negative"),
    ],
)
def test_unaddressable_arguments_are_refused_before_launch(
    mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, error: type[Exception], message: str
) -> None:
    """A wrong dtype, rank, layout, device or length raises and writes nothing (B48, B52)."""
    with pytest.raises(error, match=message):
        mirror_apply(mirror, staged, num_rows, 4)
    assert not mirror.any()
