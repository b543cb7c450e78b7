"""Two schedulers nobody here wrote, driven at random through the adapter: after every step each row of the mirror is theirs."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenspeed_scheduler

import tokenspeed_driver as tokens_driver
from plain_digest import plain_digest
from runtime_service import ForwardOp, PageFeed, ReqToPage, RuntimeClient, TokenSpeedAdapter
from tokenspeed_driver import MAX_PAGES_PER_ROW, MAX_ROWS, NUM_PAGES, PAGE_SIZE, STEPS, Driver, page_rows

SEEDS = 20
NEWER = "tokenspeed-scheduler==0.1.42"

Batches = list[Any]


class TailOnly:
    """The control: a mirror that believes begins and sizes, and looks at nothing else."""

    def __init__(self) -> None:
        self.table = np.zeros((MAX_ROWS + 1, NUM_PAGES + 1), dtype=np.int32)

    def apply(self, batch: Any) -> None:
        """Write the tail of each row."""
        for row, pages, begin, size in zip(
            batch.request_pool_indices, batch.occupied_pages, batch.begins, batch.sizes, strict=True
        ):
            self.table[row, begin : begin + size] = pages[begin : begin + size]


@dataclass
class Count:
    """What was compared."""

    rows: int = 0
    stale: list[str] = field(default_factory=list)
    stale_of_control: int = 0

    def compare(self, where: str, expected: list[int] | int, found: list[int] | int) -> None:
        """One row of the mirror."""
        self.rows += 1
        if expected != found:
            self.stale.append(f"{where}: {found} is not {expected}")


def _steps_of_old() -> Iterator[tuple[int, Batches, list[str]]]:
    for seed in range(SEEDS):
        driver = Driver(tokenspeed_scheduler, seed)
        for _ in range(STEPS):
            batches = driver.plan()
            yield seed, batches, driver.advance(batches)


@pytest.fixture(scope="module")
def newer_python(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> str:
    """The Python of an environment with the newer version, which has the same name as the one installed here."""
    folder = tmp_path_factory.mktemp("newer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "numpy", "-c", str(project_root / "constraints.txt")], check=True, timeout=110)
    subprocess.run([*pip, NEWER], check=True, timeout=110)
    return python


def _steps_of_new(python: str) -> Iterator[tuple[int, Batches, list[str]]]:
    command = [python, tokens_driver.__file__, str(SEEDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from tokens_driver.planned(process.stdout)
    assert process.returncode == 0


def _into_mirrors(steps: Iterator[tuple[int, Batches, list[str]]], *, has_control: bool) -> Count:
    """Drive the adapter with these steps, into a mirror of each seed."""
    count, last = Count(), -1
    for seed, batches, over in steps:
        if seed != last:
            last, control, adapter = seed, TailOnly(), TokenSpeedAdapter(MAX_ROWS)
            mirror = ReqToPage(MAX_ROWS, MAX_PAGES_PER_ROW, NUM_PAGES, PAGE_SIZE)
            feed = PageFeed(mirror)
        for batch in batches:
            rows = page_rows(batch)
            feed.apply(adapter.forward_op(batch))
            if has_control:
                control.apply(batch)
            for row, pages in zip(batch.request_pool_indices, rows, strict=True):
                count.compare(f"seed {seed}, row {row}", pages, mirror.row(row).tolist())
                count.stale_of_control += has_control and control.table[row, : len(pages)].tolist() != pages
        for request_id in over:
            adapter.finish(request_id)
    return count


def test_mirror_follows_the_older_scheduler(record_property: pytest.RecordProperty) -> None:
    """0.1.0, whose plans name only the appended tail: no row is stale, of a tail-only mirror more than a hundred are."""
    count = _into_mirrors(_steps_of_old(), has_control=True)
    wrong = f"tail-only mirror: {count.stale_of_control} of {count.rows} rows stale; by the adapter: {len(count.stale)}"
    record_property("measured", wrong)
    assert count.stale == []
    assert count.rows > 10_000
    assert count.stale_of_control > 100


def test_mirror_follows_the_newer_scheduler(newer_python: str) -> None:
    """0.1.42, whose plans are full tables: no row is stale."""
    count = _into_mirrors(_steps_of_new(newer_python), has_control=False)
    assert count.stale == []
    assert count.rows > 10_000


@pytest.fixture(scope="module")
def runtime_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A runtime process of the schedulers' shape."""
    address = f"unix:{tmp_path_factory.mktemp('runtime')}/runtime.sock"
    shape = {"page-size": PAGE_SIZE, "num-pages": NUM_PAGES, "max-rows": MAX_ROWS, "max-pages-per-row": MAX_PAGES_PER_ROW}
    options = [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "runtime_service", "--listen", address, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("pagemirror runtime ready")
            yield address
        finally:
            process.terminate()


def _over_the_wire(steps: Iterator[tuple[int, Batches, list[str]]], address: str) -> Count:
    """The same over RuntimeService, one session a seed.

    With every op its rows' digests come back, made of the mirror's memory once the op is applied: a row that differs anywhere
    has another one. At times the rows themselves are read, too. Three ops are on their way at a time.
    """
    count, last, step = Count(), -1, 0
    sent: deque[tuple[str, ForwardOp, list[list[int]]]] = deque()

    def receive(runtime: RuntimeClient) -> None:
        where, op, rows = sent.popleft()
        digests = runtime.receive().digests.tolist()
        for row, pages, expected, found in zip(op.req_pool_indices, rows, op.row_digests.tolist(), digests, strict=True):
            count.compare(f"{where}, digest of row {row}, {pages}", expected, found)

    with RuntimeClient(address, overlap_depth=2) as runtime:
        adapter = TokenSpeedAdapter(MAX_ROWS, session_no=runtime.session_no)
        for seed, batches, over in steps:
            if seed != last:
                while sent:
                    receive(runtime)
                if last >= 0:
                    adapter.reset(runtime.reset())
                last = seed
            for batch in batches:
                op, step, rows = adapter.forward_op(batch), step + 1, page_rows(batch)
                op.row_digests = np.array([plain_digest(pages) for pages in rows], dtype=np.uint64)
                runtime.send(op)
                sent.append((f"seed {seed}, step {op.step}", op, rows))
                while len(sent) == 3 or (sent and step % 20 == 0):
                    receive(runtime)
                if step % 20 == 0:
                    found = runtime.read_rows()
                    for row, pages in zip(batch.request_pool_indices, rows, strict=True):
                        count.compare(f"seed {seed}, step {op.step}, row {row}", pages, found[row].tolist())
            for request_id in over:
                adapter.finish(request_id)
        while sent:
            receive(runtime)
    return count


def test_runtime_service_follows_the_older_scheduler(runtime_address: str) -> None:
    """0.1.0 over gRPC: nothing is refused, and no row is stale."""
    count = _over_the_wire(_steps_of_old(), runtime_address)
    assert count.stale == []
    assert count.rows > 10_000


def test_runtime_service_follows_the_newer_scheduler(newer_python: str, runtime_address: str) -> None:
    """0.1.42 over gRPC: nothing is refused, and no row is stale."""
    count = _over_the_wire(_steps_of_new(newer_python), runtime_address)
    assert count.stale == []
    assert count.rows > 10_000


def test_the_older_scheduler_serves_exact_tokens(runtime_address: str) -> None:
    """With the runtime's own tokens handed back, every request gets what the fingerprint model gives it alone."""
    num_requests = 0
    for seed in range(5):
        driver = Driver(tokenspeed_scheduler, seed)
        prompts: dict[str, int] = {}
        with RuntimeClient(runtime_address) as runtime:
            adapter = TokenSpeedAdapter(MAX_ROWS, session_no=runtime.session_no)
            for _ in range(STEPS):
                batches = driver.plan()
                prompts |= {name: len(known) for name, known in driver.known.items() if name not in prompts}
                for request_id in driver.advance(
                    batches, [runtime.run(adapter.forward_op(b)).tokens.tolist() for b in batches]
                ):
                    adapter.finish(request_id)
        for name, known in driver.known.items():
            for end in range(prompts[name], len(known)):
                expected = sum((i + 1) * (token + 1) for i, token in enumerate(known[:end])) % 997
                assert known[end] == expected, f"seed {seed}, request {name}, token {end}"
            num_requests += len(known) > prompts[name]
    assert num_requests > 100
