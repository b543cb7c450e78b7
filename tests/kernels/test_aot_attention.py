"""The attention kernels compile for real GPUs, ahead of time and without one, without spilled registers, and compile once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Triton's launcher with a driver that names a target and has no device: `Launch.compile` compiles what `run` would launch.
# What the program prints is one list entry per compiled kernel.
NO_DEVICE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

backend, arch, warp_size = sys.argv[1], sys.argv[2], int(sys.argv[3])


class NoDevice:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp_size)


driver.set_active(NoDevice())
from runtime_service.kernels.decode_attention import DecodeWorkspace
from runtime_service.kernels.decode_attention_triton import decode_attention_launches
from runtime_service.kernels.decode_inputs_triton import decode_inputs_launch
from runtime_service.kernels.kv_write_triton import kv_write_launch
from runtime_service.kernels.prefill_attention_triton import prefill_attention_launch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def index(length, offset=0):
    return torch.zeros(length + offset, dtype=torch.int64)[offset:]


def pool(dtype, head_dim, num_kv_heads, page_size):
    return torch.zeros((2, 3, page_size, num_kv_heads, head_dim), dtype=DTYPES[dtype])
"""

COMPILE = """
def decode(dtype, head_dim, group, page_size, queries=1):
    query = torch.zeros((2 * queries, 2 * group, head_dim), dtype=DTYPES[dtype])
    cache, table = pool(dtype, head_dim, 2, page_size), torch.zeros((3, 8), dtype=torch.int32)
    workspace = DecodeWorkspace.empty(len(query) * 2 * group * 2, head_dim, "cpu")
    return decode_attention_launches(
        query, cache, table, index(2), index(2), torch.empty_like(query), workspace, 0.1, queries, 2
    )


def prefill(dtype, head_dim, group, page_size):
    query = torch.zeros((9, 2 * group, head_dim), dtype=DTYPES[dtype])
    cache, table = pool(dtype, head_dim, 2, page_size), torch.zeros((3, 8), dtype=torch.int32)
    return prefill_attention_launch(query, cache, table, index(2), index(3), index(2), torch.empty_like(query), 0.1, 5)


def usage(compiled):
    if "cubin" not in compiled.asm:
        return dict(re.findall(r"\\.(vgpr_spill_count|private_segment_fixed_size):\\s+(\\d+)", compiled.asm["amdgcn"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(REG|STACK|LOCAL):(\\d+)", text))


def compiled(name, launch):
    kernel = launch.compile()
    ttir, assembly = kernel.asm["ttir"], kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    return {
        "name": f"{launch.kernel.fn.__name__} {name}",
        "usage": {key: int(value) for key, value in usage(kernel).items()},
        "products": sorted(set(re.findall(r"arith\\.muli .*: (?:tensor<[\\dx]+x)?(\\w+)", ttir))),
        "offsets": sorted(set(re.findall(r"tt\\.addptr .*ptr<\\w+>>?, (?:tensor<[\\dx]+x)?(\\w+)", ttir))),
        "target": re.search(r"\\.target sm_\\w+|gfx\\w+", assembly).group(),
        "binary": len(kernel.asm.get("cubin") or kernel.asm["hsaco"]),
    }


results = []
# Each head dimension with another page size, a power of two or not. 80 and 96 take the same tiles, one dtype each does.
for dtype, head_dims in (("fp16", (64, 96, 128, 256)), ("bf16", (64, 80, 128, 256))):
    for head_dim in head_dims:
        page_size = {64: 16, 80: 3, 96: 48, 128: 16, 256: 129}[head_dim]
        attend, reduce = decode(dtype, head_dim, 4, page_size)
        results.append(compiled(f"{dtype} {head_dim}", attend))
        results.append(compiled(f"{dtype} {head_dim}", prefill(dtype, head_dim, 4, page_size)))
        if head_dim in (80, 256):
            results.append(compiled(f"{dtype} {head_dim}", reduce))
for head_dim, group, queries in ((128, 8, 4), (256, 8, 8)):  # verification of drafts: 32 and 64 lanes
    results.append(compiled(f"bf16 {head_dim} x{group * queries}", decode("bf16", head_dim, group, 16, queries)[0]))
for launch in (*decode("fp32", 64, 4, 16), prefill("fp32", 64, 4, 16)):
    results.append(compiled("fp32 64", launch))
heads = torch.zeros((2, 2, 128), dtype=torch.bfloat16)
results.append(compiled("bf16 128", kv_write_launch(heads, heads, pool("bf16", 128, 2, 16), index(2))))
columns = [index(2) for _ in range(5)]
table = torch.zeros((3, 8), dtype=torch.int32)
results.append(compiled("", decode_inputs_launch(table, columns[0], index(3), 48, 300, *columns[2:])))
print(json.dumps(results))
"""

