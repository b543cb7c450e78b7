"""The memory plan: what it counts, what it refuses before anything is allocated, how it is shown, and the measured step."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime_service import memory_plan
from runtime_service.errors import SettingError
from runtime_service.executors import sizing
from runtime_service.executors.profiling import CudaMeter, dummy_step, measure_peak, profile_steps
from runtime_service.executors.reserves import estimate_reserve, graph_buckets
from runtime_service.executors.transformer import create_transformer
from runtime_service.memory_plan import MemoryPlan, format_nbytes, plan_memory, write_plan
from runtime_service.models.tiny import TINY_CONFIG
from runtime_service.settings import RuntimeSettings, load_settings

CUDA = torch.device("cuda", 0)


def settings(**changes: Any) -> RuntimeSettings:
    """The built-in model on a CPU with 16 MiB of KV pages."""
    return load_settings(**({"model": "tiny", "device": "cpu", "kv_cache_gib": 1 / 64, "max_rows": 8} | changes))


def sizes(plan: MemoryPlan) -> dict[str, int]:
    """Bytes by first word of the item's name."""
    return {item.name.split(maxsplit=1)[0]: item.nbytes for item in plan.items}


def test_plan_is_what_is_then_allocated() -> None:
    """Weights, KV pages and the mirror take exactly what the plan says."""
    plan = plan_memory(settings())
    executor, capacity = create_transformer(settings())
    weights = executor.decoder.weights
    held = {id(weights.embedding): weights.embedding.nbytes, id(weights.final_norm): weights.final_norm.nbytes}
    held[id(weights.head)] = weights.head.nbytes
    for layer in weights.layers:
        tensors = [getattr(layer, name) for name in layer.__slots__]
        held |= {id(tensor): tensor.nbytes for tensor in tensors if tensor is not None}
    planned = sizes(plan)
    assert planned["weights"] == sum(held.values())
    assert planned["KV"] == executor.cache.nbytes <= 2**24
    assert planned["mirror"] == 9 * capacity.max_pages_per_row * 4
    assert (plan.num_pages, plan.max_pages_per_row) == (capacity.num_pages, capacity.max_pages_per_row)
    assert plan.total_nbytes == sum(planned.values())
    assert plan.left_nbytes == plan.available_nbytes - plan.total_nbytes


def test_plan_of_the_fingerprint_model() -> None:
    """Twelve bytes a cell, and no weights."""
    plan = plan_memory(load_settings(model="fingerprint", page_size=4, num_pages=9, max_rows=3, max_context=17))
    assert sizes(plan) == {"KV": 10 * 4 * 12, "mirror": 4 * 5 * 4}
    assert (plan.device, plan.num_pages, plan.max_pages_per_row) == ("cpu", 9, 5)


def test_activations_grow_with_the_step() -> None:
    """Twice the tokens take twice the memory, up to what the rows' logits take."""
    few, many = (estimate_reserve(settings(max_step_tokens=n), TINY_CONFIG, torch.float32, CUDA, "triton") for n in (512, 1024))
    rows = 8 * TINY_CONFIG.vocab_size * (4 + 4 + 40)
    assert many.activations - rows == 2 * (few.activations - rows)
    gathered = estimate_reserve(settings(max_step_tokens=512), TINY_CONFIG, torch.float32, CUDA, "torch")
    assert gathered.activations - few.activations == 128 << 20
    assert (gathered.graphs, gathered.num_graphs) == (0, 0)
    assert few.graphs > 0
    assert few.num_graphs == 4


@pytest.mark.parametrize(
    ("changes", "device", "backend", "expected"),
    [
        ({}, "cuda", "triton", (1, 2, 4, 8)),
        ({"graph_buckets": "2,6"}, "cuda", "triton", (2, 6)),
        ({"graphs": False}, "cuda", "triton", ()),
        ({}, "cuda", "torch", ()),
        ({}, "cpu", "triton", ()),
    ],
)
def test_graph_buckets(changes: dict[str, Any], device: str, backend: str, expected: tuple[int, ...]) -> None:
    """Graphs are for kernels on a GPU; the buckets are those of the setting, or the default ones."""
    assert graph_buckets(settings(**changes), torch.device(device), backend) == expected


