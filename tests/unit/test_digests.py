"""Expected digests: the definition against Python's own integers, and which ops state which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plain_digest import plain_digest
from scheduler_service.core.config import RefreshPolicy, SchedulerConfig, Verify
from scheduler_service.core.digests import BLOCK, row_digests
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.in_process_runtime import InProcessRuntime

Drive = Callable[..., Any]


def digests(*rows: tuple[Sequence[int], int], garbage: int = 0) -> list[int]:
    """Of rows of (entries, row_len), by the function under test; they lie in a table full of garbage, in reverse order."""
    valid_lens = np.array([len(pages) for pages, _ in rows], dtype=np.int32)
    table = np.full((len(rows), max(valid_lens, default=0) + 3), garbage, dtype=np.int32)
    for line, (pages, _) in enumerate(reversed(rows)):
        table[line, : len(pages)] = pages
    before = table.copy()
    lines = np.arange(len(rows), dtype=np.int32)[::-1]
    found = row_digests(table, lines, valid_lens, np.array([length for _, length in rows], dtype=np.int32))
    assert (table == before).all(), "the table is left alone"
    return found.tolist()


def test_vectors_of_the_protocol() -> None:
    """Rows [], [3, 2] and [3, 2, 1] have the digests that forward.proto states."""
    assert digests(([], 0), ([3, 2], 2), ([3, 2, 1], 3)) == [0xE4D971771B652C20, 0xC7DA548924F3A1EC, 0x56658E418081DA92]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2**31 - 1), max_size=20), st.integers(0, 2**31 - 1)), max_size=8),
    st.integers(-(2**31), 2**31 - 1),
)
def test_any_rows_match_the_definition(rows: list[tuple[list[int], int]], garbage: int) -> None:
    """Rows of any lengths, empty ones among them, also clamped: each digest is that of its row alone."""
    assert digests(*rows, garbage=garbage) == [plain_digest(pages, length) for pages, length in rows]


def test_rows_longer_than_a_block() -> None:
    """Lengths around the number of entries that are mixed at a time, beside short rows."""
    lens = [BLOCK - 1, 1, BLOCK, 0, BLOCK + 1, 3 * BLOCK, 5, 2 * BLOCK + 7]
    rows = [([number * 7 + length for number in range(length)], length) for length in lens]
    assert digests(*rows, garbage=-1) == [plain_digest(pages, length) for pages, length in rows]


def run_mixed(driver: Any, each: Callable[[Any], None]) -> None:
    """Requests that share, grow, are retracted and aborted; `each` is called after every plan that gave an op."""
    for name, prompt in {"A": range(1, 12), "B": range(1, 9), "C": [5, 6, 7], "D": range(1, 12)}.items():
        driver.submit(name, list(prompt), 14)
    for number in range(400):
        if not driver.scheduler.has_work and not driver.results:
            break
        if number == 9 and "B" in driver.scheduler.requests and driver.requests["B"].state.holds_row:
            driver.retract("B")
        if number == 12:
            driver.abort("C")
        driver.plan()
        if driver.op is not None:
            each(driver)
        if driver.results and (len(driver.results) > driver.config.overlap_depth or driver.op is None):
            driver.complete()
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("policy", ["transition", "diff", "always"])
@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_every_op_states_what_the_mirror_must_hold(drive: Drive, policy: str, overlap_depth: int) -> None:
    """With `every`, each row of each op has the digest of the runtime's row after the op, and no other row is named."""
    driver = drive(
        verify=Verify.EVERY,
        refresh_policy=RefreshPolicy(policy),
        overlap_depth=overlap_depth,
        num_pages=14,
        chunk_size=6,
        token_budget=12,
    )
    seen = []

    def each(driver: Any) -> None:
        op = driver.op
        mirror = [driver.runtime.mirror[row] for row in op.req_pool_indices.tolist()]
        assert op.row_digests.tolist() == [plain_digest(pages) for pages in mirror]
        assert (op.verify_rows, op.verify_digests) == (None, None)
        seen.append(op.num_rows)

    run_mixed(driver, each)
    assert sum(seen) > 50