# What a server may see from one step to the next, with index columns at every address that int64 can have.
VARIANTS = """
launches = []
for rows in (1, 2, 3, 8, 15, 16, 17, 64, 255, 256):
    for offset, width in ((0, 16), (1, 16), (3, 37), (0, 1)):
        fused = torch.zeros((rows, 8, 64), dtype=torch.float16)
        cache = torch.zeros((2, 3 + offset, 16, 2, 64), dtype=torch.float16)
        base = torch.zeros((9, width + offset), dtype=torch.int32)
        table = base[:, offset:]
        columns = [index(rows, offset) for _ in range(5)]
        for query in (fused[:, :4], fused[:, :4].contiguous()):
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            for num_splits in (1, 2, 16):
                workspace = DecodeWorkspace.empty(0 if num_splits == 1 else rows * 4 * num_splits, 64, "cpu")
                launches += decode_attention_launches(
                    query, cache, table, columns[0], columns[1], out, workspace, 0.1 * rows, 1, num_splits
                )
            launches.append(
                prefill_attention_launch(
                    query, cache, table, columns[0], index(rows + 1, offset), columns[1], out, 0.1, rows
                )
            )
        launches.append(kv_write_launch(fused[:, 4:6], fused[:, 6:], cache, columns[0]))
        launches.append(decode_inputs_launch(table, columns[0], index(9), 16, 16 * width, *columns[2:]))
for launch in launches:
    launch.compile()
kernels = {launch.kernel.fn.__name__: launch.kernel for launch in launches}
flags = lambda p: [p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment]
print(
    json.dumps(
        {
            name: {
                "variants": len(kernel.device_caches[0][0]),
                "params": {p.name: flags(p) for p in kernel.params},
            }
            for name, kernel in kernels.items()
        }
    )
)
"""


def run_child(program: str, arguments: list[str], env: dict[str, str], cache: Path) -> Any:
    """Run a program in a process that compiles (no interpreter) into an empty cache; returns what it prints."""
    assert "TRITON_INTERPRET" not in env
    done = subprocess.run(
        [sys.executable, "-c", NO_DEVICE + program, *arguments],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("backend", "arch", "warp_size", "target", "spills"),
    [
        ("cuda", "80", 32, ".target sm_80", ["STACK", "LOCAL"]),
        ("cuda", "90", 32, ".target sm_90a", ["STACK", "LOCAL"]),
        ("cuda", "100", 32, ".target sm_100a", ["STACK", "LOCAL"]),
        ("hip", "gfx942", 64, "gfx942", ["vgpr_spill_count", "private_segment_fixed_size"]),
    ],
)
def test_kernels_compile_without_spills_for(
    backend: str,
    arch: str,
    warp_size: int,
    target: str,
    spills: list[str],
    child_env: dict[str, str],
    tmp_path: Path,
    record_property: pytest.RecordProperty,
) -> None:
    """Every kernel becomes machine code whose registers suffice (float32 is only reported), with 64-bit products (B42)."""
    kernels = run_child(COMPILE, [backend, arch, str(warp_size)], child_env, tmp_path)
    assert len(kernels) == 26
    for kernel in kernels:
        name = kernel["name"]
        record_property(name, kernel["usage"])
        assert (kernel["target"], kernel["binary"] > 1000) == (target, True), name
        assert kernel["products"] == ["i64"], name
        assert set(spills) <= set(kernel["usage"]), name
    spilled = {kernel["name"]: kernel["usage"] for kernel in kernels if any(kernel["usage"][spill] for spill in spills)}
    assert {name: usage for name, usage in spilled.items() if "fp32" not in name} == {}


CONSTANTS = {
    "kv_write_kernel": {"TOKEN_SIZE", "BLOCK"},
    "decode_inputs_kernel": {"PAGE_SIZE", "BLOCK"},
    "prefill_attention_kernel": {
        *("NUM_KV_HEADS", "GROUP", "HEAD_DIM", "HEAD_DIM_PADDED", "PAGE_SIZE", "BLOCK_M", "BLOCK_N"),
    },
    "decode_attention_kernel": {
        *("NUM_KV_HEADS", "GROUP", "QUERIES", "HEAD_DIM", "HEAD_DIM_PADDED", "PAGE_SIZE", "BLOCK_M", "BLOCK_N"),
        *("MIN_SPLIT", "MAX_SPLITS"),
    },
    "reduce_splits_kernel": {"QUERIES", "HEAD_DIM", "HEAD_DIM_PADDED", "MIN_SPLIT", "MAX_SPLITS", "BLOCK"},
}
HEAD_POINTERS = {"query_ptr", "key_ptr", "value_ptr", "out_ptr", "keys_ptr", "values_ptr", "key_cache_ptr", "value_cache_ptr"}
"""Pointers whose alignment may select a compilation, because the host lets only one alignment through."""


def test_no_launch_compiles_a_second_time(child_env: dict[str, str], tmp_path: Path) -> None:
    """Ten row counts times eight layouts and three split counts share one compilation: no integer selects another (B44)."""
    kernels = run_child(VARIANTS, ["cuda", "90", "32"], child_env, tmp_path)
    assert set(kernels) == set(CONSTANTS)
    for name, kernel in kernels.items():
        assert kernel["variants"] == 1, name
        constants = {param for param, (is_constant, _, _) in kernel["params"].items() if is_constant}
        assert constants == CONSTANTS[name]
        for param, (_, ignores_value, ignores_alignment) in kernel["params"].items():
            if param in constants or param in HEAD_POINTERS or param == "scale":  # floats never select a compilation
                continue
            assert (ignores_value, ignores_alignment) == ((False, True) if param.endswith("_ptr") else (True, False)), param
