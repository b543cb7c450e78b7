"""The largest step, run once on the dummy page, and the memory that it needs at its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from runtime_service.executors.base import ModelExecutor
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import LeaseStart, SamplingParams


class MemoryMeter(Protocol):
    """What is asked of the device's allocator."""

    def start(self) -> int:
        """Forget earlier peaks; bytes allocated now."""

    def peak(self) -> int:
        """Most bytes allocated since `start`, once everything queued has run."""


class CudaMeter:
    """Torch's allocator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        """See `MemoryMeter`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `MemoryMeter`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


def measure_peak(work: Callable[[], object], meter: MemoryMeter) -> int:
    """Bytes that `work` needs at its peak beyond what is allocated before it."""
    before = meter.start()
    work()
    return max(meter.peak() - before, 0)


def profile_steps(
    executor: ModelExecutor, *, num_tokens: int, max_rows: int, page_size: int, max_context: int, device: torch.device
) -> None:
    """Run the two largest steps there are: the tokens in one row, as far as the context goes, and in as many rows as may be.

    All rows are row 0 and all pages page 0, so the executor needs KV memory for the dummy page alone. They sample with
    temperature and top-p, which takes the sampler most memory.
    """
    executor.start_leases([LeaseStart(0, "", SamplingParams(temperature=1.0, top_p=0.9))])
    for num_rows in (-(-num_tokens // max_context), min(max_rows, num_tokens)):
        executor.execute(dummy_step(num_tokens, min(num_rows, max_rows), page_size, device)).wait()
    executor.reset()


def dummy_step(num_tokens: int, num_rows: int, page_size: int, device: torch.device) -> ForwardBatch:
    """A prefill of `num_tokens` tokens 0, spread evenly over the rows, that reads and writes page 0 only."""
    input_lens = np.full(num_rows, num_tokens // num_rows, dtype=np.int64)
    input_lens[: num_tokens % num_rows] += 1
    query_indptr = np.concatenate(([0], np.cumsum(input_lens)))
    token_rows = np.repeat(np.arange(num_rows), input_lens)
    positions = np.arange(num_tokens) - query_indptr[token_rows]
    longest = int(input_lens.max())

    def on_device(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    zeros = np.zeros(num_rows, dtype=np.int64)
    return ForwardBatch(
        req_to_page=torch.zeros((1, -(-longest // page_size)), dtype=torch.int32, device=device),
        page_size=page_size,
        rows=on_device(zeros),
        num_computed=on_device(zeros),
        input_lens=on_device(input_lens),
        seq_lens=on_device(input_lens),
        query_indptr=on_device(query_indptr),
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=on_device(positions),
        token_rows=on_device(token_rows),
        out_cache_loc=on_device(positions % page_size),
        num_extend_rows=num_rows,
        host_rows=zeros.astype(np.int32),
        host_num_computed=zeros.astype(np.int32),
        host_input_lens=input_lens.astype(np.int32),
        sample=np.ones(num_rows, dtype=np.bool_),
        clamped=np.zeros(num_rows, dtype=np.bool_),
    )
