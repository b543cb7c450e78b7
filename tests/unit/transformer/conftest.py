"""A transformer executor behind a mirror, with ops written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors.base import ExecutionResult
from runtime_service.executors.transformer import TransformerExecutor, create_transformer
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage
from runtime_service.settings import RuntimeSettings

PAGE_SIZE = 4
MAX_ROWS = 5
NUM_PAGES = 40
Rows = dict[int, tuple[list[int], int, list[int]]]


def settings(model: Path | str = "tiny", **changes: Any) -> RuntimeSettings:
    values: dict[str, Any] = dict(model=str(model), device="cpu", page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_rows=MAX_ROWS)
    return RuntimeSettings(**(values | changes))


class Rig:
    """An executor behind a mirror; ops are written by hand."""

    def __init__(self, executor: TransformerExecutor, width: int = 8) -> None:
        self.executor = executor
        self.mirror = ReqToPage(MAX_ROWS, width, executor.cache.num_pages, PAGE_SIZE)
        self.builder = BatchBuilder(self.mirror, "cpu")
        self.last_tokens = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
        self.step = 0

    def batch(self, rows: Rows, sample: list[bool] | None = None, masked: list[bool] | None = None) -> ForwardBatch:
        """Rows as `row: (pages, num_computed, input ids)`, whole rows refreshed; no ids makes a decode row (listed last)."""
        self.step += 1
        pages, computed, ids = (list(column) for column in zip(*rows.values(), strict=True))
        lens = np.array([len(row) for row in pages], dtype=np.int32)
        op = ForwardOp(
            session_no=1,
            step=self.step,
            req_pool_indices=np.array(list(rows), dtype=np.int32),
            row_generations=np.ones(len(rows), dtype=np.int32),
            row_lens=lens,
            begins=np.zeros(len(rows), dtype=np.int32),
            sizes=lens,
            full_refresh=np.ones(len(rows), dtype=np.bool_),
            occupied_pages=np.array(sum(pages, []), dtype=np.int32),
            num_computed=np.array(computed, dtype=np.int32),
            num_extend_rows=sum(map(bool, ids)),
            input_lens=np.array([len(tokens) or 1 for tokens in ids], dtype=np.int32),
            input_ids=np.array(sum(ids, []), dtype=np.int32),
            sample=np.array(sample or [True] * len(rows)),
            released_rows=np.zeros(0, dtype=np.int32),
        )
        self.mirror.apply(op)
        return self.builder.build(op, self.last_tokens, None if masked is None else torch.tensor(masked))

    def run(self, rows: Rows, sample: list[bool] | None = None) -> ExecutionResult:
        result = self.executor.execute(self.batch(rows, sample))
        for row, token in zip(rows, result.tokens.tolist(), strict=True):
            self.last_tokens[row] = max(token, 0)
        return result

    def greedy(self, prompt: list[int], num_tokens: int, pages: list[int]) -> list[int]:
        """A prompt alone, prefilled at once."""
        tokens = [int(self.run({1: (pages, 0, prompt)}).tokens[0])]
        while len(tokens) < num_tokens:
            tokens.append(int(self.run({1: (pages, len(prompt) + len(tokens) - 1, [])}).tokens[0]))
        return tokens


@pytest.fixture
def make_settings() -> Callable[..., RuntimeSettings]:
    """Settings for a model, by default the built-in one; keyword arguments replace values."""
    return settings


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    """An executor behind a mirror, by default one of the built-in model."""
    return lambda executor=None: Rig(executor or create_transformer(settings())[0])


@pytest.fixture
def rig() -> Rig:
    """The built-in model with not-a-number wherever nothing was written."""
    rig = Rig(create_transformer(settings())[0])
    for layer in rig.executor.cache.layers:
        layer.fill_(torch.nan)
    return rig
