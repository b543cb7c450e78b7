"""The runtime's protocol half, mirror and fingerprint model in this process, for the simulator.

The one place where the scheduler's package imports the runtime's, and only when a runtime is made: the scheduler's install
has no torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import PagemirrorError
from scheduler_service.core.ops import ForwardOp, Int32Array, StepResult
from scheduler_service.scenario_events import VOCAB_SIZE
from scheduler_service.wire import op_to_proto, result_from_proto


class RuntimeMissingError(PagemirrorError):
    """The runtime's packages are not installed."""

    def __init__(self, missing: str) -> None:
        self.missing = missing
        super().__init__(
            f"simulate runs the runtime's mirror in this process and needs {missing}, which is not installed; "
            "install pagemirror[runtime]"
        )


class InProcessRuntime:
    """The runtime without its process: ops go in and results come out as the bytes of the wire."""

    def __init__(self, config: SchedulerConfig) -> None:
        try:
            import torch

            from runtime_service.executors.base import ExecutionResult
            from runtime_service.executors.fingerprint import FingerprintExecutor
            from runtime_service.forward_batch import ForwardBatch
            from runtime_service.req_to_page import ReqToPage
            from runtime_service.session import SessionState
            from runtime_service.step_runner import StepRunner
        except ModuleNotFoundError as error:
            raise RuntimeMissingError(error.name or "torch") from error

        class ShiftedFingerprint(FingerprintExecutor):
            """A fingerprint model whose tokens are each moved by a number, so that a right read gives a token of our choice."""

            shifts: Int32Array | None = None

            def execute(self, batch: ForwardBatch) -> ExecutionResult:
                result = super().execute(batch)
                if self.shifts is not None:
                    tokens = np.where(result.tokens < 0, result.tokens, (result.tokens + self.shifts) % VOCAB_SIZE)
                    result = replace(result, tokens=tokens.astype(np.int32))
                return result

        torch.set_num_threads(1)
        tail_only = config.refresh_policy is RefreshPolicy.TAIL_ONLY
        limits = (config.max_rows, config.max_pages_per_row, config.num_pages, config.page_size)
        self.mirror = ReqToPage(*limits, zero_fill=not tail_only)
        self.model = ShiftedFingerprint(config.num_pages, config.page_size)
        self.model.poison()
        session = SessionState(*limits, VOCAB_SIZE, lenient=tail_only, greedy_only=True)
        self._runner = StepRunner(session, self.mirror, self.model)
        self._overlap_depth = config.overlap_depth
        self._num_seen = 0

    def open(self, session_no: int) -> None:
        """Begin a session, as a scheduler's hello does."""
        self._runner.open(1, session_no, self._overlap_depth)

    def run(self, op: ForwardOp, shifts: Int32Array | None = None) -> StepResult | str:
        """Execute one op; a refusal comes back as its text. `shifts` [R]: added to each row's token, modulo the vocabulary."""
        from runtime_service.wire import op_from_proto, result_to_proto

        sent = op_to_proto(op)
        received = op_from_proto(type(sent).FromString(sent.SerializeToString()), self._runner.foreseen)
        self.model.shifts = shifts
        answer = self._runner.run(received)
        self._runner.prepare()
        if isinstance(answer, Exception):
            return str(answer)
        return result_from_proto(result_to_proto(answer).result, op.num_rows)

    def row(self, row: int) -> list[int]:
        """The valid part of one mirror row."""
        entries: list[int] = self.mirror.row(row).tolist()
        return entries

    def new_violations(self) -> list[str]:
        """What the model found wrong with the cells it has read since the last call."""
        found = self.model.violations[self._num_seen :]
        self._num_seen = len(self.model.violations)
        return list(found)