class Gpu:
    """A GPU of which nothing is known but its free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        monkeypatch.setattr(sizing, "choose_device", lambda name: CUDA)
        monkeypatch.setattr(sizing, "available_memory", lambda device: (self.free, "the free memory of cuda:0"))


def test_kv_pages_on_a_gpu_leave_room_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fraction is of what weights, the largest step and the graphs leave; nothing of it touches a device."""
    Gpu(monkeypatch, 2**30)
    given = settings(device="cuda", kv_memory_fraction=0.5, dtype="float32")
    plan = plan_memory(given)
    planned = sizes(plan)
    page = planned["KV"] // (plan.num_pages + 1)
    budget = (2**30 - planned["weights"] - planned["activations"] - planned["CUDA"]) // 2
    assert 0 <= budget - planned["KV"] < page
    assert (plan.attention_backend, plan.available) == ("triton", "the free memory of cuda:0")


def test_measured_step_replaces_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the weights are loaded, free memory is without them and the measured peak is what is kept for a step."""
    gpu = Gpu(monkeypatch, 2**30)
    given = settings(device="cuda", dtype="float32")
    before = sizing.size_model(given, TINY_CONFIG)
    gpu.free -= before.weights_nbytes
    again = sizing.size_model(given, TINY_CONFIG, measured=before.reserve.activations)
    assert again == replace(before, reserve=replace(before.reserve, measured=True))
    larger = sizing.size_model(given, TINY_CONFIG, measured=before.reserve.activations + 2**20)
    page = before.kv_nbytes // (before.num_pages + 1)
    assert before.num_pages - larger.num_pages == pytest.approx(0.9 * 2**20 / page, abs=1)


@pytest.mark.parametrize(
    ("free", "changes", "message"),
    [
        (2**20, {}, r"--kv-memory-fraction: 0.9 leaves 0 bytes for KV pages, and two pages take 16384"),
        (2**10, {}, r"--model: tiny has weights of .* and the free memory of cuda:0 has"),
        (2**30, {"num_pages": 10**6}, r"--num-pages: 1000000 takes 7.6 GiB .* more than the 1.0 GiB of the free memory"),
    ],
)
def test_too_little_memory_names_value_and_limit(
    free: int, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot fit is refused with the setting, its value and the limit, before anything is allocated."""
    Gpu(monkeypatch, free)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("something was allocated"))
    with pytest.raises(SettingError, match=message):
        plan_memory(settings(device="cuda", dtype="float32", **changes))


def test_too_little_memory_for_one_row_of_the_context() -> None:
    """A stated context that no row could hold is refused, not cut."""
    with pytest.raises(SettingError, match=r"--kv-cache-gib: 2e-06 holds 3 pages .*one row of --max-context takes 4"):
        plan_memory(settings(page_size=1, max_context=4, kv_cache_gib=2e-6, dtype="float32"))


def test_unknown_model_is_named() -> None:
    """A model that is nothing known, and no directory, is refused by name."""
    with pytest.raises(SettingError, match="--model: no/such is neither"):
        plan_memory(settings(model="no/such"))


