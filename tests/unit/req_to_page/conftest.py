"""A mirror, ops written by hand, and a count of launches; every test here runs with the twin and with the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime_service import req_to_page as req_to_page_module
from runtime_service.kernels.mirror_apply import mirror_apply
from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = tuple[int, int, int, list[int], bool]


def i32(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A column."""
    return np.asarray(values, dtype=np.int32)


class Ops:
    """Ops and their rows."""

    @staticmethod
    def make(rows: list[Row], released: list[int] | None = None) -> ForwardOp:
        """An op of rows (row, begin, size, whole row after the transition, full_refresh)."""
        sent = [page for _, begin, size, pages, full in rows for page in (pages if full else pages[begin : begin + size])]
        ones = i32([1] * len(rows))
        return ForwardOp(
            session_no=1,
            step=1,
            req_pool_indices=i32([row for row, *_ in rows]),
            row_generations=ones,
            row_lens=i32([len(pages) for _, _, _, pages, _ in rows]),
            begins=i32([begin for _, begin, *_ in rows]),
            sizes=i32([size for _, _, size, _, _ in rows]),
            full_refresh=np.array([full for *_, full in rows], dtype=np.bool_),
            occupied_pages=i32(sent),
            num_computed=ones,
            num_extend_rows=0,
            input_lens=ones,
            input_ids=i32([]),
            sample=np.ones(len(rows), dtype=np.bool_),
            released_rows=i32(released or []),
        )

    @staticmethod
    def full(row: int, pages: list[int]) -> Row:
        """The row is rewritten as `pages`, with the begin and size of a new lease."""
        return (row, 0, len(pages), pages, True)

    @staticmethod
    def tail(row: int, begin: int, pages: list[int]) -> Row:
        """The row is `pages` afterwards; those from `begin` are new."""
        return (row, begin, len(pages) - begin, pages, False)


class HandMirror(ReqToPage):
    """The mirror under test, and how tests read it."""

    def contents(self) -> npt.NDArray[np.int32]:
        """A copy of all entries."""
        return self.table.cpu().numpy().copy()

    def padded(self, pages: list[int]) -> list[int]:
        """The whole mirror row of a row with these pages."""
        return pages + [0] * (self.max_pages_per_row - len(pages))


class Launches:
    """Counts launches, and may send them to the Triton kernel, which the interpreter runs where there is no GPU."""

    def __init__(self, kernel: bool) -> None:
        self.count = 0
        self._kernel = kernel

    def __call__(self, mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
        assert num_rows > 0
        assert max_write_len > 0
        self.count += 1
        rows = staged[:num_rows].tolist()
        assert len(set(rows)) == num_rows, "two programs of one launch would race for a row"
        if not self._kernel:
            mirror_apply(mirror, staged, num_rows, max_write_len)
            return
        on_device = mirror.to(DEVICE)
        mirror_apply_triton(on_device, staged.to(DEVICE), num_rows, max_write_len)
        mirror.copy_(on_device)


@pytest.fixture(params=[False, True], ids=["naive", "triton"], autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
    """Every test of this folder runs with the twin and with the kernel."""
    patch = pytest.MonkeyPatch()
    counter = Launches(kernel=request.param)
    patch.setattr(req_to_page_module, "mirror_apply", counter)
    yield counter
    patch.undo()


# Hypothesis takes only fixtures that outlive an example, so what holds no state is made once.


@pytest.fixture(scope="session")
def ops() -> type[Ops]:
    """How ops are written."""
    return Ops


@pytest.fixture(scope="session")
def mirror_of() -> Callable[..., HandMirror]:
    """A small mirror with a pool that no test exhausts."""

    def make(width: int = 8, max_rows: int = 4, *, num_pages: int = 10_000, page_size: int = 4, **options: Any) -> HandMirror:
        return HandMirror(max_rows, width, num_pages, page_size, **options)

    return make
