"""Mirror, batch builder and fingerprint model, driven as the execution thread drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import NO_TOKEN, ForwardOp, LeaseStart
from runtime_service.req_to_page import ReqToPage


def column(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """An int32 column."""
    return np.asarray(values, dtype=np.int32)


@dataclass
class RowStep:
    """One row of a step: `tokens` is None for a decode row; `lease` starts one, with `num_computed` tokens cached."""

    row: int
    pages: list[int]
    tokens: list[int] | None = None
    num_computed: int = 0
    lease: str = ""
    begin: int | None = None  # entries below it are not sent; None: a full refresh
    sample: bool = True


@dataclass
class Runtime:
    """Mirror, batch builder and executor driven as the execution thread drives them."""

    page_size: int = 4
    num_pages: int = 32
    width: int = 8
    max_rows: int = 6
    device: str = "cpu"
    zero_fill: bool = True
    status: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mirror = ReqToPage(self.max_rows, self.width, self.num_pages, self.page_size, self.device, self.zero_fill)
        self.builder = BatchBuilder(self.mirror, self.device)
        self.executor = FingerprintExecutor(self.num_pages, self.page_size, self.device)
        self.last_tokens = torch.zeros(self.max_rows + 1, dtype=torch.int64, device=self.device)

    def step(self, *rows: RowStep, released: tuple[int, ...] = ()) -> list[int]:
        """Run one step, extend rows first; returns the tokens."""
        begins = [0 if row.begin is None else row.begin for row in rows]
        op = ForwardOp(
            session_no=1,
            step=1,
            req_pool_indices=column([row.row for row in rows]),
            row_generations=column([1] * len(rows)),
            row_lens=column([len(row.pages) for row in rows]),
            begins=column(begins),
            sizes=column([len(row.pages) - begin for row, begin in zip(rows, begins, strict=True)]),
            full_refresh=np.array([row.begin is None for row in rows], dtype=np.bool_),
            occupied_pages=column([page for row, begin in zip(rows, begins, strict=True) for page in row.pages[begin:]]),
            num_computed=column([row.num_computed for row in rows]),
            num_extend_rows=sum(row.tokens is not None for row in rows),
            input_lens=column([1 if row.tokens is None else len(row.tokens) for row in rows]),
            input_ids=column([token for row in rows for token in row.tokens or []]),
            sample=np.array([row.sample for row in rows], dtype=np.bool_),
            released_rows=column(released),
            lease_starts=[LeaseStart(row.row, row.lease) for row in rows if row.lease],
        )
        self.mirror.apply(op)
        self.executor.release_rows(op.released_rows)
        self.executor.start_leases(op.lease_starts)
        result = self.executor.execute(self.builder.build(op, self.last_tokens))
        assert result.tokens.dtype == np.int32
        assert result.row_status.dtype == np.uint8
        self.status = result.row_status.tolist()
        tokens: list[int] = result.tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            if token != NO_TOKEN:
                self.last_tokens[row.row] = token
        return tokens

    def greedy(self, row: int, pages: list[int], prompt: list[int], num_tokens: int) -> list[int]:
        """Prefill in one chunk, then decode, with all pages from the start."""
        output = self.step(RowStep(row, pages, prompt, lease=f"r{row}"))
        for i in range(num_tokens - 1):
            output += self.step(RowStep(row, pages, num_computed=len(prompt) + i, begin=len(pages)))
        return output

    @property
    def violations(self) -> list[str]:
        return self.executor.violations


# Hypothesis takes only fixtures that outlive an example, so what holds no state is made once.


@pytest.fixture(scope="session")
def make_runtime() -> Callable[..., Runtime]:
    """A runtime with nothing in it; keyword arguments replace its sizes."""
    return Runtime


@pytest.fixture(scope="session")
def row_step() -> Callable[..., RowStep]:
    """One row of a step."""
    return RowStep