def test_dummy_step_spreads_its_tokens() -> None:
    """Every token is counted once, positions begin at 0 in each row, and nothing but page 0 is named."""
    batch = dummy_step(11, 4, 4, torch.device("cpu"))
    assert batch.host_input_lens.tolist() == [3, 3, 3, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    assert batch.query_indptr.tolist() == [0, 3, 6, 9, 11]
    assert batch.token_rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert int(batch.out_cache_loc.max()) < 4
    assert not batch.req_to_page.any()
    assert dummy_step(9, 1, 4, torch.device("cpu")).req_to_page.shape == (1, 3)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_profiled_steps_touch_page_0_only(backend: str) -> None:
    """The largest steps run on a model whose cache has one page beside the dummy page, and leave that page alone."""
    given = settings(num_pages=1, page_size=4, attention_backend=backend)
    executor, _ = create_transformer(given)
    for layer in executor.cache.layers:
        layer[:, 1:] = torch.nan
    profile_steps(executor, num_tokens=40, max_rows=8, page_size=4, max_context=16, device=torch.device("cpu"))
    assert all(bool(layer[:, 1:].isnan().all()) for layer in executor.cache.layers)


def test_peak_is_counted_from_what_was_there() -> None:
    """What was allocated before does not count, and nothing is ever negative."""

    class Meter:
        def __init__(self, before: int, peak: int) -> None:
            self.calls: list[str] = []
            self._before, self._peak = before, peak

        def start(self) -> int:
            self.calls.append("start")
            return self._before

        def peak(self) -> int:
            self.calls.append("peak")
            return self._peak

    meter = Meter(100, 130)
    assert measure_peak(lambda: meter.calls.append("work"), meter) == 30
    assert meter.calls == ["start", "work", "peak"]
    assert measure_peak(lambda: None, Meter(100, 90)) == 0


def test_table_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """People get units and the sum; programs get one object with bytes."""
    plan = plan_memory(settings())
    out = io.StringIO()
    write_plan(plan, out, as_json=True)
    data = json.loads(out.getvalue())
    assert data["total_nbytes"] == sum(item["nbytes"] for item in data["items"])
    assert data["left_nbytes"] == data["available_nbytes"] - data["total_nbytes"]
    assert (data["model"], data["num_pages"], data["attention_backend"]) == ("tiny", plan.num_pages, "torch")
    out = io.StringIO()
    write_plan(plan, out, as_json=False)
    text = out.getvalue()
    for words in ("tiny on cpu: float32, attention torch, page_size 16", "weights (float32)", "16.0 MiB", "total", "left"):
        assert words in text
    out = io.StringIO()
    write_plan(replace(plan, available_nbytes=1), out, as_json=False)
    assert "missing" in out.getvalue()
    assert memory_plan.format_nbytes is format_nbytes
    assert [format_nbytes(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.00 GiB"]


def test_print_plan_exits_without_serving(child_env: dict[str, str]) -> None:
    """`pagemirror runtime --print-plan --json` prints one object and ends with 0; nothing listens."""
    command = [sys.executable, "-m", "scheduler_service.cli", "runtime", "--print-plan", "--json", "--model", "tiny"]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--json"], 2, "--json goes with --print-plan"),
        (
            ["--print-plan", "--model", "tiny", "--device", "cpu", "--kv-cache-gib", "1e-9"],
            1,
            "--kv-cache-gib: 1e-09 leaves 1 bytes",
        ),
        (["--print-plan", "--graph-buckets", "2,1"], 2, "--graph-buckets: '2,1': numbers of rows must"),
        (["--print-plan", "--dtype", "int4"], 2, "--dtype: 'int4': input should be"),
    ],
)
def test_print_plan_refusals(arguments: list[str], status: int, message: str, child_env: dict[str, str]) -> None:
    """Settings that cannot be are one line on stderr, and a status other than 0."""
    command = [sys.executable, "-m", "runtime_service", *arguments]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_measured_peak_on_a_device() -> None:
    """The meter sees a temporary tensor, and not the one that stays."""
    device = torch.device("cuda", torch.cuda.current_device())
    stays = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    peak = measure_peak(lambda: torch.empty(32 << 20, dtype=torch.uint8, device=device).fill_(1), CudaMeter(device))
    assert 32 << 20 <= peak < 40 << 20
    assert stays.is_cuda


@pytest.mark.gpu
def test_pages_on_a_device_follow_from_the_measured_step() -> None:
    """Loading on a GPU measures the largest step and takes no more than its share of what is left for KV pages."""
    free, _ = torch.cuda.mem_get_info()
    executor, capacity = create_transformer(
        settings(device="cuda", dtype="float32", kv_memory_fraction=0.01, max_step_tokens=256)
    )
    assert capacity.num_pages == executor.cache.num_pages >= 1
    assert executor.cache.nbytes <= 0.01 * free
