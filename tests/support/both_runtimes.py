"""The real runtime half in this process, beside the plain one: after each op the memory of the two must be equal, bit for bit.

Ops and results travel as the bytes of the wire. The comparison is of the whole mirror and of every KV cell, so it finds a stale
or missing entry, an entry that can still be read beyond a row's end, and any row or cell that changed though no op named it.
"""

from __future__ import annotations

import numpy as np

from runtime_service.executors.fingerprint import POISON_TOKEN
from scheduler_driver import DEFAULTS, Driver, PlainRuntime
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.ops import ForwardOp, StepResult
from scheduler_service.in_process_runtime import InProcessRuntime


class BothRuntimes(PlainRuntime):
    """Runs each op twice, plain and real.

    With `shuffled` a second real runtime gets the rows of every op in another order, and must come to the same memory.
    """

    def __init__(self, config: SchedulerConfig, session_no: int, *, shuffled: bool = False) -> None:
        super().__init__(config.page_size)
        self._config = config
        self.real = self._new_real(session_no)
        self._shuffled = self._new_real(session_no) if shuffled else None

    def _new_real(self, session_no: int) -> InProcessRuntime:
        runtime = InProcessRuntime(self._config)
        runtime.open(session_no)
        return runtime

    def run(self, op: ForwardOp) -> StepResult:
        plain = super().run(op)
        answer = self.real.run(op)
        assert isinstance(answer, StepResult), answer
        assert answer.tokens.tolist() == plain.tokens.tolist()
        self._compare(self.real)
        if self._shuffled is not None:
            order = _other_order(op)
            other = self._shuffled.run(_reordered(op, order))
            assert isinstance(other, StepResult), other
            assert other.tokens.tolist() == answer.tokens[order].tolist()
            self._compare(self._shuffled)
        return answer

    def _compare(self, real: InProcessRuntime) -> None:
        assert real.new_violations() == []
        table = np.zeros_like(real.mirror.table.numpy())
        for row, pages in self.mirror.items():
            table[row, : len(pages)] = pages
        assert real.mirror.table.tolist() == table.tolist()
        cells = np.full((self._config.num_pages + 1) * self._config.page_size, POISON_TOKEN, dtype=np.int32)
        for (page, place), token in self.cells.items():
            cells[page * self._config.page_size + place] = token
        assert real.model._tokens.tolist() == cells.tolist()


def new_driver(*, shuffled: bool = False, **options: object) -> Driver:
    """A scheduler of a small configuration with both runtimes; `options` replace values of the configuration."""
    config = SchedulerConfig(**{**DEFAULTS, **options})
    return Driver(config, lambda config, session_no: BothRuntimes(config, session_no, shuffled=shuffled))


def _other_order(op: ForwardOp) -> list[int]:
    """Both kinds of rows backwards; extend rows stay in front."""
    return [*range(op.num_extend_rows)][::-1] + [*range(op.num_extend_rows, op.num_rows)][::-1]


def _reordered(op: ForwardOp, order: list[int]) -> ForwardOp:
    sent = np.where(op.full_refresh, op.row_lens, op.sizes)
    pages = np.split(op.occupied_pages, np.cumsum(sent)[:-1])
    ids = np.split(op.input_ids, np.cumsum(op.input_lens[: op.num_extend_rows])[:-1])
    return ForwardOp(
        session_no=op.session_no,
        step=op.step,
        req_pool_indices=op.req_pool_indices[order],
        row_generations=op.row_generations[order],
        row_lens=op.row_lens[order],
        begins=op.begins[order],
        sizes=op.sizes[order],
        full_refresh=op.full_refresh[order],
        occupied_pages=np.concatenate([pages[i] for i in order]),
        num_computed=op.num_computed[order],
        num_extend_rows=op.num_extend_rows,
        input_lens=op.input_lens[order],
        input_ids=np.concatenate([op.input_ids[:0], *(ids[i] for i in order[: op.num_extend_rows])]),
        sample=op.sample[order],
        released_rows=op.released_rows[::-1],
        lease_starts=op.lease_starts[::-1],
    )
