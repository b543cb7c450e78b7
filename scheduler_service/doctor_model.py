"""Of `pagemirror doctor`: whether a model's folder is readable and complete."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from scheduler_service.doctor_findings import Finding, State


def check_model(folder: Path) -> Finding:
    """Whether a Hugging Face directory is readable and complete: settings, tokenizer, and weights of the size they state."""
    name = "model"
    if not folder.is_dir():
        return Finding(name, f"{folder} is no folder", State.FIX, "give the folder that has config.json")
    try:
        problems = _problems_of_model(folder)
    except OSError as error:
        problems = [f"{error.filename or folder}: {error.strerror or error}"]
    if problems:
        return Finding(name, f"{folder}: {'; '.join(problems)}", State.FIX, "fetch it again, readable for the runtime's user")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Finding(name, f"{folder}: complete, {size / 2**30:.2f} GiB of weights")


def _problems_of_model(folder: Path) -> list[str]:
    problems = []
    for file in ("config.json", "tokenizer.json"):
        try:
            json.loads((folder / file).read_text())
        except FileNotFoundError:
            problems.append(f"no {file}")
        except ValueError as error:
            problems.append(f"{file} is no JSON: {error}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors")) or ["model.safetensors"]
    return problems + [problem for shard in shards if (problem := _problem_of_weights(folder / shard))]


def _problem_of_weights(path: Path) -> str:
    """What is wrong with a safetensors file: its header says where the last tensor ends: a cut download is shorter."""
    if not path.is_file():
        return f"no {path.name}"
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= 100_000_000:
            return f"{path.name} is no safetensors file"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError):
            return f"{path.name} has a damaged header"
    size, stated = path.stat().st_size, 8 + length + end
    return "" if size == stated else f"{path.name} has {size} bytes, not {stated} as it says"
