"""What it costs to bring the mirror of the page rows up to date, on a CPU, by rows and by pages.

    python benchmarks/bench_mirror.py [--json FILE] [--quick]

decode     One new page for each 16th row of 16 ... 1024, as in a step in which every row decodes a token (page size 16).
refresh    All rows rewritten, 16 ... 1024 rows of 1 ... 512 pages each.
op         A whole op of 256 decode rows from its bytes to the mirror: decode, every check, write.

Parties, all with the same rows and pages:

    mirror       `ReqToPage.apply`: its own checks, one packed buffer, one launch of the CPU twin
    five_copies  how engines do it: five arrays (rows, begins, lengths, offsets, pages) each made a tensor and copied, then one
                 kernel, which works out where each page goes (here torch calls: `repeat_interleave`, `index_put_`)
    index_put    one `index_put_` on indices that were made before and are not part of the time
    per_row      `mirror[row, begin:end] = pages` for each row, a torch call each
    memcpy       a copy of the same bytes from one buffer to another: what cannot be beaten

A step without a GPU has no launches to save, so this is the price of the host's part. Medians within one run on one machine:
only ratios mean something elsewhere. Each party runs ten times in a row, and the parties take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _measure import COLOURS, PACKAGES, add_options, aim, finish, interleave, print_aims, print_table
from _report import Report, machine, progress

from pagemirror.v1 import forward_pb2
from runtime_service.ops import NO_ROWS, ForwardOp
from runtime_service.req_to_page import ReqToPage
from runtime_service.session import SessionState
from runtime_service.wire import op_from_proto

PAGE_SIZE, WIDTH = 16, 544
PARTIES = ("mirror", "five_copies", "index_put", "per_row", "memcpy")


def make_op(begins: Any, row_lens: Any, *, full: bool) -> ForwardOp:
    """An op of rows 1, 2, … with random pages; what the mirror does not look at is left plain."""
    num_rows = len(begins)
    begins, row_lens = (np.asarray(column, dtype=np.int32) for column in (begins, row_lens))
    rng = np.random.default_rng(5)  # noqa: TID251  (seeded data, not the product)
    ones = np.ones(num_rows, dtype=np.int32)
    return ForwardOp(
        session_no=1,
        step=1,
        req_pool_indices=np.arange(1, num_rows + 1, dtype=np.int32),
        row_generations=ones,
        row_lens=row_lens,
        begins=begins,
        sizes=row_lens - begins,
        full_refresh=np.full(num_rows, full),
        occupied_pages=rng.integers(1, 1 << 20, int((row_lens - begins).sum()), dtype=np.int32),
        num_computed=row_lens * PAGE_SIZE - 1,
        num_extend_rows=0,
        input_lens=ones,
        input_ids=NO_ROWS,
        sample=np.ones(num_rows, dtype=np.bool_),
        released_rows=NO_ROWS,
    )


# --- parties ---------------------------------------------------------------------------------------------------------


def parties(op: ForwardOp, old_lens: Any) -> dict[str, Callable[[], object]]:
    """What each party does for this op, each on a table of its own. `old_lens`: the mirror's row lengths before the op."""
    num_rows = op.num_rows
    mirror = ReqToPage(num_rows, WIDTH, 1 << 20, PAGE_SIZE)
    rows = op.req_pool_indices

    def apply() -> None:
        mirror.row_lens[1:] = old_lens  # so that the same op may come again
        mirror.valid_lens[1:] = old_lens
        mirror.apply(op)

    table = torch.zeros((num_rows + 1, WIDTH), dtype=torch.int32)
    offsets = np.cumsum(op.sizes) - op.sizes

    def five_copies() -> None:
        columns = (rows, op.begins, op.sizes, offsets.astype(np.int32), op.occupied_pages)
        d_rows, d_begins, d_sizes, d_offsets, d_pages = (torch.from_numpy(column).clone() for column in columns)
        owners = torch.repeat_interleave(d_sizes)
        entries = torch.arange(len(d_pages)) - d_offsets[owners] + d_begins[owners]
        table.index_put_((d_rows[owners].long(), entries), d_pages)

    pages = torch.from_numpy(op.occupied_pages.copy())
    owners = np.repeat(np.arange(num_rows), op.sizes)
    index = (
        torch.from_numpy(rows.astype(np.int64)[owners]),
        torch.from_numpy(np.arange(len(owners)) - offsets[owners] + op.begins[owners]),
    )
    ranges = [
        (int(row), int(begin), int(end), int(at), int(at + end - begin))
        for row, begin, end, at in zip(rows, op.begins, op.row_lens, offsets, strict=True)
        if end > begin
    ]

    def per_row() -> None:
        for row, begin, end, at, past in ranges:
            table[row, begin:end] = pages[at:past]

    target = np.empty_like(op.occupied_pages)
    return {
        "mirror": apply,
        "five_copies": five_copies,
        "index_put": lambda: table.index_put_(index, pages),
        "per_row": per_row,
        "memcpy": lambda: np.copyto(target, op.occupied_pages),
    }


