"""docs/gateway.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from scheduler_service.gateway import tokenspeed, vllm
from scheduler_service.gateway.tokenizer_files import CHUNK_BYTES


def test_honoured_fields_are_those_of_the_code(project_root: Path) -> None:
    """The table of parameters has each field that is honoured, and no other."""
    page = (project_root / "docs/gateway.md").read_text()
    rows = re.findall(r"^\| (\w+) (\w+) \| ((?:`\w+` ?)+) \|$", page, re.MULTILINE)
    assert {(engine, message): set(re.findall(r"`(\w+)`", cell)) for engine, message, cell in rows} == {
        ("TokenSpeed", "GenerateRequest"): tokenspeed.REQUEST_FIELDS,
        ("TokenSpeed", "SamplingParams"): tokenspeed.SAMPLING_FIELDS,
        ("vLLM", "GenerateRequest"): vllm.REQUEST_FIELDS,
        ("vLLM", "SamplingParams"): vllm.SAMPLING_FIELDS,
    }


def test_services_are_those_of_the_code(project_root: Path) -> None:
    """Names of services and the size of the tokenizer's parts."""
    page = (project_root / "docs/gateway.md").read_text()
    assert f"| `tokenspeed` (default) | `{tokenspeed.SERVICE_NAME}` |" in page
    assert f"| `vllm` | `{vllm.SERVICE_NAME}` |" in page
    assert f"parts of {CHUNK_BYTES // 1024} KiB" in page
