"""Everything that the protocol's words allow a runtime to refuse an op for: names of RefusalCode, without the prefix.

Each rule is looked at for itself, row by row, so an op that is wrong in several ways has several codes. An op with none of them
must be executed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fuzz_columns import ints

from pagemirror.v1 import forward_pb2

if TYPE_CHECKING:
    from fuzz_model import Lease, Shape

INT32_COLUMNS = (
    "req_pool_indices",
    "row_generations",
    "row_lens",
    "begins",
    "sizes",
    "occupied_pages",
    "num_computed",
    "input_lens",
    "input_ids",
    "released_rows",
    "verify_rows",
)
BOOL_COLUMNS = ("full_refresh", "sample")
UINT64_COLUMNS = ("row_digests", "verify_digests")
ROW_COLUMNS = ("row_generations", "row_lens", "begins", "sizes", "num_computed", "input_lens")
MAX_REQUEST_ID_LEN = 256
MAX_STOP_IDS = 4096
MAX_BIAS_ENTRIES = 1024


def has_columns(op: forward_pb2.ForwardOp) -> bool:
    """Whether every column is a whole number of entries."""
    return all(len(getattr(op, name)) % 4 == 0 for name in INT32_COLUMNS) and all(
        len(getattr(op, name)) % 8 == 0 for name in UINT64_COLUMNS
    )


def unreadable(op: forward_pb2.ForwardOp) -> set[str]:
    """What can be said without knowing the session."""
    codes = set()
    if not has_columns(op):
        codes.add("MALFORMED")
    if any(byte > 1 for name in BOOL_COLUMNS for byte in getattr(op, name)):
        codes.add("MALFORMED")
    if len(op.lease_starts) > len(op.req_pool_indices) // 4:
        codes.add("MALFORMED")  # one of them is for no row, or the second one of its row
    for start in op.lease_starts[:1000]:
        if len(start.stop_ids) % 4 or len(start.history) % 4 or len(start.request_id) > MAX_REQUEST_ID_LEN:
            codes.add("MALFORMED")
        if len(start.stop_ids) // 4 > MAX_STOP_IDS:
            codes.add("MALFORMED")
        seedless = start.sampling.temperature != 0 and not start.sampling.HasField("seed")
        if seedless or len(start.sampling.logit_bias) > MAX_BIAS_ENTRIES:
            codes.add("BAD_SAMPLING")
    return codes


def content(op: forward_pb2.ForwardOp, shape: Shape, leases: dict[int, Lease], seen: dict[int, int]) -> set[str]:
    """What is wrong with a readable op that comes next in its session."""
    rows, released = ints(op.req_pool_indices), ints(op.released_rows)
    columns = {name: ints(getattr(op, name)) for name in ROW_COLUMNS}
    lengths = {len(column) for column in columns.values()} | {len(op.full_refresh), len(op.sample)}
    if lengths != {len(rows)}:
        return {"MALFORMED"}
    codes: set[str] = set()
    if op.num_extend_rows > len(rows) or len(op.row_digests) // 8 not in {0, len(rows)}:
        codes.add("MALFORMED")
    if any(not 1 <= row <= shape.max_rows for row in (*rows, *released)):
        codes.add("ROW_OUT_OF_RANGE")
    if len(set(rows)) < len(rows):
        codes.add("ROW_REPEATED")
    live = {row: lease for row, lease in leases.items() if row not in set(released)}
    new_rows: set[int] = set()
    counts = []
    for i, row in enumerate(rows):
        one = {name: column[i] for name, column in columns.items()}
        full, lease = bool(op.full_refresh[i]), live.get(row)
        codes |= _row(one, full, i >= op.num_extend_rows, lease, seen.get(row, 0), shape)
        if lease is None or one["row_generations"] > lease.generation:
            new_rows.add(row)
        counts.append(one["row_lens"] if full else one["sizes"])
    codes |= _pages(op, rows, counts, shape, live)
    if sum(columns["input_lens"][: op.num_extend_rows]) != len(op.input_ids) // 4:
        codes.add("MALFORMED")
    codes |= _tokens(ints(op.input_ids), shape)
    codes |= _verify_rows(op, rows, live, shape)
    codes |= _lease_starts(op, rows, columns["num_computed"], new_rows, shape)
    return codes


def _row(one: dict[str, int], full: bool, decode: bool, lease: Lease | None, seen: int, shape: Shape) -> set[str]:
    codes = set()
    if min(one["row_lens"], one["begins"], one["sizes"], one["num_computed"]) < 0 or one["input_lens"] < 1:
        codes.add("MALFORMED")
    if decode and one["input_lens"] != 1:
        codes.add("MALFORMED")
    if one["begins"] + one["sizes"] != one["row_lens"]:
        codes.add("LENGTH_MISMATCH")
    if one["row_generations"] < seen + (lease is None):
        codes.add("STALE_GENERATION")
    new = lease is None or one["row_generations"] > lease.generation
    if new and not full:
        codes.add("LEASE_NOT_STARTED")
    if lease is not None and not new:
        if not full and one["begins"] != len(lease.pages):
            codes.add("GAP")
        if one["num_computed"] != lease.end:
            codes.add("NOT_CONTIGUOUS")
    # A row wider than the mirror is clamped instead.
    end = one["num_computed"] + one["input_lens"]
    if one["row_lens"] <= shape.width and end > one["row_lens"] * shape.page_size:
        codes.add("ROW_TOO_SHORT")
    if decode and (new or lease is None or not lease.asked):
        codes.add("NEVER_SAMPLED")
    return codes


def _pages(op: forward_pb2.ForwardOp, rows: list[int], counts: list[int], shape: Shape, live: dict[int, Lease]) -> set[str]:
    codes, at, pages = set(), 0, ints(op.occupied_pages)
    if any(not 1 <= page <= shape.num_pages for page in pages):
        codes.add("PAGE_OUT_OF_RANGE")
    if sum(counts) != len(pages) or min(counts, default=0) < 0:
        return codes | {"MALFORMED"}  # nobody can say which page is whose
    for i, row in enumerate(rows):
        held = live[row].pages if row in live and not op.full_refresh[i] else []
        whole = pages[at : at + counts[i]] + held
        at += counts[i]
        if len(set(whole)) < len(whole):
            codes.add("PAGE_REPEATED")
    return codes


def _tokens(tokens: list[int], shape: Shape) -> set[str]:
    return {"TOKEN_OUT_OF_RANGE"} if any(not 0 <= token < shape.vocab_size for token in tokens) else set()


def _verify_rows(op: forward_pb2.ForwardOp, rows: list[int], live: dict[int, Lease], shape: Shape) -> set[str]:
    asked, codes = ints(op.verify_rows), set()
    if len(asked) != len(op.verify_digests) // 8:
        codes.add("MALFORMED")
    if any(not 1 <= row <= shape.max_rows for row in asked):
        codes.add("ROW_OUT_OF_RANGE")
    if len({*rows, *asked}) < len(set(rows)) + len(asked):
        codes.add("ROW_REPEATED")
    if any(row not in live for row in asked):
        codes.add("LEASE_NOT_STARTED")
    return codes


def _lease_starts(
    op: forward_pb2.ForwardOp, rows: list[int], num_computed: list[int], new_rows: set[int], shape: Shape
) -> set[str]:
    codes = set()
    named = [start.req_pool_index for start in op.lease_starts]
    if len(set(named)) < len(named) or not set(named) <= new_rows:
        codes.add("MALFORMED")
    if not new_rows <= set(named):
        codes.add("LEASE_NOT_STARTED")
    for start in op.lease_starts[: len(rows) + 1]:
        if len(start.history) % 4 or len(start.stop_ids) % 4:
            continue  # unreadable
        if not _is_good_sampling(start, shape):
            codes.add("BAD_SAMPLING")
        codes |= _tokens(ints(start.stop_ids) + ints(start.history), shape)
        computed = num_computed[rows.index(start.req_pool_index)] if start.req_pool_index in rows else 0
        if len(start.history) // 4 != (computed if _has_penalty(start.sampling) else 0):
            codes.add("MALFORMED")
    return codes


def _has_penalty(sampling: forward_pb2.SamplingParams) -> bool:
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    return repetition != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _is_good_sampling(start: forward_pb2.LeaseStart, shape: Shape) -> bool:
    sampling = start.sampling
    ranges = {
        "temperature": (0, 100),
        "top_k": (1, math.inf),
        "top_p": (1e-45, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1e-45, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "num_logprobs": (0, 20),
    }
    for name, (low, high) in ranges.items():
        if sampling.HasField(name) and not low <= getattr(sampling, name) <= high:
            return False
    tokens = [entry.token for entry in sampling.logit_bias]
    if len(tokens) > MAX_BIAS_ENTRIES or len(set(tokens)) < len(tokens) or any(token >= shape.vocab_size for token in tokens):
        return False
    if not all(-100 <= entry.bias <= 100 for entry in sampling.logit_bias):
        return False
    needs_len = sampling.min_new_tokens > 0 or _has_penalty(sampling)
    if needs_len and start.prompt_len == 0:
        return False
    asks = sampling.temperature != 0 or needs_len or len(tokens) > 0 or sampling.HasField("num_logprobs")
    return not (shape.greedy_only and asks)
