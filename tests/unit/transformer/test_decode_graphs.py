"""Decode steps as graphs: buckets, padding, static columns, who is eligible, and captured against eager.

Here a graph is a Python callable that a replay calls again on the same tensors, which is what a CUDA graph does on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors import attach_graphs
from runtime_service.executors.decode_graphs import CudaGraph, DecodeGraphs, default_buckets
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.executors.transformer import create_transformer
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage

DECODES = {1: ([1, 2], 6, []), 2: ([3, 4, 5], 9, []), 3: ([6], 2, []), 4: ([7, 8], 7, []), 5: ([9], 3, [])}


class Replayed:
    """A graph whose replay calls the work again and writes to the output of the capture."""

    def __init__(self) -> None:
        self.work: Callable[[], torch.Tensor] | None = None
        self.num_replays = 0

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.work = work
        self.output = work().clone()
        return self.output

    def replay(self) -> None:
        assert self.work is not None
        self.num_replays += 1
        self.output.copy_(self.work())


class Bench:
    """Graphs over a mirror, with a forward that notes the batches it was given."""

    def __init__(self, buckets: tuple[int, ...], mirror: ReqToPage) -> None:
        self.made: list[Replayed] = []
        self.seen: list[ForwardBatch] = []
        self.columns: list[dict[str, list[int]]] = []
        self.graphs = DecodeGraphs(
            self._forward,
            buckets=buckets,
            req_to_page=mirror.table,
            page_size=mirror.page_size,
            device=torch.device("cpu"),
            new_graph=self._new_graph,
        )

    def _new_graph(self) -> Replayed:
        self.made.append(Replayed())
        return self.made[-1]

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.seen.append(batch)
        names = ("rows", "num_computed", "seq_lens", "input_ids", "positions", "out_cache_loc", "input_lens", "token_rows")
        self.columns.append({name: getattr(batch, name).tolist() for name in (*names, "query_indptr")})
        return batch.input_ids[:, None] * 10 + torch.arange(2)


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
        (9999, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
    ],
)
def test_default_buckets(max_rows: int, expected: tuple[int, ...]) -> None:
    """Buckets ascend to the largest step and less than half of a batch is padding."""
    buckets = default_buckets(max_rows)
    assert buckets == expected
    assert all(after <= 2 * before for before, after in pairwise(buckets))


@pytest.mark.parametrize("buckets", [(), (0, 1), (2, 1), (1, 1)])
def test_buckets_that_are_none(buckets: tuple[int, ...], rig: Any) -> None:
    """Buckets must ascend from at least one row."""
    with pytest.raises(ValueError, match="must ascend"):
        Bench(buckets, rig.mirror)


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_bucket_choice(num_rows: int, bucket: int | None, rig: Any) -> None:
    """A batch takes the smallest bucket that holds it; one row too many takes none."""
    bench = Bench((1, 2, 4), rig.mirror)
    bench.graphs.capture()
    rows = dict(list(DECODES.items())[:num_rows])
    assert bench.graphs.bucket_for(rig.batch(rows)) == bucket


def test_capture_takes_the_largest_first_and_padding_only(rig: Any) -> None:
    """Each bucket is recorded once, on rows that are all padding and as long as the mirror is wide on the host."""
    bench = Bench((1, 4), rig.mirror)
    assert bench.graphs.run(rig.batch({1: DECODES[1]})) is None, "nothing was captured yet"
    bench.graphs.capture()
    assert [batch.num_rows for batch in bench.seen] == [4, 1]
    batch, columns = bench.seen[0], bench.columns[0]
    zeros, ones = [0] * 4, [1] * 4
    assert columns == {
        "rows": zeros,
        "num_computed": zeros,
        "seq_lens": ones,
        "input_ids": zeros,
        "positions": zeros,
        "out_cache_loc": zeros,
        "input_lens": ones,
        "token_rows": [0, 1, 2, 3],
        "query_indptr": [0, 1, 2, 3, 4],
    }
    width = rig.mirror.max_pages_per_row * rig.mirror.page_size
    assert (batch.host_num_computed + batch.host_input_lens).tolist() == [width] * 4
    assert batch.req_to_page is rig.mirror.table


def test_replay_reads_the_batch_and_pads_what_is_left(rig: Any) -> None:
    """The static columns hold the batch's own entries, then padding, also after a fuller batch; the answer has its rows."""
    rig.last_tokens[1:] = torch.tensor([11, 12, 13, 14, 15])
    bench = Bench((4,), rig.mirror)
    bench.graphs.capture()
    full = bench.graphs.run(rig.batch({row: DECODES[row] for row in (1, 2, 3, 4)}))
    assert full is not None
    assert full.tolist() == [[110, 111], [120, 121], [130, 131], [140, 141]]
    batch = rig.batch({row: DECODES[row] for row in (5, 2, 3)})
    hidden = bench.graphs.run(batch)
    assert hidden is not None
    assert hidden.tolist() == [[150, 151], [120, 121], [130, 131]]
    columns = bench.columns[-1]
    assert columns["rows"] == [5, 2, 3, 0]
    assert columns["seq_lens"] == [4, 10, 3, 1]
    assert columns["positions"] == [3, 9, 2, 0]
    assert columns["num_computed"] == [3, 9, 2, 0]
    assert columns["out_cache_loc"] == [*batch.out_cache_loc.tolist(), 0]
    assert bench.graphs.num_replays == 2
    assert bench.seen[1] is bench.seen[2], "a replay is of the recorded batch"


