"""Cases B42 to B46: addresses, asynchronous copies, compilations, empty launches, and padding of captured batches."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service import req_to_page as req_to_page_module
from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors import attach_graphs
from runtime_service.executors.decode_graphs import DecodeGraphs
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.executors.transformer import create_transformer
from runtime_service.kernels.decode_attention import DecodeWorkspace
from runtime_service.kernels.decode_attention_triton import decode_attention_launches
from runtime_service.kernels.kv_write_triton import kv_write_launch
from runtime_service.kernels.mirror_apply import mirror_apply
from runtime_service.kernels.prefill_attention_triton import prefill_attention_launch
from runtime_service.ops import StepResult
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.settings import RuntimeSettings
from runtime_service.step_runner import StepRunner

MAP_NORESERVE = 0x4000
"""Linux: address space without memory behind it until it is touched."""


def test_b42_page_past_32_bits(kernels: Any) -> None:
    """A page id times the page stride passes 2^31 (lightseekorg/tokenspeed#501, vllm-project/vllm#47671)."""
    page_size, num_kv_heads, head_dim, num_pages = 16, 8, 128, 131080
    shape = (2, num_pages + 1, page_size, num_kv_heads, head_dim)
    size = 2 * 2 * (num_pages + 1) * page_size * num_kv_heads * head_dim
    low, high = [1, 2, 3], [131072, 131073, 131080]  # page 131072 begins at element 2^31
    if kernels.device == "cpu":
        dtype = torch.float16
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except OSError as error:
            pytest.skip(f"no {size} bytes of address space: {error}")
        cache = torch.frombuffer(memory, dtype=dtype).view(shape)  # zeros; only the pages that are written take memory
    else:
        dtype = torch.bfloat16
        if torch.cuda.mem_get_info()[0] < size + (2 << 30):
            pytest.skip(f"the pool takes {size >> 30} GiB of device memory")
        cache = torch.empty(shape, dtype=dtype, device="cuda")
        cache[:, :4] = 0
    table = torch.tensor([[0] * 3, low, high], dtype=torch.int32, device=kernels.device)
    pages = torch.tensor(low + high, device=kernels.device)
    slots = (pages[:, None] * page_size + torch.arange(page_size, device=kernels.device)).flatten()
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn((48, num_kv_heads, head_dim), generator=generator).to(kernels.device, dtype).repeat(2, 1, 1)
    kv_write_launch(heads, heads, cache, slots).run()
    assert not cache[:, 0].any(), "what belongs to page 131072 went to page 0"
    assert torch.equal(cache[0, pages].flatten(0, 1), heads)

    query = torch.randn((1, num_kv_heads, head_dim), generator=generator).to(kernels.device, dtype).repeat(2, 1, 1)
    rows, lengths = torch.tensor([1, 2], device=kernels.device), torch.tensor([48, 48], device=kernels.device)
    out = torch.full_like(query, float("nan"))
    workspace = DecodeWorkspace.empty(0, head_dim, kernels.device)
    for launch in decode_attention_launches(query, cache, table, rows, lengths, out, workspace, 0.1, 1, 1):
        launch.run()
    assert torch.equal(out[0], out[1])
    chunk = torch.full_like(query, float("nan"))
    indptr = torch.arange(3, device=kernels.device)
    prefill_attention_launch(query, cache, table, rows, indptr, lengths - 1, chunk, 0.1, 1).run()
    assert torch.equal(chunk[0], chunk[1])
    assert bool(out.any())
    if kernels.device == "cpu":
        kernels.needs_device("the same 8 GiB pool in bfloat16 with the kernels as compiled")


def test_b43_staging_buffer_is_not_reused_early(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned buffer is written again before its copy has run (NVIDIA/TensorRT-LLM#15546, vllm-project/vllm-ascend#16428)."""
    stream = kernels.LateStream()
    with monkeypatch.context() as patch:
        patch.setattr(req_to_page_module, "mirror_apply", lambda *args: stream.put(lambda: mirror_apply(*args)))
        mirror = ReqToPage(8, 64, 10_000, 16)
        mirror._staging = kernels.LateRing(stream, capacity=64)
        mirror.apply(kernels.op([kernels.Row(1, [7, 1, 3])]))
        mirror.apply(kernels.op([kernels.Row(2, [9, 8, 6])]))
        assert stream.num_waiting > 2, "both steps were staged before anything was copied"
        stream.run()
        assert [row.tolist() for row in mirror.read_rows([1, 2])] == [[7, 1, 3], [9, 8, 6]]
        rng = np.random.default_rng(11)
        _random_steps(kernels, mirror, rng, lambda: stream.run_some(int(rng.integers(0, 4))), stream.run)
    if kernels.device == "cpu":
        kernels.needs_device("pinned memory and a stalled CUDA stream")
    mirror = ReqToPage(8, 513, 1 << 20, 16, device="cuda")
    cycles = 200_000_000
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    mirror.apply(kernels.op([kernels.Row(1, [7, 1, 3])]))
    mirror.apply(kernels.op([kernels.Row(2, [9, 8, 6])]))
    assert [row.tolist() for row in mirror.read_rows([1, 2])] == [[7, 1, 3], [9, 8, 6]]
    rng = np.random.default_rng(11)

    def stall() -> None:
        if rng.random() < 0.02:
            torch.cuda._sleep(int(rng.integers(1, cycles // 10)))  # type: ignore[no-untyped-call]

    _random_steps(kernels, mirror, rng, stall)


def _random_steps(
    kernels: Any,
    mirror: ReqToPage,
    rng: np.random.Generator,
    between: Callable[[], None],
    finish: Callable[[], None] = lambda: None,
) -> None:
    """A thousand steps of refreshes and tails, wider rows included, and then I1 against rows kept in lists."""
    model: dict[int, list[int]] = {1: [7, 1, 3], 2: [9, 8, 6]}
    width = mirror.max_pages_per_row
    for _ in range(1000):
        between()
        rows = []
        for row in (np.flatnonzero(rng.random(8) < 0.5) + 1).tolist():
            old = model.get(row, [])
            full = not old or len(old) > width + 9 or rng.random() < 0.2
            new = rng.integers(1, 10_000, size=int(rng.integers(1, width + 9) if full else rng.integers(0, 4))).tolist()
            model[row] = new if full else old + new
            rows.append(kernels.Row(row, model[row], 0 if full else len(old), full))
        mirror.apply(kernels.op(rows))
    finish()
    assert [row.tolist() for row in mirror.read_rows(range(1, 9))] == [model.get(row, [])[:width] for row in range(1, 9)]


# Where there is no device, Triton's launcher gets a driver that names a target only, and a launch becomes a compilation of
# what would have been launched: what is kept is what a server would have compiled.
LAUNCHES = """
import functools, json
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface


class NoDevice:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


on_gpu = torch.cuda.is_available()
if not on_gpu:
    driver.set_active(NoDevice())
    KernelInterface.__getitem__ = lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
from runtime_service import req_to_page
from runtime_service.kernels.mirror_apply_triton import mirror_apply_kernel, mirror_apply_triton
from runtime_service.ops import ForwardOp

req_to_page.mirror_apply = mirror_apply_triton
mirror = req_to_page.ReqToPage(64, 512, 1 << 20, 16, device="cuda" if on_gpu else "cpu")
rng = np.random.default_rng(3)
i32 = lambda values: np.asarray(values, dtype=np.int32)
count = lambda: len(mirror_apply_kernel.device_caches[0][0])


def step(num_rows, total):
    sizes = rng.multinomial(total, [1 / num_rows] * num_rows)
    begins = rng.integers(0, 200, size=num_rows)
    rows = rng.permutation(np.arange(1, 65))[:num_rows]
    none = i32([])
    mirror.apply(ForwardOp(
        session_no=1, step=1, req_pool_indices=i32(rows), row_generations=i32(rows), row_lens=i32(begins + sizes),
        begins=i32(begins), sizes=i32(sizes), full_refresh=np.zeros(num_rows, dtype=np.bool_),
        occupied_pages=i32(rng.integers(1, 1 << 20, size=total)), num_computed=none, num_extend_rows=0,
        input_lens=none, input_ids=none, sample=np.zeros(num_rows, dtype=np.bool_), released_rows=none,
    ))


for number in range(20):
    step(1 + number % 5, 7 * number)
after_warm_up = count()
for num_rows in range(1, 65):
    for total in range(num_rows % 5, 301, 5):
        step(num_rows, total)
# Other mirrors, views of wider tables, and buffers at other addresses must not make a difference either.
base = torch.zeros((300, 4096), dtype=torch.int32, device=mirror.device)
staged = torch.zeros(4096, dtype=torch.int32, device=mirror.device)  # rows that write nothing
for view in (base, base[:, 1:514], base[:, 2:10], base[:, ::2], base.T, base[:, :1], base[:1, :1]):
    for buffer in (staged, staged[1:], staged[3:]):
        for num_rows in (1, 2, 8, 15, 16, 17, 255, 256):
            mirror_apply_triton(view, buffer, num_rows, 1)
params = {p.name: [p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment] for p in mirror_apply_kernel.params}
print(json.dumps({"after_warm_up": after_warm_up, "in_all": count(), "params": params, "on_gpu": on_gpu}))
"""


def test_b44_no_compilation_after_warm_up(kernels: Any, compile_child: Callable[[str], Any]) -> None:
    """A value that changes from step to step is a compile-time constant (vllm-project/vllm#48650, ROCm/aiter#4545)."""
    result = compile_child(LAUNCHES)
    assert result["after_warm_up"] == result["in_all"] == 1
    assert result["params"] == {
        "mirror_ptr": [False, False, True],
        "staged_ptr": [False, False, True],
        "num_rows": [False, True, False],
        "row_stride": [False, True, False],
        "entry_stride": [False, True, False],
        "BLOCK": [True, False, False],
    }
    if not result["on_gpu"]:
        kernels.needs_device("launches of the compiled kernel")


def test_b45_nothing_to_do(kernels: Any, launches: Any) -> None:
    """A grid of size zero aborts once the kernel is compiled (triton-lang/triton-ascend#984, triton-lang/triton#10464)."""
    shape = (4, 8, 32, 4)
    executor = FingerprintExecutor(num_pages=32, page_size=4, device=kernels.device)
    runner = StepRunner(SessionState(*shape, 997), ReqToPage(*shape, device=kernels.device), executor)
    runner.open(1, 1, 0)
    row = kernels.Row
    first = runner.run(kernels.op([row(1, [5, 6], ids=[1, 2, 3], lease="a"), row(2, [7], ids=[4], lease="b")]))
    assert isinstance(first, StepResult)
    assert launches.count == 1
    before = runner.mirror.table.clone()
    second = runner.run(kernels.op([], step=2))
    third = runner.run(kernels.op([row(1, [5, 6], 2, False, computed=3), row(2, [7], 1, False, computed=1)], step=3))
    for result, step, num_rows in ((second, 2, 0), (third, 3, 2)):
        assert isinstance(result, StepResult), result
        assert (result.step, len(result.tokens)) == (step, num_rows)
    assert launches.count == 1, "a step without a page to write launched the kernel"
    assert torch.equal(runner.mirror.table, before)
    assert executor.violations == []


class Replayed:
    """A graph without a device: a replay calls the captured work again on the same tensors."""

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.work = work
        self.output = work().clone()
        return self.output

    def replay(self) -> None:
        self.output.copy_(self.work())


def test_b46_padding_writes_no_live_page(kernels: Any) -> None:
    """Padding rows of a replayed bucket write where the last big batch did (alibaba/rtp-llm#1321, m0at/rvllm#32)."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 16, "max_rows": 4, "device": kernels.device}
    settings = RuntimeSettings(model="tiny", attention_backend="triton", dtype="float32", graph_buckets="4", **options)
    executor, capacity = create_transformer(settings)
    mirror = ReqToPage(4, 8, capacity.num_pages, 4, device=kernels.device)
    if kernels.device == "cpu":
        executor.graphs = DecodeGraphs(
            lambda batch: executor.decoder.forward(batch, executor.cache),
            buckets=(4,),
            req_to_page=mirror.table,
            page_size=4,
            device=torch.device("cpu"),
            new_graph=Replayed,
        )
        executor.graphs.capture()
    else:
        executor.warm_up()
        assert attach_graphs(executor, settings, mirror)
    graphs = executor.graphs
    assert isinstance(graphs, DecodeGraphs)
    builder = BatchBuilder(mirror, kernels.device)
    last_tokens = torch.tensor([0, 11, 12, 13, 14], device=kernels.device)

    def run(*rows: Any) -> list[int]:
        op = kernels.op(rows)
        mirror.apply(op)
        tokens: list[int] = executor.execute(builder.build(op, last_tokens)).wait().tokens.tolist()
        return tokens

    row = kernels.Row
    run(*(row(number, [number], ids=[number, 5], lease=f"r{number}") for number in range(1, 5)))
    run(*(row(number, [number], 1, False, computed=2) for number in range(1, 5)))
    assert graphs.num_replays == 1
    before = [layer.clone() for layer in executor.cache.layers]
    run(row(1, [1], 1, False, computed=3))
    assert graphs.num_replays == 2
    for layer, old in zip(executor.cache.layers, before, strict=True):
        # Bit for bit: memory that nobody has written may hold what is equal to nothing.
        assert torch.equal(layer[:, 2:].view(torch.uint8), old[:, 2:].view(torch.uint8))
        assert not torch.equal(layer[:, 1, 3], old[:, 1, 3])
    static = dict(zip(("rows", "num_computed", "seq_lens", "input_ids", "positions", "out_cache_loc"),
                      torch.split(graphs._captured[4].static, 4), strict=True))  # fmt: skip
    assert static["rows"].tolist() == [1, 0, 0, 0]
    assert static["out_cache_loc"].tolist() == [7, 0, 0, 0]
    assert static["seq_lens"].tolist() == [4, 1, 1, 1]
    if kernels.device == "cpu":
        kernels.needs_device("the replay of a CUDA graph")
