"""Ops written by hand, a mirror written by the kernel itself, a device that is late, and pools of keys and values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime_service import req_to_page as req_to_page_module
from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton
from runtime_service.ops import ForwardOp, LeaseStart
from runtime_service.staging import CopyEvent, StagingRing

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def i32(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A column."""
    return np.asarray(values, dtype=np.int32)


@dataclass
class Row:
    """One row of an op: its pages afterwards, of which those from `begin` on are sent, or all where `full`."""

    row: int
    pages: list[int]
    begin: int = 0
    full: bool = True
    ids: list[int] | None = None  # None: a decode row
    computed: int = 0
    lease: str = ""


def op_of(rows: Sequence[Row], *, step: int = 1, released: Sequence[int] = ()) -> ForwardOp:
    """An op of these rows, extend rows first."""
    return ForwardOp(
        session_no=1,
        step=step,
        req_pool_indices=i32([row.row for row in rows]),
        row_generations=i32([1] * len(rows)),
        row_lens=i32([len(row.pages) for row in rows]),
        begins=i32([row.begin for row in rows]),
        sizes=i32([len(row.pages) - row.begin for row in rows]),
        full_refresh=np.array([row.full for row in rows], dtype=np.bool_),
        occupied_pages=i32([page for row in rows for page in (row.pages if row.full else row.pages[row.begin :])]),
        num_computed=i32([row.computed for row in rows]),
        num_extend_rows=sum(row.ids is not None for row in rows),
        input_lens=i32([1 if row.ids is None else len(row.ids) for row in rows]),
        input_ids=i32([token for row in rows for token in row.ids or []]),
        sample=np.ones(len(rows), dtype=np.bool_),
        released_rows=i32(list(released)),
        lease_starts=[LeaseStart(row.row, row.lease) for row in rows if row.lease],
    )


class KernelLaunches:
    """Stands for `mirror_apply` in the mirror: counts launches and runs the kernel, in the interpreter without a device."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, mirror: torch.Tensor, staged: torch.Tensor, num_rows: int, max_write_len: int) -> None:
        self.count += 1
        mirror_apply_triton(mirror, staged, num_rows, max_write_len)


class LateStream:
    """A device that is behind: what is queued on it runs in order, when it is let run or when somebody must wait for it."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], object]] = []
        self._num_run = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queued) - self._num_run

    def put(self, work: Callable[[], object]) -> None:
        self._queued.append(work)

    def run(self, up_to: int | None = None) -> None:
        """Run what was queued, or the first `up_to` works ever queued."""
        while self._num_run < (len(self._queued) if up_to is None else min(up_to, len(self._queued))):
            self._queued[self._num_run]()
            self._num_run += 1

    def run_some(self, count: int) -> None:
        """Get on by that many works."""
        self.run(self._num_run + count)

    def event(self) -> CopyEvent:
        """An event of this stream."""
        stream = self

        class Event:
            position = 0

            def record(self) -> None:
                self.position = len(stream._queued)

            def synchronize(self) -> None:
                stream.run(self.position)

        return Event()


class LateRing(StagingRing):
    """The staging ring of a device whose copies run late, with host memory on both sides."""

    def __init__(self, stream: LateStream, capacity: int) -> None:
        self._stream = stream
        super().__init__(torch.device("cpu"), torch.int32, capacity)

    @property
    def _is_asynchronous(self) -> bool:
        return True

    def _new_host_buffer(self, capacity: int) -> torch.Tensor:
        return torch.empty(capacity, dtype=torch.int32)

    def _new_event(self) -> CopyEvent:
        return self._stream.event()

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        on_device = torch.full_like(host, -1)
        self._stream.put(lambda: on_device.copy_(host))
        return on_device


@dataclass
class Pool:
    """Keys and values of rows 1 ... R scattered over a pool in which all else is poison; entries past a row are garbage."""

    cache: torch.Tensor  # [2, num_pages + 1, page_size, num_kv_heads, head_dim]
    table: torch.Tensor  # int32 [R + 1, width]
    rows: torch.Tensor  # int64 [R]
    lengths: torch.Tensor  # int64 [R]

    def reference(self, query: torch.Tensor) -> torch.Tensor:
        """Attention of one query [heads, head_dim] a row over all its tokens, from the definition, in float64."""
        page_size, num_kv_heads, head_dim = self.cache.shape[2:]
        results = []
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            pages = self.table[row, : -(-length // page_size)].long().cpu()
            keys, values = (side.cpu()[pages].flatten(0, 1)[:length].double() for side in self.cache)
            heads = query[row - 1].cpu().double().view(num_kv_heads, -1, head_dim)
            weights = (torch.einsum("kgd,tkd->kgt", heads, keys) * head_dim**-0.5).softmax(-1)
            results.append(torch.einsum("kgt,tkd->kgd", weights, values).flatten(0, 1))
        return torch.stack(results)


def pool_of(
    lengths: list[int],
    *,
    page_size: int,
    width: int,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    garbage: int = 1 << 30,
    poison: float = float("nan"),
) -> Pool:
    """Rows of these lengths in tokens, seeded, one KV head."""
    generator = torch.Generator().manual_seed(page_size + width)
    num_pages = [-(-length // page_size) for length in lengths]
    cache = torch.full((2, sum(num_pages) + 2, page_size, 1, head_dim), poison, dtype=dtype)
    cache[:, 0] = 0
    table = torch.full((len(lengths) + 1, width), garbage, dtype=torch.int32)
    table[0] = 0
    free = (torch.randperm(sum(num_pages), generator=generator) + 1).tolist()
    for row, (length, count) in enumerate(zip(lengths, num_pages, strict=True), start=1):
        pages = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        table[row, :count] = pages
        position = torch.arange(length)
        heads = torch.randn((2, length, 1, head_dim), generator=generator).to(dtype)
        cache[:, pages[position // page_size], position % page_size] = heads
    rows = torch.arange(1, len(lengths) + 1, device=DEVICE)
    return Pool(cache.to(DEVICE), table.to(DEVICE), rows, torch.tensor(lengths, device=DEVICE))


class Kernels:
    """What the kernel cases share."""

    device = DEVICE
    i32 = staticmethod(i32)
    Row = Row
    op = staticmethod(op_of)
    pool = staticmethod(pool_of)
    LateStream = LateStream
    LateRing = LateRing

    @staticmethod
    def needs_device(part: str) -> NoReturn:
        """The rest of a case, where there is no device for it."""
        pytest.skip(f"no CUDA device: {part}; everything else of the case was checked")


@pytest.fixture(scope="session")
def kernels() -> type[Kernels]:
    """Ops, pools and late devices."""
    return Kernels


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> KernelLaunches:
    """Mirrors write through the Triton kernel, on whatever device they are, and launches are counted."""
    counter = KernelLaunches()
    monkeypatch.setattr(req_to_page_module, "mirror_apply", counter)
    return counter


@pytest.fixture
def compile_child(child_env: dict[str, str], tmp_path: Path) -> Callable[[str], Any]:
    """Runs a program in a process that compiles (no interpreter) into an empty cache; returns the JSON that it prints."""

    def run(program: str) -> Any:
        assert "TRITON_INTERPRET" not in child_env
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=child_env | {"TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
