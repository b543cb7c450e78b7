"""The row-digest kernel compiles for real GPUs, ahead of time and without one, with 64-bit arithmetic, and compiles once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# One process compiles for all targets; then Triton's launcher, with a driver that names a target and has no device, compiles
# what a server would have compiled after launches of many sizes and layouts.
PROGRAM = """
import json, re
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from runtime_service.kernels.row_digest_triton import BLOCK, row_digest_kernel, row_digest_launch

columns = ("rows_ptr", "row_lens_ptr", "valid_lens_ptr", "digests_ptr")
signature = {"req_to_page_ptr": "*i32", **dict.fromkeys(columns, "*i64"), "row_stride": "i32", "BLOCK": "constexpr"}
targets = {}
for backend, arch, warp_size in (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)):
    source = ASTSource(row_digest_kernel, signature, {"BLOCK": BLOCK})
    asm = triton.compile(source, target=GPUTarget(backend, arch, warp_size)).asm
    assembly = asm.get("ptx") or asm["amdgcn"]
    targets[str(arch)] = {
        "target": re.search(r"\\.target sm_\\w+|gfx\\w+", assembly).group(),
        "binary": len(asm.get("cubin") or asm["hsaco"]),
        "products": sorted(set(re.findall(r"arith\\.muli .*: (?:tensor<[\\dx]+x)?(\\w+)", asm["ttir"]))),
        "shifts": sorted(set(re.findall(r"arith\\.(sh\\w+) .*: (?:tensor<[\\dx]+x)?(\\w+)", asm["ttir"]))),
        "loads": asm["ttir"].count("tt.load"),
    }


class NoDevice:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(NoDevice())
base = torch.zeros((300, 4096), dtype=torch.int32)
numbers = torch.zeros(300, dtype=torch.int64)
for table in (base, base[:, 1:514], base[:, 2:10], base[:, :1], base[:1, :1]):
    for offset in (0, 1, 3):
        for num_rows in (1, 2, 3, 8, 15, 16, 17, 64, 255, 256):
            row_digest_launch(table, *[numbers[offset : offset + num_rows]] * 4).compile()
params = {p.name: [p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment] for p in row_digest_kernel.params}
print(json.dumps({"targets": targets, "variants": len(row_digest_kernel.device_caches[0][0]), "params": params}))
"""


@pytest.fixture(scope="module")
def compiled(child_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process that compiles (no interpreter) into an empty cache has to say."""
    assert "TRITON_INTERPRET" not in child_env
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_env | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("arch", "target"), [("80", ".target sm_80"), ("90", ".target sm_90a"), ("100", ".target sm_100a"), ("gfx942", "gfx942")]
)
def test_kernel_compiles_for(arch: str, target: str, compiled: dict[str, Any]) -> None:
    """The kernel becomes machine code for this architecture; products have 64 bits, and right shifts bring in zeros."""
    found = compiled["targets"][arch]
    assert found["target"] == target
    assert found["binary"] > 1000
    assert found["products"] == ["i64"]
    assert found["shifts"] == [["shli", "i64"], ["shrui", "i64"]]
    assert found["loads"] == 4


def test_no_launch_compiles_a_second_time(compiled: dict[str, Any]) -> None:
    """Ten row counts times 15 layouts, aligned or not, share one compilation, and only the block size is a constant (B44)."""
    assert compiled["params"] == {
        "req_to_page_ptr": [False, False, True],
        "rows_ptr": [False, False, True],
        "row_lens_ptr": [False, False, True],
        "valid_lens_ptr": [False, False, True],
        "digests_ptr": [False, False, True],
        "row_stride": [False, True, False],
        "BLOCK": [True, False, False],
    }
    assert compiled["variants"] == 1