def check_parties(op: ForwardOp, old_lens: Any) -> None:
    """Nobody is fast by writing something else."""
    mirror = ReqToPage(op.num_rows, WIDTH, 1 << 20, PAGE_SIZE)
    mirror.row_lens[1:] = mirror.valid_lens[1:] = old_lens
    mirror.apply(op)
    expected = np.zeros((op.num_rows + 1, WIDTH), dtype=np.int32)
    at = 0
    for row, begin, end in zip(op.req_pool_indices, op.begins, op.row_lens, strict=True):
        expected[row, begin:end] = op.occupied_pages[at : at + end - begin]
        at += end - begin
    if not np.array_equal(mirror.table.numpy(), expected):
        raise SystemExit("the mirror is not what the op says")


# --- a whole op --------------------------------------------------------------------------------------------------------


def time_ops(num_steps: int) -> dict[str, float]:
    """Microseconds of each stage of an op of 256 decode rows, the median over the steps."""
    num_rows, num_computed = 256, 1024 + np.arange(256) % PAGE_SIZE
    num_pages = 1 << 16
    lens = -(-num_computed // PAGE_SIZE)
    session = SessionState(num_rows, WIDTH, num_pages, PAGE_SIZE, 32_000)
    session.open(1, 1, 1)
    mirror = ReqToPage(num_rows, WIDTH, num_pages, PAGE_SIZE)
    next_page = int(lens.sum()) + 1
    first = make_op(np.zeros(num_rows), lens, full=True)
    first.occupied_pages = np.arange(1, next_page, dtype=np.int32)
    first.num_extend_rows, first.input_ids, first.num_computed = num_rows, np.zeros(num_rows, np.int32), num_computed - 1
    messages = [message_of(first, leases=True)]
    for step in range(num_steps):
        new_lens = -(-(num_computed + 1) // PAGE_SIZE)
        op = make_op(lens, new_lens, full=False)
        op.occupied_pages = next_page + np.arange(len(op.occupied_pages))
        op.step, op.num_computed = step + 2, num_computed
        next_page += len(op.occupied_pages)
        messages.append(message_of(op))
        lens, num_computed = new_lens, num_computed + 1
    stages: dict[str, list[float]] = {name: [] for name in ("decode", "check", "commit", "write", "all")}
    for data in messages:
        times = [perf_counter()]
        received = op_from_proto(forward_pb2.ForwardOp.FromString(data))
        times.append(perf_counter())
        session.check(received)
        times.append(perf_counter())
        session.commit(received)
        times.append(perf_counter())
        mirror.apply(received, request_ids=session.request_ids)
        times.append(perf_counter())
        for name, begin, end in zip(stages, times, times[1:], strict=False):
            stages[name].append((end - begin) * 1e6)
        stages["all"].append((times[-1] - times[0]) * 1e6)
    return {name: float(np.median(values[1:])) for name, values in stages.items()}


def message_of(op: ForwardOp, *, leases: bool = False) -> bytes:
    """The op as bytes of the wire."""
    columns = (
        "req_pool_indices",
        "row_generations",
        "row_lens",
        "begins",
        "sizes",
        "occupied_pages",
        "num_computed",
        "input_lens",
    )
    message = forward_pb2.ForwardOp(
        session_no=1,
        step=op.step,
        num_extend_rows=op.num_extend_rows,
        input_ids=op.input_ids.astype(np.int32).tobytes(),
        full_refresh=op.full_refresh.tobytes(),
        sample=op.sample.tobytes(),
        **{name: getattr(op, name).astype(np.int32).tobytes() for name in columns},
    )
    for row in op.req_pool_indices.tolist() if leases else []:
        message.lease_starts.add(req_pool_index=row, request_id=str(row), prompt_len=1)
    return message.SerializeToString()


# --- the report ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases."""
    row_counts = (16, 64) if options.quick else (16, 64, 256, 1024)
    page_counts = (1, 16) if options.quick else (1, 16, 128, 512)
    rounds = 3 if options.quick else 21
    cases = []
    for num_rows in row_counts:
        old = np.full(num_rows, 64)
        cases.append(("decode", num_rows, 1, old, old + (np.arange(num_rows) % PAGE_SIZE == 0)))
        cases += [("refresh", num_rows, pages, np.zeros(num_rows, np.int64), np.full(num_rows, pages)) for pages in page_counts]
    ragged = 128 + (np.arange(256) * 37) % 129 - 64
    if not options.quick:
        cases.append(("refresh, ragged", 256, 128, np.zeros(256, np.int64), ragged))
    found = []
    for kind, num_rows, pages, old_lens, new_lens in cases:
        progress(f"{kind}: {num_rows} rows" + (f" of {pages} pages" if kind != "decode" else ""))
        op = make_op(old_lens, new_lens, full=kind != "decode")
        check_parties(op, old_lens)
        repeat = 2 if options.quick else 10
        medians = interleave(parties(op, old_lens), rounds, repeat)
        found.append({"kind": kind, "rows": num_rows, "pages": pages, "us": {k: round(v, 2) for k, v in medians.items()}})
    progress("a whole op of 256 decode rows")
    ops = [time_ops(20 if options.quick else 1000) for _ in range(1 if options.quick else 3)]
    return {"cases": found, "op": {name: round(float(np.median([op[name] for op in ops])), 1) for name in ops[0]}}


def aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at; absolute times are for the machine that they were set on."""
    found = [
        aim("256 decode rows: write alone, µs", report["op"]["write"], 25, at_most=True),
        aim("256 decode rows: decode + every check + write, µs", report["op"]["all"], 60, at_most=True),
    ]
    for case in report["cases"]:
        if (case["kind"], case["rows"], case["pages"]) == ("refresh", 256, 128):
            ratio = case["us"]["per_row"] / case["us"]["mirror"]
            found.append(aim("full refresh of 256 rows × 128 pages: per_row / mirror", ratio, 10, at_most=False))
    return found


def print_report(report: dict[str, Any]) -> None:
    """The figures for a reader."""
    rows = []
    for case in report["cases"]:
        us = case["us"]
        ratios = [us[name] / us["mirror"] for name in PARTIES[1:]]
        rows.append([case["kind"], case["rows"], case["pages"], *(us[name] for name in PARTIES), *ratios])
    header = ("µs", "rows", "pages", *PARTIES, *(f"{name}/mirror" for name in PARTIES[1:]))
    print_table("apply, one step", header, rows)
    print_table("an op of 256 decode rows, from its bytes to the mirror", ("", *report["op"]), [["µs", *report["op"].values()]])
    print_aims(report["aims"])


def draw(report: Report, axes: list[Any]) -> None:
    """Time of a full refresh by pages at 256 rows, and of a decode step by rows."""
    for axis, kind, varied in ((axes[0], "refresh", "pages"), (axes[1], "decode", "rows")):
        cases = [case for case in report["cases"] if case["kind"] == kind and (kind == "decode" or case["rows"] == 256)]
        for name, colour in zip(PARTIES, COLOURS, strict=True):
            places = [str(case[varied]) for case in cases]
            axis.plot(places, [case["us"][name] for case in cases], "o-", label=name, color=colour)
        axis.set_yscale("log")
        axis.set_xlabel("pages a row" if kind == "refresh" else "rows, of which each 16th gets a page")
        axis.set_title("256 rows rewritten, µs" if kind == "refresh" else "decode step, µs")
    axes[0].legend(frameon=False, fontsize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: Report = {"benchmark": "mirror", "quick": options.quick, "machine": machine(*PACKAGES), **measure(options)}
    report["aims"] = aims(report)
    print_report(report)
    finish(report, options, 2, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
