"""How ops are written, and a model that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.errors import Refusal
from runtime_service.executors.base import ExecutionResult
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import ForwardOp, Int32Array, LeaseStart, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.step_runner import StepRunner

PAGE_SIZE = 4
NUM_PAGES = 40
MAX_ROWS = 8


class LateResult:
    """A step that is on the device: its tokens feed the next step, the host sees them when `wait` is called."""

    def __init__(self, number: int, result: ExecutionResult, log: list[str], error: Exception | None) -> None:
        self.is_ready = False
        self.error = error
        self._number = number
        self._result = result
        self._log = log
        self._device_tokens = torch.from_numpy(result.tokens.astype(np.int64))

    @property
    def device_tokens(self) -> torch.Tensor | None:
        return self._device_tokens

    def ready(self) -> bool:
        return self.is_ready

    def wait(self) -> ExecutionResult:
        self._log.append(f"wait {self._number}")
        if self.error is not None:
            raise self.error
        return self._result


class LateExecutor(FingerprintExecutor):
    """The fingerprint model, computed in the order of launches and answered late. `log` has what happened when."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE)
        self.log: list[str] = []
        self.results: list[LateResult] = []
        self.fail_at: dict[int, Exception] = {}
        """Number of the step, counted over `execute` calls from 1 → what `execute` raises."""
        self.fail_late: dict[int, Exception] = {}
        """Likewise, what `wait` raises."""
        self.num_executed = 0

    def execute(self, batch: ForwardBatch) -> LateResult:  # type: ignore[override]
        self.num_executed += 1
        number = self.num_executed
        self.log.append(f"execute {number}")
        if number in self.fail_at:
            raise self.fail_at[number]
        self.results.append(LateResult(number, super().execute(batch), self.log, self.fail_late.get(number)))
        return self.results[-1]


class Ops:
    """How ops are written."""

    @staticmethod
    def extend(
        step: int,
        *rows: tuple[int, list[int], int, list[int]],
        session_no: int = 1,
        generation: int = 1,
        released: tuple[int, ...] = (),
        sample: bool = True,
        start: bool = True,
    ) -> ForwardOp:
        """Extend rows (row, whole page row, num_computed, token ids), each refreshed and, with `start`, beginning a lease."""
        lens = _i32([len(pages) for _, pages, _, _ in rows])
        return ForwardOp(
            session_no=session_no,
            step=step,
            req_pool_indices=_i32([row for row, _, _, _ in rows]),
            row_generations=np.full(len(rows), generation, np.int32),
            row_lens=lens,
            begins=np.zeros(len(rows), np.int32),
            sizes=lens,
            full_refresh=np.ones(len(rows), np.bool_),
            occupied_pages=_i32([page for _, pages, _, _ in rows for page in pages]),
            num_computed=_i32([computed for _, _, computed, _ in rows]),
            num_extend_rows=len(rows),
            input_lens=_i32([len(ids) for _, _, _, ids in rows]),
            input_ids=_i32([token for _, _, _, ids in rows for token in ids]),
            sample=np.full(len(rows), sample, np.bool_),
            released_rows=_i32(released),
            lease_starts=[LeaseStart(row, f"request-{row}") for row, _, _, _ in rows] if start else [],
        )

    @staticmethod
    def decode(
        step: int,
        *rows: tuple[int, int, list[int], int],
        session_no: int = 1,
        generation: int = 1,
        released: tuple[int, ...] = (),
    ) -> ForwardOp:
        """Decode rows (row, begin, appended pages, num_computed)."""
        return ForwardOp(
            session_no=session_no,
            step=step,
            req_pool_indices=_i32([row for row, _, _, _ in rows]),
            row_generations=np.full(len(rows), generation, np.int32),
            row_lens=_i32([begin + len(pages) for _, begin, pages, _ in rows]),
            begins=_i32([begin for _, begin, _, _ in rows]),
            sizes=_i32([len(pages) for _, _, pages, _ in rows]),
            full_refresh=np.zeros(len(rows), np.bool_),
            occupied_pages=_i32([page for _, _, pages, _ in rows for page in pages]),
            num_computed=_i32([computed for _, _, _, computed in rows]),
            num_extend_rows=0,
            input_lens=np.ones(len(rows), np.int32),
            input_ids=_i32([]),
            sample=np.ones(len(rows), np.bool_),
            released_rows=_i32(released),
        )

    @staticmethod
    def tokens(answer: StepResult | Refusal) -> list[int]:
        """The tokens of an answer that must be a result."""
        assert isinstance(answer, StepResult), answer
        return answer.tokens.tolist()

    @staticmethod
    def code(answer: object) -> str:
        """The code of an answer that must be a refusal, by name."""
        assert isinstance(answer, Refusal), answer
        return answer.code.name


def _i32(values: Any) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def ops() -> type[Ops]:
    """How ops are written."""
    return Ops


@pytest.fixture
def late() -> LateExecutor:
    """A model that answers late."""
    return LateExecutor()


@pytest.fixture
def new_runner() -> Callable[..., StepRunner]:
    """A runner of eight rows with an open session, with overlap depth 2."""

    def make(executor: FingerprintExecutor | None = None, width: int = 8) -> StepRunner:
        executor = executor or FingerprintExecutor(NUM_PAGES, PAGE_SIZE)
        limits = (MAX_ROWS, width, NUM_PAGES, PAGE_SIZE)
        runner = StepRunner(SessionState(*limits, executor.info.vocab_size), ReqToPage(*limits), executor)
        runner.open(77, 1, 2)
        return runner

    return make


@pytest.fixture
def late_runner(late: LateExecutor, new_runner: Callable[..., StepRunner]) -> StepRunner:
    """A runner of the model that answers late."""
    return new_runner(late)
