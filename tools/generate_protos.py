"""Generate the Python code of proto/pagemirror/v1/*.proto, or check that what is checked in is up to date.

The compiler is pinned (pyproject.toml, extra `dev`): newer generated code refuses older protobuf runtimes.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def generate(out: Path) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py`, `*_pb2_grpc.pyi` below `out`; returns their paths relative to it."""
    bin_dir = Path(sys.executable).parent
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("pagemirror/v1/*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO}",
            f"--proto_path={files('grpc_tools').joinpath('_proto')}",
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with status {code}")
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*"))


def stale(out: Path) -> list[str]:
    """Names of generated files that differ from those checked in, or that are checked in and no longer generated."""
    fresh = generate(out)
    present = sorted(path.relative_to(PROTO) for path in PROTO.rglob("*_pb2*.py*") if "__pycache__" not in path.parts)
    differing = [str(path) for path in fresh if path not in present or not filecmp.cmp(out / path, PROTO / path, shallow=False)]
    return differing + [str(path) for path in present if path not in fresh]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the checked-in code is stale")
    check = parser.parse_args().check
    if not check:
        for path in generate(PROTO):
            print(f"proto/{path}")
        return
    with tempfile.TemporaryDirectory() as folder:
        differing = stale(Path(folder))
    if differing:
        raise SystemExit("stale generated code, run `make protos`: " + ", ".join(differing))
    print("generated protobuf code is up to date")


if __name__ == "__main__":
    main()
