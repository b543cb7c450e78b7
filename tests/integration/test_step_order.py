"""A page and a row change hands while the step that used them is still running: outputs are those of a serial run.

On a GPU step N is held between its first and its second layer by a kernel that spins for 50 ms, while step N + 1, which gives
N's row and pages to another request, is launched. On a CPU the same ops run without the hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.executors.transformer import create_transformer
from runtime_service.models import decoder
from runtime_service.ops import ForwardOp, Int32Array, LeaseStart, SamplingParams, StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.settings import load_settings
from runtime_service.step_runner import PendingStep, StepRunner

PAGE_SIZE, NUM_PAGES, MAX_ROWS, WIDTH = 4, 16, 4, 8
HOLD_MS = 50.0
RANDOM = SamplingParams(temperature=0.8, top_p=0.9, seed=7)


def _i32(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def step(
    number: int, *rows: tuple[int, list[int], int, list[int]], generation: int = 1, released: tuple[int, ...] = ()
) -> ForwardOp:
    """Rows as (row, whole page row, num_computed, token ids): extend rows that begin a lease, or decode rows without ids."""
    extends = [row for row in rows if row[3]]
    assert list(rows[: len(extends)]) == extends
    lens = _i32(*(len(pages) for _, pages, _, _ in rows))
    full = np.array([bool(ids) for _, _, _, ids in rows])
    return ForwardOp(
        session_no=1,
        step=number,
        req_pool_indices=_i32(*(row for row, _, _, _ in rows)),
        row_generations=_i32(*(generation if row == 1 else 1 for row, _, _, _ in rows)),
        row_lens=lens,
        begins=np.where(full, 0, lens).astype(np.int32),
        sizes=np.where(full, lens, 0).astype(np.int32),
        full_refresh=full,
        occupied_pages=_i32(*(page for _, pages, _, _ in extends for page in pages)),
        num_computed=_i32(*(computed for _, _, computed, _ in rows)),
        num_extend_rows=len(extends),
        input_lens=_i32(*(len(ids) or 1 for _, _, _, ids in rows)),
        input_ids=_i32(*(token for _, _, _, ids in extends for token in ids)),
        sample=np.ones(len(rows), dtype=np.bool_),
        released_rows=_i32(*released),
        lease_starts=[LeaseStart(row, f"{row}/{generation}", RANDOM, prompt_len=len(ids)) for row, _, _, ids in extends],
    )


def ops() -> list[ForwardOp]:
    """A in row 1 on pages 1 and 2, B in row 2; then C takes row 1 and A's pages, in the other order, while step 3 runs."""
    return [
        step(1, (1, [1, 2], 0, [10, 11, 12, 13, 14]), (2, [3, 4], 0, [20, 21])),
        step(2, (1, [1, 2], 5, []), (2, [3, 4], 2, [])),
        step(3, (2, [3, 4], 3, []), (1, [1, 2], 6, [])),
        step(4, (1, [2, 1], 0, [30, 31, 32, 33, 34, 35]), generation=2, released=(1,)),
        step(5, (2, [3, 4], 4, []), (1, [2, 1], 6, []), generation=2),
        step(6, (2, [3, 4], 5, []), (1, [2, 1], 7, []), generation=2),
    ]


class Held:
    """Plans whose second layer begins with a kernel that spins, for the steps that are armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        self.armed = False
        self._cycles = _spin_cycles(HOLD_MS) if device == "cuda" else 0
        original = decoder.plan_attention

        def plan_attention(*arguments: Any, **options: Any) -> Any:
            plan = original(*arguments, **options)
            if not self.armed:
                return plan
            write = plan.write

            def write_late(cache: Any, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
                if layer == 1 and self._cycles:
                    torch.cuda._sleep(self._cycles)
                write(cache, layer, keys, values)

            plan.write = write_late
            return plan

        monkeypatch.setattr(decoder, "plan_attention", plan_attention)


def _spin_cycles(milliseconds: float) -> int:
    """How long `torch.cuda._sleep` is told to spin for that time on this device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 * milliseconds / begin.elapsed_time(end))


@pytest.fixture
def new_runner() -> Callable[[str], StepRunner]:
    """A runner of the built-in model on a device, without graphs, since a replay calls no Python."""

    def make(device: str) -> StepRunner:
        settings = load_settings(
            model="tiny", device=device, dtype="float32", page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_rows=MAX_ROWS
        )
        executor, _ = create_transformer(settings)
        executor.warm_up()
        for layer in executor.cache.layers:
            layer.zero_()
        limits = (MAX_ROWS, WIDTH, NUM_PAGES, PAGE_SIZE)
        runner = StepRunner(
            SessionState(*limits, executor.info.vocab_size), ReqToPage(*limits, device=executor.info.device), executor
        )
        runner.open(1, 1, 2)
        return runner

    return make


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_row_and_pages_change_hands_under_a_running_step(
    device: str, new_runner: Callable[[str], StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 to 5 are in flight together, step 3 held between two layers: every token is that of the serial run."""
    serial, overlapped = new_runner(device), new_runner(device)
    expected = [_tokens(serial.run(op)) for op in ops()]
    held = Held(monkeypatch, device)
    answers, pending = [], deque[PendingStep]()
    for op in ops():
        held.armed = op.step == 3
        launched = overlapped.launch(op)
        assert isinstance(launched, PendingStep), launched
        pending.append(launched)
        if device == "cuda" and op.step == 4:
            assert not pending[-2].ready(), "step 3 is still held while step 4 has been launched"
        if len(pending) > 2:
            answers.append(_tokens(overlapped.collect(pending.popleft())))
    answers += [_tokens(overlapped.collect(launched)) for launched in pending]
    assert answers == expected
    assert torch.equal(overlapped.mirror.table, serial.mirror.table)
    assert torch.equal(overlapped._last_tokens, serial._last_tokens)
    # Page 0 is where steps may write what nobody reads.
    for ours, theirs in zip(overlapped.executor.cache.layers, serial.executor.cache.layers, strict=True):
        assert torch.equal(ours[:, 1:5], theirs[:, 1:5])


def _tokens(answer: object) -> list[int]:
    assert isinstance(answer, StepResult), answer
    tokens: list[int] = answer.tokens.tolist()
    assert min(tokens) >= 0
    return tokens
