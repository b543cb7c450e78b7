"""The verifier alone: what it compares, what it says, and when a difference is data loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog

from scheduler_service.core.config import Verify
from scheduler_service.core.ops import StepResult
from scheduler_service.errors import DataLossError, LinkBrokenError, RuntimeLinkError
from scheduler_service.metrics import Metrics
from scheduler_service.verification import Verifier
from scheduler_service.wire_facts import MirrorRows

Drive = Callable[..., Any]


class Reader:
    """A link whose mirror has one row."""

    def __init__(self, row: int, pages: list[int], *, error: RuntimeLinkError | None = None, broken: bool = False) -> None:
        self.broken: RuntimeLinkError | None = LinkBrokenError("gone") if broken else None
        self.asked: list[list[int]] = []
        self._rows = MirrorRows(1, 1, {row: np.array(pages, dtype=np.int32)}, {row: len(pages)})
        self._error = error

    async def read_rows(self, rows: list[int], timeout_s: float) -> MirrorRows:
        self.asked.append(rows)
        if self._error is not None:
            raise self._error
        return self._rows


class Bench:
    """A core with two running requests and one op in flight, and its verifier."""

    def __init__(self, driver: Any, window_s: float = 600.0) -> None:
        self.driver = driver
        self.metrics = Metrics()
        self.verifier = Verifier(driver.scheduler, self.metrics, window_s)
        driver.submit("a", [1, 2, 3, 4, 5], 9)
        driver.submit("b", [6, 7, 8, 9, 10, 11], 9)
        driver.plan()

    def answer(self, *changes: int, **columns: Any) -> StepResult:
        """The right result of the op in flight, with the digests at these places changed."""
        op = self.driver.op
        digests = op.row_digests.copy()
        digests[list(changes)] ^= np.uint64(1 << 63)
        result = StepResult(op.session_no, op.step, np.zeros(op.num_rows, dtype=np.int32), digests=digests)
        for name, value in columns.items():
            setattr(result, name, value)
        return result

    def counts(self) -> tuple[float | None, float | None]:
        """Digests compared, differences found."""
        value = self.metrics.registry.get_sample_value
        return value("pagemirror_digests_total"), value("pagemirror_digest_mismatches_total")

    async def difference(self, reader: Reader) -> str:
        """What the log says of a difference in b's row."""
        assert self.verifier.check(self.answer(1))
        with structlog.testing.capture_logs() as logs:
            await self.verifier.settle(reader, lambda error: None)
        (entry,) = logs
        assert (entry["event"], entry["row"], entry["request_id"]) == ("digest_mismatch", 2, "b")
        return str(entry["first_difference"])


@pytest.fixture
def bench(drive: Drive) -> Bench:
    """Every op states digests."""
    return Bench(drive(verify=Verify.EVERY))


def test_right_digests_are_no_trouble(bench: Bench) -> None:
    """Equal digests are counted and nothing else."""
    assert bench.verifier.check(bench.answer()) == ""
    assert bench.verifier.pending is None
    assert bench.counts() == (2, 0)


def test_a_difference_names_row_request_and_digests(bench: Bench) -> None:
    """The first row that differs is named with both digests, and how many more there are."""
    expected = int(bench.driver.op.row_digests[1])
    found = expected ^ (1 << 63)
    assert bench.verifier.check(bench.answer(1)) == (
        f"step 1 of session 1: the digest of row 2 of request 'b' differs: expected {expected:016x}, found {found:016x}"
    )
    assert bench.verifier.check(bench.answer(0, 1)).endswith("(and 1 more rows)")
    assert bench.counts() == (4, 2)


@pytest.mark.parametrize("digests", [None, np.zeros(1, dtype=np.uint64), np.zeros(3, dtype=np.uint64)])
def test_missing_digests_are_trouble_but_no_difference(bench: Bench, digests: Any) -> None:
    """A result with too few or too many digests is not believed, and not counted as damage."""
    trouble = bench.verifier.check(bench.answer(digests=digests))
    assert trouble == f"step 1 was answered with {0 if digests is None else len(digests)} digests, 2 were asked for"
    assert (bench.verifier.pending, bench.counts()) == (None, (0, 0))


@pytest.mark.parametrize("columns", [{"step": 2}, {"session_no": 2}])
def test_a_result_of_another_op_is_for_the_core(bench: Bench, columns: dict[str, int]) -> None:
    """What does not answer the oldest op is not compared."""
    assert bench.verifier.check(bench.answer(0, **columns)) == ""


def test_off_compares_nothing(drive: Drive) -> None:
    """Without verification digests that nobody asked for are not looked at."""
    driver = drive()
    driver.submit("a", [1], 1)
    driver.plan()
    verifier = Verifier(driver.scheduler, Metrics(), 600.0)
    assert verifier.check(StepResult(1, 1, np.zeros(1, np.int32), digests=np.zeros(7, np.uint64))) == ""


async def test_the_first_difference_is_read_from_the_mirror(bench: Bench) -> None:
    """The log has the first logical page that differs, or why it does not: mended, unreadable, in other hands."""
    pages = bench.driver.rows["b"]
    wrong = [pages[0], pages[1] + 5]
    assert await bench.difference(reader := Reader(2, wrong)) == f"logical page 1 is {wrong[1]}, should be {pages[1]}"
    assert reader.asked == [[2]]
    assert await bench.difference(Reader(2, pages)) == "none in the first 2 pages any more"
    assert await bench.difference(Reader(2, pages[:1])) == "none in the first 1 pages any more"
    assert await bench.difference(Reader(9, [])) == "none in the first 0 pages any more"
    assert await bench.difference(Reader(2, pages, broken=True)) == "the mirror cannot be read"
    assert await bench.difference(Reader(2, pages, error=LinkBrokenError("no answer"))) == (
        "the mirror could not be read: no answer"
    )
    bench.driver.retract("b")
    assert await bench.difference(reader := Reader(2, pages)) == "the request has left the row"
    assert reader.asked == []


async def test_nothing_pending_nothing_to_settle(bench: Bench) -> None:
    """Other troubles are none of the verifier's."""
    with structlog.testing.capture_logs() as logs:
        await bench.verifier.settle(Reader(1, []), lambda error: pytest.fail(str(error)))
    assert logs == []


@pytest.mark.parametrize(("window_s", "losses"), [(600.0, [False, True, True]), (0.0, [False, False, False])])
async def test_second_difference_within_the_window_is_data_loss(drive: Drive, window_s: float, losses: list[bool]) -> None:
    """The window counts from one difference to the next; 0 turns it off."""
    bench = Bench(drive(verify=Verify.EVERY), window_s)
    found, logged = [], []
    for _ in losses:
        bench.verifier.check(bench.answer(0))
        errors: list[DataLossError] = []
        reader = Reader(1, [1, 2])
        with structlog.testing.capture_logs() as logs:
            await bench.verifier.settle(reader, lambda error, to=errors, by=reader: to.append(error) or by.asked.append([-1]))
        assert all(error.window_s == window_s for error in errors)
        assert reader.asked == [[-1]] * len(errors) + [[1]], "requests end before the mirror is read"
        found.append(len(errors) == 1)
        logged += [entry["data_loss"] for entry in logs]
    assert found == logged == losses
