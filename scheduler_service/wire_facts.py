"""What a runtime says of itself and of its mirror, and which ops fit into one message of the wire.

What a peer says is checked here, as in `wire`, which has the messages of the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pagemirror.v1 import runtime_pb2
from scheduler_service.columns import int32_of_peer
from scheduler_service.core.ops import Int32Array
from scheduler_service.errors import ProtocolError, RuntimeMismatchError

PROTOCOL_VERSION = 1
"""Version of the private protocol that this scheduler speaks."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Limit of one message, both ways, on both channels."""

MAX_LEASE_BYTES = 32 * 1024 * 1024
"""Most that the lease starts of one op take, penalty histories included; less where the columns leave less."""

_MAX_NAME_LEN = 4096
_FIXED_ROW_BYTES = 64  # columns of one row other than its pages, rounded up


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What a runtime says of itself in its hello; see `RuntimeInfo` in runtime.proto."""

    protocol_version: int
    runtime_epoch: int
    page_size: int
    num_pages: int
    max_rows: int
    max_pages_per_row: int
    vocab_size: int
    max_context: int
    default_stop_ids: tuple[int, ...]
    model: str
    architecture: str
    tokenizer_path: str
    rank: int
    world_size: int
    device: str
    dtype: str
    heartbeat_interval_s: float


@dataclass(frozen=True, slots=True)
class MirrorRows:
    """Rows of the mirror at one moment: `pages` maps row number → its valid entries, `row_lens` → its stated length."""

    session_no: int
    last_step: int
    pages: dict[int, Int32Array]
    row_lens: dict[int, int]


def facts_from_proto(message: runtime_pb2.RuntimeInfo) -> RuntimeFacts:
    """A runtime's hello.

    Raises:
        RuntimeMismatchError: it speaks another version of the protocol.
        ProtocolError: the column of stop ids is malformed, or a name is too long.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise RuntimeMismatchError("protocol_version", PROTOCOL_VERSION, message.protocol_version)
    for name in ("model", "architecture", "tokenizer_path", "device", "dtype"):
        if (length := len(getattr(message, name))) > _MAX_NAME_LEN:
            raise ProtocolError(f"hello: {name} has {length} characters, but at most {_MAX_NAME_LEN} are taken")
    return RuntimeFacts(
        protocol_version=message.protocol_version,
        runtime_epoch=message.runtime_epoch,
        page_size=message.page_size,
        num_pages=message.num_pages,
        max_rows=message.max_rows,
        max_pages_per_row=message.max_pages_per_row,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        default_stop_ids=tuple(int32_of_peer(message.default_stop_ids, "hello: default_stop_ids").tolist()),
        model=message.model,
        architecture=message.architecture,
        tokenizer_path=message.tokenizer_path,
        rank=message.rank,
        world_size=message.world_size,
        device=message.device,
        dtype=message.dtype,
        heartbeat_interval_s=message.heartbeat_interval_s,
    )


def mirror_rows_from_proto(message: runtime_pb2.ReadRowsResponse) -> MirrorRows:
    """Rows of the mirror. Raises ProtocolError when the columns do not fit together."""
    rows = int32_of_peer(message.rows, "ReadRows: rows")
    row_lens = int32_of_peer(message.row_lens, "ReadRows: row_lens")
    valid_lens = int32_of_peer(message.valid_lens, "ReadRows: valid_lens")
    pages = int32_of_peer(message.pages, "ReadRows: pages")
    if not len(rows) == len(row_lens) == len(valid_lens) or (valid_lens < 0).any() or int(valid_lens.sum()) != len(pages):
        raise ProtocolError(
            f"ReadRows: {len(rows)} rows, {len(row_lens)} row_lens, {len(valid_lens)} valid_lens and {len(pages)} pages"
            " do not fit together"
        )
    parts = np.split(pages, np.cumsum(valid_lens)[:-1]) if len(rows) else []
    return MirrorRows(
        session_no=message.session_no,
        last_step=message.last_step,
        pages=dict(zip(rows.tolist(), parts, strict=True)),
        row_lens=dict(zip(rows.tolist(), row_lens.tolist(), strict=True)),
    )


def check_message_limit(facts: RuntimeFacts, token_budget: int) -> None:
    """Refuse a configuration whose largest op would not fit into one message; ops are never split.

    Raises:
        RuntimeMismatchError: max_rows * (4 * max_pages_per_row + 64) + 4 * token_budget is over 64 MiB.
    """
    largest = _column_bytes(facts, token_budget)
    if largest > MAX_MESSAGE_BYTES:
        raise RuntimeMismatchError(
            "largest op",
            f"at most {MAX_MESSAGE_BYTES:,} bytes a message",
            f"max_rows {facts.max_rows:,} and max_pages_per_row {facts.max_pages_per_row:,}",
            f"with token_budget {token_budget:,} that is up to {largest:,} bytes; lower one of the three"
            f" (max_rows at most {_most_rows(facts, token_budget):,})",
        )


def max_lease_bytes(facts: RuntimeFacts, token_budget: int) -> int:
    """What the lease starts of one op may take, so that it fits into one message beside its columns."""
    return max(0, min(MAX_LEASE_BYTES, MAX_MESSAGE_BYTES - _column_bytes(facts, token_budget)))


def _column_bytes(facts: RuntimeFacts, token_budget: int) -> int:
    return facts.max_rows * (4 * facts.max_pages_per_row + _FIXED_ROW_BYTES) + 4 * token_budget


def _most_rows(facts: RuntimeFacts, token_budget: int) -> int:
    return max(0, math.floor((MAX_MESSAGE_BYTES - 4 * token_budget) / (4 * facts.max_pages_per_row + _FIXED_ROW_BYTES)))
