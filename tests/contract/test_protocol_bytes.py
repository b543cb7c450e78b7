"""The bytes that docs/protocol.md shows are messages that say what stands beside them, and a runtime executes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pagemirror.v1 import runtime_pb2
from runtime_service.embedding import open_runner
from runtime_service.ops import StepResult
from runtime_service.settings import RuntimeSettings
from runtime_service.wire import op_from_proto, result_to_proto

BOOLS = {"full_refresh", "sample"}


@pytest.fixture(scope="module")
def lines(project_root: Path) -> dict[str, list[tuple[bytes, str]]]:
    """Per example its lines: bytes, and what the page says of them."""
    page = (project_root / "docs/protocol.md").read_text()
    examples: dict[str, list[tuple[bytes, str]]] = {}
    for name, block in re.findall(r"<!-- bytes: (\w+) -->\n((?:    .*\n)+)", page):
        parts = [re.fullmatch(r"\s+((?:[0-9a-f]{2} ?)+)(?:\s{2,}(\S.*))?", line) for line in block.splitlines()]
        examples[name] = [(bytes.fromhex(part[1]), part[2] or "") for part in parts if part is not None]
        assert len(examples[name]) == len(block.splitlines()), f"a line of {name} cannot be read"
    return examples


def _whole(lines: list[tuple[bytes, str]]) -> bytes:
    return b"".join(data for data, _ in lines)


def test_every_line_says_what_its_bytes_say(lines: dict[str, list[tuple[bytes, str]]]) -> None:
    """Each field, decoded from the whole message, has the value that stands in its line."""
    assert set(lines) == {"hello", "first", "result", "flip", "tail"}
    checked = 0
    for name, example in lines.items():
        kind = runtime_pb2.ExecuteResponse if name == "result" else runtime_pb2.ExecuteRequest
        message = kind.FromString(_whole(example))
        inner = getattr(message, str(message.WhichOneof("message")))
        for _, text in example:
            if match := re.fullmatch(r"(\w+) \[([\d, ]*)\]", text):
                column = np.frombuffer(getattr(inner, match[1]), np.uint8 if match[1] in BOOLS else "<i4")
                assert column.tolist() == [int(value) for value in match[2].split(",")], f"{name}: {text}"
                checked += 1
            elif match := re.fullmatch(r"(\w+) (\w+)", text):
                assert getattr(inner, match[1]) == int(match[2], 0), f"{name}: {text}"
                checked += 1
        assert len(inner.ListFields()) == sum(bool(text) for _, text in example)
    assert checked == 45


def test_runtime_executes_the_bytes(lines: dict[str, list[tuple[bytes, str]]]) -> None:
    """The three ops run one after the other; the result of the first is the one that is shown, the rows are as told."""
    settings = RuntimeSettings(model="fingerprint", page_size=4, num_pages=16, max_rows=4, max_pages_per_row=4)
    runner = open_runner(settings)
    runner.open(0x1122334455667788, 1, 1)
    rows = []
    for name in ("first", "flip", "tail"):
        answer = runner.run(op_from_proto(runtime_pb2.ExecuteRequest.FromString(_whole(lines[name])).op))
        assert isinstance(answer, StepResult), answer
        rows.append(runner.mirror.row(3).tolist())
        if name == "first":
            shown = runtime_pb2.ExecuteResponse.FromString(_whole(lines["result"])).result
            sent = result_to_proto(answer).result
            assert (sent.tokens, sent.step, sent.session_no) == (shown.tokens, shown.step, shown.session_no)
    assert rows == [[7, 9], [4, 9], [4, 9, 7]]