def test_a_masked_row_is_replayed_as_padding(rig: Any) -> None:
    """A row whose digest differs reads row 0 and writes to the dummy page in a replay too; the host was not asked."""
    rig.last_tokens[1:4] = torch.tensor([11, 12, 13])
    bench = Bench((4,), rig.mirror)
    bench.graphs.capture()
    hidden = bench.graphs.run(rig.batch({row: DECODES[row] for row in (1, 2, 3)}, masked=[False, True, False]))
    assert hidden is not None
    assert (hidden.tolist(), bench.columns[-1]["rows"]) == ([[110, 111], [0, 1], [130, 131]], [1, 0, 3, 0])
    assert bench.columns[-1]["out_cache_loc"][1] < rig.mirror.page_size


def test_batches_that_are_not_eligible(rig: Any) -> None:
    """Extend rows, another mirror, another page size, several tokens a row and empty batches are computed without a graph."""
    bench = Bench((1, 2, 4), rig.mirror)
    bench.graphs.capture()
    num_seen = len(bench.seen)
    extend = rig.batch({1: ([1, 2], 0, [1])})
    mixed = rig.batch({1: ([1, 2], 0, [1, 2]), 2: DECODES[2]})
    foreign = rig.batch({1: DECODES[1]})
    foreign.req_to_page = foreign.req_to_page.clone()
    paged = rig.batch({1: DECODES[1]})
    paged.page_size = 8
    several = rig.batch({1: DECODES[1]})
    several.input_ids = torch.tensor([1, 2])
    empty = rig.batch({1: DECODES[1]})
    empty.host_rows = np.zeros(0, dtype=np.int32)
    for batch in (extend, mixed, foreign, paged, several, empty):
        assert bench.graphs.run(batch) is None
    assert (bench.graphs.num_replays, len(bench.seen)) == (0, num_seen)


