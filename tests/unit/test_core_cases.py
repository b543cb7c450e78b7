"""Public bug reports as small scenarios: stale mirrors, deltas, row reuse.

Each docstring names the report. Page and row numbers begin at 1. Cached prefixes are in test_core_cases_cache.py, lives of
requests in test_core_cases_lives.py, limits in test_core_cases_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_service.scenario import parse_scenario
from scheduler_service.simulation import Simulation, StepLine

Drive = Callable[..., Any]


def _simulate(text: str) -> tuple[list[StepLine], Simulation]:
    """Run a scenario through mirror and model of the runtime."""
    run = Simulation(parse_scenario(text, "case"))
    lines = []
    while (line := run.step()) is not None:
        lines.append(line)
    assert run.summary.violations == []
    return lines, run


# K1: stale mirrors, deltas, row reuse


def test_b01_stale_head_after_resume(drive: Drive) -> None:
    """lightseekorg/tokenspeed#651, #630: a resume swaps the head for the cached page and gets the old one back as its tail."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 3)
    driver.submit("B", [1, 2, 3, 4, 9])
    assert driver.step()["A"].full
    driver.retract("A")
    driver.step()
    resume = driver.step()["A"]
    assert (resume.pages, resume.full, resume.size) == ([3, 2], True, 2)
    tail = driver.step()["A"]
    assert (tail.pages, tail.full, tail.begin, tail.size) == ([3, 2, 1], False, 2, 1)
    assert driver.outputs["A"] == [168, 523, 254]


def test_b02_duplicate_prefix_of_a_running_row(drive: Drive) -> None:
    """sgl-project/mini-sglang#142: a half-done prompt whose prefix is cached by now repoints before its copies are freed."""
    driver = drive(page_size=2, num_pages=8, chunk_size=4)
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7, 8])
    driver.submit("B", [1, 2, 3, 4, 9, 9, 9, 9])
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2], [3, 4])
    planned = driver.step()
    assert planned["A"].pages == [1, 2, 5, 6]
    assert (planned["B"].pages, planned["B"].full) == ([1, 2, 4, 3], True)
    assert driver.outputs == {"A": [240], "B": [300]}


@pytest.mark.parametrize(("length", "pages"), [(3, [1]), (4, [1, 3]), (5, [1, 2])])
def test_b03_granted_page_whose_op_was_never_sent(drive: Drive, length: int, pages: list[int]) -> None:
    """RBLN-SW/vllm-rbln#662: a request left out of a step keeps its row, and its next op carries the page it then gets."""
    driver = drive(mixed=False)
    driver.submit("A", range(1, length + 1), 3)
    driver.step()
    before = driver.rows["A"]
    driver.submit("B", [9, 9, 9], 3)
    assert list(driver.step()) == ["B"]
    assert driver.rows["A"] == before
    row = driver.step()["A"]
    assert (row.pages, row.begin, row.begin + row.size) == (pages, len(before), len(pages))


def test_b05_row_reused_by_a_shorter_tenant() -> None:
    """RBLN-SW/vllm-rbln#42: nothing of the previous tenant's longer row is readable, at first and when the new one grows."""
    lines, run = _simulate(
        """
        max_rows: 1
        events:
          - {step: 0, submit: X, prompt: [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], max_tokens: 1}
          - {step: 1, submit: Y, prompt: [1, 2, 3], max_tokens: 4}
          - {step: 6, submit: Z, prompt: [8, 8, 8, 8, 8, 8, 8, 8, 8], max_tokens: 2}
        """
    )
    assert lines[0].ops[0].occupied_pages == [1, 2, 3, 4]
    assert [line.mirror.get("Y") for line in lines[1:4]] == [[4], [4], [4, 5]]
    assert [line.ops[0].row for line in lines if line.ops] == [1] * 7
    assert (lines[6].ops[0].begin, lines[6].ops[0].full_refresh) == (0, True)
    assert lines[6].mirror["Z"] == lines[6].ops[0].occupied_pages
    assert run.runtime.mirror.table[1, 3:].tolist() == [0] * 13


def test_b06_full_refresh_with_nothing_appended() -> None:
    """Seed of lightseekorg/tokenspeed#651; vllm-project/vllm-omni#6053: an op of one row with size 0 rewrites its head."""
    lines, _ = _simulate(
        """
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7], max_tokens: 3}
          - {step: 0, submit: B, prompt: [1, 2, 3, 4, 9], max_tokens: 1}
        """
    )
    assert lines[0].mirror == {"A": [1, 2]}
    (op,) = lines[1].ops
    assert (op.begin, op.size, op.full_refresh) == (2, 0, True)
    assert lines[1].mirror == {"A": [3, 2]}


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_b07_batch_of_a_hit_and_a_miss(drive: Drive, order: str) -> None:
    """vllm-project/vllm#7018: one request's cached prefix leaves the other's row whole, in either order."""
    driver = drive(page_size=2)
    driver.submit("seed", [1, 2, 3, 4, 9])
    driver.run()
    prompts = {"A": [1, 2, 3, 4, 5], "B": [8, 8, 8, 8, 8]}
    for name in order:
        driver.submit(name, prompts[name])
    planned = driver.step()
    expected = {"AB": {"A": [1, 2, 3], "B": [4, 5, 6]}, "BA": {"A": [1, 2, 6], "B": [3, 4, 5]}}
    assert {name: row.pages for name, row in planned.items()} == expected[order]
    assert {name: driver.requests[name].cached_tokens for name in "AB"} == {"A": 4, "B": 0}


def test_b08_batch_position_is_not_the_row(drive: Drive) -> None:
    """vllm-project/vllm#51890: rows keep their numbers when the batch is condensed and ordered anew."""
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.submit("B", [7, 7], 6)
    driver.step()
    driver.submit("C", [9, 9, 9, 9, 9], 6, priority=-1)
    assert [(name, row.row) for name, row in driver.step().items()] == [("C", 3), ("A", 1), ("B", 2)]
    assert driver.finish == {"A": "length"}
    for _ in range(2):
        assert [(name, row.row) for name, row in driver.step().items()] == [("C", 3), ("B", 2)]
    assert (driver.rows["B"], driver.rows["C"]) == ([3, 2], [4, 5])
    driver.run()
