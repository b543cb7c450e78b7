"""The kernels compile for real GPUs, ahead of time and without one, and compile once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime_service.kernels.mirror_apply_triton import BLOCK, mirror_apply_kernel

backend, arch, warp_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
signature = {"mirror_ptr": "*i32", "staged_ptr": "*i32", "num_rows": "i32", "row_stride": "i32", "entry_stride": "i32"}
source = ASTSource(mirror_apply_kernel, signature | {"BLOCK": "constexpr"}, {"BLOCK": BLOCK})
compiled = triton.compile(source, target=GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp_size))
print(json.dumps({name: [len(text), text if name in ("ttir", "ptx", "amdgcn") else ""] for name, text in compiled.asm.items()}))
"""


def run_child(program: str, arguments: list[str], env: dict[str, str], cache: Path) -> dict[str, Any]:
    """Run a program in a process that compiles (no interpreter) into an empty cache; returns what it prints."""
    assert "TRITON_INTERPRET" not in env
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("backend", "arch", "warp_size", "assembly", "target_line", "binary"),
    [
        ("cuda", "80", 32, "ptx", ".target sm_80", "cubin"),
        ("cuda", "90", 32, "ptx", ".target sm_90", "cubin"),
        ("cuda", "100", 32, "ptx", ".target sm_100", "cubin"),
        ("hip", "gfx942", 64, "amdgcn", "gfx942", "hsaco"),
    ],
)
def test_kernel_compiles_for(
    backend: str,
    arch: str,
    warp_size: int,
    assembly: str,
    target_line: str,
    binary: str,
    child_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """The kernel becomes machine code for this architecture, and every product in it is of 64 bits (B42)."""
    result = run_child(COMPILE, [backend, arch, str(warp_size)], child_env, tmp_path)
    size, text = result[assembly]
    assert size > 0
    assert target_line in text
    assert "mirror_apply_kernel" in text
    assert result[binary][0] > 1000
    products = re.findall(r"arith\.muli .*: (?:tensor<\d+x)?(\w+)", result["ttir"][1])
    assert len(products) >= 3  # row and entry times stride, block number times block size
    assert set(products) == {"i64"}