def test_captured_equals_eager(make_settings: Callable[..., Any], make_rig: Callable[..., Any]) -> None:
    """The tokens of a whole generation are those of the eager run, and padding touches no page but the dummy."""
    settings = make_settings(attention_backend="triton")
    eager, captured = make_rig(create_transformer(settings)[0]), make_rig(create_transformer(settings)[0])
    executor = captured.executor
    executor.graphs = graphs = DecodeGraphs(
        lambda batch: executor.decoder.forward(batch, executor.cache),
        buckets=(2, 4),
        req_to_page=captured.mirror.table,
        page_size=captured.mirror.page_size,
        device=torch.device("cpu"),
        new_graph=Replayed,
    )
    for layer in executor.cache.layers:
        layer.fill_(torch.nan)
    graphs.capture()
    assert all(layer[:, 1:].isnan().all() for layer in executor.cache.layers)
    pages = {1: [1, 2, 3], 2: [4, 5], 3: [6, 7]}
    prompts = {1: [5, 6, 7, 8, 9, 10], 2: [1], 3: [2, 3]}
    prefill = {row: (pages[row], 0, prompts[row]) for row in pages}
    assert captured.run(prefill).tokens.tolist() == eager.run(prefill).tokens.tolist()
    for step in range(5):
        rows = {row: (pages[row], len(prompts[row]) + step, []) for row in pages if (row, step % 2) != (1, 1)}
        if 1 in rows:
            rows[1] = (pages[1], len(prompts[1]) + step // 2, [])
        assert captured.run(rows).tokens.tolist() == eager.run(rows).tokens.tolist()
    assert graphs.num_replays == 5
    for with_graphs, without in zip(executor.cache.layers, eager.executor.cache.layers, strict=True):
        written = ~with_graphs[:, 1:].isnan()
        torch.testing.assert_close(with_graphs[:, 1:][written], without[:, 1:][written], rtol=0, atol=1e-5)


def test_graphs_are_for_cuda_and_for_kernels(make_settings: Callable[..., Any], rig: Any) -> None:
    """On a CPU, and for the fingerprint model, nothing is captured."""
    assert not attach_graphs(rig.executor, make_settings(), rig.mirror)
    assert rig.executor.graphs is None
    fingerprint = FingerprintExecutor(8, 4)
    assert not attach_graphs(fingerprint, make_settings("fingerprint"), rig.mirror)


class CudaLooks:
    """A mirror that says it is on a GPU, for what is decided before anything runs there."""

    def __init__(self, mirror: ReqToPage) -> None:
        self.max_rows, self.max_pages_per_row, self.page_size = mirror.max_rows, mirror.max_pages_per_row, mirror.page_size
        self.table = type("Table", (), {"device": torch.device("cuda")})()


@pytest.mark.parametrize("changes", [{"graphs": False}, {"attention_backend": "torch"}])
def test_what_turns_graphs_off(changes: dict[str, Any], make_settings: Callable[..., Any], rig: Any) -> None:
    """--no-graphs, and the backend that gathers pages, leave every step eager on a GPU as well."""
    assert attach_graphs(rig.executor, make_settings(**changes), CudaLooks(rig.mirror)) is False
    assert rig.executor.graphs is None


def test_failed_capture_is_a_warning(make_settings: Callable[..., Any], rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose steps cannot be captured is served without graphs, and the log says why."""

    class Failing(DecodeGraphs):
        def __init__(self, forward: Any, **options: Any) -> None:
            super().__init__(forward, **{**options, "device": torch.device("cpu")})

        def capture(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("runtime_service.executors.decode_graphs.DecodeGraphs", Failing)
    monkeypatch.setattr("runtime_service.kernels.decode_attention.DecodeWorkspace.create", lambda **_: None)
    monkeypatch.setattr(rig.executor.decoder, "attention_backend", "triton")
    with structlog.testing.capture_logs() as logs:
        assert not attach_graphs(rig.executor, make_settings(graph_buckets="1,3"), CudaLooks(rig.mirror))
    assert rig.executor.graphs is None
    assert [(entry["log_level"], entry["buckets"]) for entry in logs] == [("warning", (1, 3))]


@pytest.mark.gpu
def test_cuda_graph_replays_on_static_tensors() -> None:
    """What was recorded is done again on what the tensors hold now."""
    static = torch.zeros(4, device="cuda")
    graph = CudaGraph(torch.cuda.graph_pool_handle())
    output = graph.capture(lambda: static * 2 + 1)
    static.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    graph.replay()
    assert output.tolist() == [3.0, 5.0, 7.0, 9.0]


@pytest.mark.gpu
def test_captured_equals_eager_on_a_device(make_settings: Callable[..., Any]) -> None:
    """On a GPU, batches of one to five rows get the tokens with graphs that they get without, and graphs were used."""
    outputs = []
    for graphs in (True, False):
        settings = make_settings(device="cuda", dtype="float32", graphs=graphs)
        executor, capacity = create_transformer(settings)
        mirror = ReqToPage(settings.max_rows, 8, capacity.num_pages, settings.page_size, device="cuda")
        executor.warm_up()
        assert attach_graphs(executor, settings, mirror) is graphs
        builder, last_tokens = (
            BatchBuilder(mirror, "cuda"),
            torch.zeros(settings.max_rows + 1, dtype=torch.int64, device="cuda"),
        )
        tokens: list[list[int]] = []
        for step in range(8):
            op = _op(step, num_rows=5 if step == 0 else 1 + step % 5)
            mirror.apply(op)
            result = executor.execute(builder.build(op, last_tokens)).wait()
            last_tokens[torch.from_numpy(op.req_pool_indices.astype(np.int64)).cuda()] = torch.from_numpy(
                result.tokens.astype(np.int64)
            ).cuda()
            tokens.append(result.tokens.tolist())
        outputs.append(tokens)
        if graphs:
            assert isinstance(executor.graphs, DecodeGraphs)
            assert executor.graphs.num_replays == 7
    assert outputs[0] == outputs[1]


def _op(step: int, num_rows: int) -> ForwardOp:
    """Step 0: a prompt of three tokens in each row; later, decode rows that read those three tokens and their last one."""
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    first, ones = step == 0, np.ones(num_rows, dtype=np.int32)
    return ForwardOp(
        session_no=1,
        step=step + 1,
        req_pool_indices=rows,
        row_generations=ones,
        row_lens=ones,
        begins=ones * 0,
        sizes=ones,
        full_refresh=np.ones(num_rows, dtype=np.bool_),
        occupied_pages=rows,
        num_computed=ones * (0 if first else 3),
        num_extend_rows=num_rows if first else 0,
        input_lens=ones * (3 if first else 1),
        input_ids=np.repeat(rows * 7, 3) if first else np.zeros(0, dtype=np.int32),
        sample=np.ones(num_rows, dtype=np.bool_),
        released_rows=np.zeros(0, dtype=np.int32),
    )