@pytest.mark.parametrize("overlap_depth", [0, 2])
def test_samples_name_all_rows_in_use(drive: Drive, overlap_depth: int) -> None:
    """With `sample`, every third op states its rows' digests and those of all other rows that were sent; the rest none."""
    driver = drive(
        verify=Verify.SAMPLE,
        verify_interval=3,
        overlap_depth=overlap_depth,
        num_pages=24,
        max_rows=4,
    )
    others = []

    def each(driver: Any) -> None:
        op = driver.op
        if op.step == 4:
            driver.scheduler.set_token_budget(2)  # from now on there are more rows than a step computes
        if op.step % 3:
            assert (op.row_digests, op.verify_rows, op.verify_digests) == (None, None, None)
            return
        mirror = driver.runtime.mirror
        own = op.req_pool_indices.tolist()
        assert op.row_digests.tolist() == [plain_digest(mirror[row]) for row in own]
        in_use = set(driver.scheduler.rows())
        assert set(op.verify_rows.tolist()) == in_use - set(own)
        assert len(op.verify_rows) == len(in_use - set(own))
        assert op.verify_digests.tolist() == [plain_digest(mirror[row]) for row in op.verify_rows.tolist()]
        others.append(len(op.verify_rows))

    run_mixed(driver, each)
    assert sum(others) >= 5


def test_an_op_that_only_releases_can_be_a_sample(drive: Drive) -> None:
    """A sample without rows of its own compares the rows that are in use."""
    driver = drive(verify=Verify.SAMPLE, verify_interval=2, max_rows=3)
    driver.submit("A", [1, 2, 3, 4, 5], 9)
    driver.submit("B", [6, 7], 9)
    driver.step()
    driver.abort("B")
    op = driver.scheduler.flush_releases()
    assert (op.step, op.num_rows, op.row_digests.tolist()) == (2, 0, [])
    (row, (_, pages)) = next(iter(driver.scheduler.rows().items()))
    assert (op.verify_rows.tolist(), op.verify_digests.tolist()) == ([row], [plain_digest(pages.tolist())])


def test_a_repointed_row_is_left_out_of_samples(drive: Drive) -> None:
    """A row whose earlier entry changed after it was sent differs from its mirror until it is sent whole again."""
    driver = drive(verify=Verify.SAMPLE, verify_interval=2)
    driver.submit("A", [1, 2, 3, 4, 5], 9)
    driver.submit("B", [6, 7], 9)
    driver.step()
    rows = driver.scheduler.placement.rows
    a, b = (driver.requests[name].row for name in "AB")
    rows.repoint(a, 0, np.array([16], dtype=np.int32))
    assert rows.dirty[a]
    driver.scheduler.placement.released_rows.append(0)  # something to say
    op = driver.scheduler.flush_releases()
    assert op.verify_rows.tolist() == [b]


def test_off_states_nothing(drive: Drive) -> None:
    """By default no op has a digest."""
    driver = drive()

    def each(driver: Any) -> None:
        assert (driver.op.row_digests, driver.op.verify_rows, driver.op.verify_digests) == (None, None, None)

    run_mixed(driver, each)


@pytest.mark.parametrize(("key", "value"), [("verify", "every"), ("verify_interval", 0)])
def test_settings_out_of_range(make_config: Callable[..., SchedulerConfig], key: str, value: object) -> None:
    """A mode that is no Verify, or an interval below 1, is refused by name."""
    with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
        make_config(**{key: value})


@pytest.mark.parametrize(
    ("policy", "found"), [("transition", []), ("diff", []), ("always", []), ("tail_only", [("A", [3, 2], [1, 2])])]
)
def test_a_mirror_that_was_not_told_is_found(make_config: Any, policy: str, found: list[Any]) -> None:
    """The worked example: A resumes on the tree's page 3. Told the tail only, the mirror still reads page 1: a difference."""
    config = make_config(refresh_policy=RefreshPolicy(policy), verify=Verify.EVERY)
    scheduler, runtime = Scheduler(config), InProcessRuntime(config)
    runtime.open(1)
    scheduler.submit("A", [1, 2, 3, 4, 5, 6, 7], max_tokens=3)
    scheduler.submit("B", [1, 2, 3, 4, 9], max_tokens=1)
    differences = []
    while scheduler.has_work and not differences:
        op = scheduler.plan()
        if op is None:
            continue
        result = runtime.run(op)
        for i in np.flatnonzero(result.digests != op.row_digests).tolist():
            row = int(op.req_pool_indices[i])
            differences.append((op.requests[i].request_id, scheduler.rows()[row][1].tolist(), runtime.row(row)))
        if not differences:
            scheduler.complete(result)
        if op.step == 1:
            scheduler.retract("A")
    assert differences == found
