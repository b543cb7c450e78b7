"""Decode steps as CUDA graphs: captured once for each bucket of batch sizes, replayed with one call.

A decode step of a small batch is hundreds of launches that each compute for microseconds; launching them is what takes time.
A graph is launched at once, but always does the same on the same addresses. So for each bucket there are *static* tensors that
the captured step reads, which are filled before a replay, and a static output.

A batch of R rows takes the smallest bucket B >= R. Its B - R padding rows are rows of one token that name row 0 of the mirror,
the padding sink, and write to page 0, the dummy page: they read and write nothing that belongs to anybody. What a launch
depends on besides addresses must hold for every replay; the static batch therefore says on the host that each row may be as
long as the mirror is wide, and kernels read the true lengths from `seq_lens`.

Replays run on the stream of every other step, in order, so the static tensors are free again when the next one is filled, and
the output may be read by work that is queued before the next replay. Nothing else may keep it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from runtime_service.forward_batch import ForwardBatch

_LARGEST_DEFAULT_BUCKET = 256
_DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, _LARGEST_DEFAULT_BUCKET)
# Runs before a capture: the first compiles kernels and lets libraries allocate, neither of which a capture may contain.
_NUM_WARM_UPS = 2

# Columns of a batch that a replay fills in, with what its padding rows get.
_COLUMNS = (("rows", 0), ("num_computed", 0), ("seq_lens", 1), ("input_ids", 0), ("positions", 0), ("out_cache_loc", 0))


def default_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows worth a graph, ascending, the last one the largest step unless that is very large.

    Close enough together that less than half of a batch is padding. That costs little: a decode step reads all weights whatever
    its number of rows, and a padding row attends to one token.
    """
    largest = min(max_rows, _LARGEST_DEFAULT_BUCKET)
    return (*(bucket for bucket in _DEFAULT_BUCKETS if bucket < largest), largest)


class Graph(Protocol):
    """One piece of work that is recorded once and replayed."""

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `work`; returns the tensor that each replay writes its result to."""

    def replay(self) -> None:
        """Do on the current stream what was recorded."""


class CudaGraph:
    """A `Graph` on the current CUDA device. Graphs of one pool share memory, so only the last replay's output is valid."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `Graph`."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads (gRPC's) do nothing on the device, and must not be able to spoil a capture by what libraries do in them.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    static: torch.Tensor  # int64 [len(_COLUMNS) * bucket]
    hidden: torch.Tensor  # [bucket, hidden_size]


class DecodeGraphs:
    """Captured decode steps of a model.

    Args:
        forward: computes a batch and returns hidden states [R, hidden_size]; must not look at tensors from the host.
        buckets: numbers of rows to capture, ascending.
        req_to_page: the mirror's table; only batches over this very tensor are served.
        page_size: tokens in a page.
        device: of all tensors.
        new_graph: makes an empty graph.

    Attributes:
        num_replays: steps served so far.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        *,
        buckets: Sequence[int],
        req_to_page: torch.Tensor,
        page_size: int,
        device: torch.device,
        new_graph: Callable[[], Graph] | None = None,
    ) -> None:
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError(f"buckets {list(buckets)} must ascend and be at least 1")
        self.buckets = tuple(buckets)
        self.num_replays = 0
        self._forward = forward
        self._req_to_page = req_to_page
        self._page_size = page_size
        self._device = device
        self._new_graph = new_graph
        self._captured: dict[int, _Captured] = {}
        self._padding = {value: torch.full((self.buckets[-1],), value, device=device) for value in (0, 1)}

    @torch.inference_mode()
    def capture(self) -> None:
        """Record a step of every bucket. Runs the model on padding rows, so it writes to the dummy page only."""
        new_graph = self._new_graph or self._cuda_graphs()
        # The largest first: the smaller ones then fit into the memory that it took.
        for bucket in reversed(self.buckets):
            static = torch.cat([self._padding[value][:bucket] for _, value in _COLUMNS])
            batch = self._static_batch(bucket, static)
            graph = new_graph()
            hidden = graph.capture(lambda batch=batch: self._forward(batch))  # type: ignore[misc]
            self._captured[bucket] = _Captured(graph, static, hidden)

    @staticmethod
    def _cuda_graphs() -> Callable[[], Graph]:
        pool = torch.cuda.graph_pool_handle()
        return lambda: CudaGraph(pool)

    def bucket_for(self, batch: ForwardBatch) -> int | None:
        """The bucket that serves a batch; None: it has extend rows, too many rows or another mirror, or nothing is captured."""
        num_rows = batch.num_rows
        if batch.num_extend_rows or num_rows == 0 or len(batch.input_ids) != num_rows:
            return None
        if batch.req_to_page is not self._req_to_page or batch.page_size != self._page_size:
            return None
        index = bisect_left(self.buckets, num_rows)
        bucket = self.buckets[index] if index < len(self.buckets) else None
        return bucket if bucket in self._captured else None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states [R, hidden_size] of a batch, valid until the next call; None: it has to be computed without a graph."""
        bucket = self.bucket_for(batch)
        if bucket is None:
            return None
        captured, num_rows = self._captured[bucket], batch.num_rows
        parts: list[torch.Tensor] = []
        for name, value in _COLUMNS:
            parts.append(getattr(batch, name))
            if num_rows < bucket:
                parts.append(self._padding[value][: bucket - num_rows])
        torch.cat(parts, out=captured.static)  # one launch for all columns
        captured.graph.replay()
        self.num_replays += 1
        return captured.hidden[:num_rows]

    def _static_batch(self, bucket: int, static: torch.Tensor) -> ForwardBatch:
        columns = dict(zip((name for name, _ in _COLUMNS), torch.split(static, bucket), strict=True))
        longest = self._req_to_page.shape[1] * self._page_size
        one_each = np.ones(bucket, dtype=np.int32)
        return ForwardBatch(
            req_to_page=self._req_to_page,
            page_size=self._page_size,
            input_lens=self._padding[1][:bucket],
            query_indptr=torch.arange(bucket + 1, device=self._device),
            token_rows=torch.arange(bucket, device=self._device),
            num_extend_rows=0,
            host_rows=np.zeros(bucket, dtype=np.int32),
            host_num_computed=one_each * np.int32(longest - 1),
            host_input_lens=one_each,
            sample=np.ones(bucket, dtype=np.bool_),
            clamped=np.zeros(bucket, dtype=np.bool_),
            **columns,
        )
