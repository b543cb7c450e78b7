"""B01 to B08: stale mirrors, updates by tails, rows that change hands.

Page and row numbers begin at 1, so every id is one more than in the reports' own small scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_driver import alone
from scheduler_service.core.config import RefreshPolicy
from scheduler_service.scenario import parse_scenario
from scheduler_service.simulation import Simulation

Drive = Callable[..., Any]
POLICIES = (RefreshPolicy.TRANSITION, RefreshPolicy.DIFF, RefreshPolicy.ALWAYS)


@pytest.fixture
def hand() -> Any:
    """The runtime alone: `hand.Row` and `hand.HandRuntime`."""
    import hand_runtime

    return hand_runtime


def _simulate(text: str) -> tuple[list[Any], Any]:
    """A scenario file's lines, and the run."""
    run = Simulation(parse_scenario(text, "case"))
    lines = []
    while (line := run.step()) is not None:
        lines.append(line)
    return lines, run


def test_b01_stale_head_after_resume(drive: Drive, hand: Any) -> None:
    """lightseekorg/tokenspeed#651, #630: a resume swaps the head for the cached page and gets the old one back as its tail."""
    # The scheduler: A resumes on B's cached copy (page 3), its own first page 1 is freed and comes back as its tail.
    # The resume itself computes known tokens only, so the tail is granted by the decode step after it: row [3,2], then [3,2,1].
    driver = drive(shuffled=True)
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 4)
    driver.submit("B", [1, 2, 3, 4, 9])
    first = driver.step()["A"]
    assert (first.cause, first.pages, first.full) == ("first_chunk", [1, 2], True)
    driver.retract("A")
    driver.step()
    resume = driver.step()["A"]
    assert (resume.cause, resume.pages, resume.full, resume.num_computed) == ("resume", [3, 2], True, 4)
    tail = driver.step()["A"]
    assert (tail.cause, tail.pages, tail.full, tail.begin, tail.size) == ("decode", [3, 2, 1], False, 2, 1)
    assert driver.outputs["A"] == [168, 523, 254]
    # The other transitions that set the bit, and the one that does not.
    driver = drive(chunk_size=5)
    driver.submit("C", range(1, 11), 4)
    steps = [driver.step()["C"] for _ in range(4)]
    assert [(row.cause, row.full) for row in steps] == [
        ("first_chunk", True),
        ("continuation", True),
        ("prefill_done_to_decode", True),
        ("decode", False),
    ]
    # The runtime: the case's own op, which names the recycled page 4 as tail behind the cached page 8. Told only the tail, the
    # mirror would read [4,2,4].
    for full, row, token in ((True, [8, 2, 4], 254), (False, [4, 2, 4], 776)):
        runtime = hand.HandRuntime(lenient=not full)
        runtime.step(hand.Row(2, [8], 0, [1, 2, 3, 4], full=True), hand.Row(1, [4, 2], 0, [1, 2, 3, 4, 5, 6, 7], full=True))
        if full:
            resumed = hand.Row(1, [8, 2, 4], 7, [168, 523], full=True, begin=2, generation=2)
            assert runtime.step(resumed, released=(1,)) == [token]
        else:
            assert runtime.step(hand.Row(1, [8, 2, 4], 7, [168, 523], begin=2)) == [token]
            assert len(runtime.model.violations) == 1
        assert runtime.row(1) == row
    # The whole of it under the refresh policy that sends tails only.
    lines, run = _simulate(
        """
        refresh_policy: tail_only
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7], max_tokens: 3}
          - {step: 0, submit: B, prompt: [1, 2, 3, 4, 9], max_tokens: 1}
          - {step: 1, retract: A}
        """
    )
    assert run.summary.outputs["A"] == [168, 523, 776]
    assert lines[2].mirror == {"A": [1, 2]}
    assert any("page 1 is aliased by logical pages 0 and 2" in violation for violation in run.summary.violations)


def test_b02_duplicate_prefix_of_a_running_row(drive: Drive) -> None:
    """sgl-project/mini-sglang#142: a half-done prompt whose prefix is cached by now repoints before its copies are freed."""
    driver = drive(page_size=2, num_pages=8, chunk_size=4, shuffled=True)
    driver.submit("A", range(1, 9), 2)
    driver.submit("B", [1, 2, 3, 4, 9, 9, 9, 9], 2)
    planned = driver.step()
    assert (planned["A"].pages, planned["B"].pages) == ([1, 2], [3, 4])
    planned = driver.step()
    # A is canonical. B adopts its pages, and its own two come back as B's tail, the last one freed first.
    assert (planned["A"].pages, planned["A"].full) == ([1, 2, 5, 6], True)
    assert (planned["B"].pages, planned["B"].full) == ([1, 2, 4, 3], True)
    assert driver.outputs == {"A": [240], "B": [300]}


def test_b03_granted_page_whose_op_was_never_sent(drive: Drive) -> None:
    """RBLN-SW/vllm-rbln#662: a row left out of a step gets no page in it, and its next op carries the page it then gets."""
    # (prompt length, decode steps before B comes) -> row before and after; the page-aligned ones need a page in the step that
    # B is given. B's three tokens take the page after A's.
    cases = {(4, 0): ([1], [1, 3]), (3, 0): ([1], [1]), (5, 0): ([1, 2], [1, 2]), (3, 1): ([1], [1, 3]), (2, 1): ([1], [1])}
    for policy in POLICIES:
        for (length, num_decodes), (before, after) in cases.items():
            driver = drive(mixed=False, refresh_policy=policy)
            driver.submit("A", range(1, length + 1), 6)
            for _ in range(1 + num_decodes):
                driver.step()
            assert driver.rows["A"] == before
            driver.submit("B", [9, 9, 9], 3)
            assert list(driver.step()) == ["B"]
            assert driver.rows == {"A": before, "B": [len(before) + 1]}
            row = driver.step()["A"]
            assert (row.pages, row.begin, row.size) == (after, len(before), len(after) - len(before))
            driver.run()


def test_b04_only_the_ops_own_bit_decides(hand: Any) -> None:
    """vllm-project/vllm#46595: whether a row is rewritten or appended to is read from the op, never from memory."""
    runtime = hand.HandRuntime(width=4)
    runtime.step(
        hand.Row(1, [1, 2, 3], 0, range(1, 10), full=True),
        hand.Row(2, [8], 0, [1, 2, 3], full=True),
    )
    runtime.step(hand.Row(1, [6, 2], 0, [1, 2, 3, 4, 5], full=True, generation=2))
    assert (runtime.row(1), runtime.table()[1].tolist()) == ([6, 2], [6, 2, 0, 0])
    runtime.step(hand.Row(1, [6, 2, 5], 5, [6, 7, 8, 9], begin=2, generation=2))
    assert runtime.row(1) == [6, 2, 5]
    # Nothing on this wire announces a retraction, so none can be withdrawn; the nearest is a release, here of another row.
    token = runtime.step(hand.Row(1, [6, 2, 5, 7], 9, [10, 11, 12, 13], begin=3, generation=2), released=(2,))
    assert runtime.row(1) == [6, 2, 5, 7]
    assert token == [sum((i + 1) * (i + 2) for i in range(13)) % 997]
    # A rewrite within the lease, to a row that differs at its head.
    runtime.step(hand.Row(2, [9], 0, [1, 2, 3, 4], full=True, generation=2))
    assert runtime.step(hand.Row(1, [9, 2, 5, 7], 13, full=True, begin=4, generation=2))
    assert runtime.row(1) == [9, 2, 5, 7]


def test_b05_row_reused_by_another_tenant(hand: Any, drive: Drive) -> None:
    """RBLN-SW/vllm-rbln#42: nothing of the row's previous tenant can be read, at first and when the new one grows."""
    successors = {"shorter": [1, 2, 3], "longer": list(range(1, 20))}
    for length, prompt in successors.items():
        for name in ("Y", "X"):  # another request, and the same one again
            for released in ((1,), ()):
                runtime = hand.HandRuntime(num_pages=20)
                runtime.step(hand.Row(1, [5, 6, 7, 8], 0, [5] * 16, full=True, name="X"))
                runtime.poison(6, 7, 8)
                pages = [3] if length == "shorter" else [3, 9, 10, 11, 12]
                first = hand.Row(1, pages, 0, prompt, full=True, generation=2, name=name)
                tokens = runtime.step(first, released=released)
                assert runtime.table()[1].tolist() == pages + [0] * (16 - len(pages))
                while len(tokens) < 6:
                    computed = len(prompt) + len(tokens) - 1
                    begin = len(pages)
                    if computed == 4 * begin:
                        pages = [*pages, 5 if length == "shorter" else 13]
                    tokens += runtime.step(hand.Row(1, pages, computed, begin=begin, generation=2))
                assert runtime.row(1) == pages
                assert tokens == alone(prompt, 6)
                assert pages == ([3, 5] if length == "shorter" else [3, 9, 10, 11, 12, 13])
    # The same through the scheduler, with one row for three tenants.
    driver = drive(max_rows=1)
    for name, prompt, count in (("X", [5] * 13, 1), ("Y", [1, 2, 3], 4), ("X", [8] * 9, 2)):
        driver.submit(name, prompt, count)
        row = driver.step()[name]
        assert (row.row, row.begin, row.full) == (1, 0, True)
        driver.run()
        assert driver.outputs[name] == alone(prompt, count)


def test_b06_full_refresh_with_nothing_appended(hand: Any, drive: Drive) -> None:
    """Seed of lightseekorg/tokenspeed#651; vllm-project/vllm-omni#6053: size 0 is not nothing to do when the bit is set."""
    runtime = hand.HandRuntime()
    head, eight = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]
    runtime.step(
        hand.Row(1, [4, 2], 0, eight, full=True),
        hand.Row(2, [6, 7], 0, eight, full=True),
        hand.Row(3, [3], 0, head, full=True),
        hand.Row(4, [8], 0, head, full=True),
    )
    tokens = runtime.step(
        hand.Row(3, [3, 9, 10], 4, [5, 6, 7, 8, 9], begin=1),
        hand.Row(1, [8, 2], 6, full=True, begin=2),
        hand.Row(2, [6, 7], 6),
    )
    assert [runtime.row(row) for row in (1, 2, 3)] == [[8, 2], [6, 7], [3, 9, 10]]
    assert tokens == [alone(range(1, 10), 1)[0], *[alone(eight, 2)[1]] * 2]
    # A step that holds nothing but a refresh of size 0.
    assert runtime.step(hand.Row(1, [4, 2], 7, full=True, begin=2)) == [alone(eight, 3)[2]]
    assert [runtime.row(row) for row in (1, 2, 3)] == [[4, 2], [6, 7], [3, 9, 10]]
    # The scheduler sends such an op, alone in its step: A adopts what B has published, and appends nothing.
    driver = drive()
    driver.submit("A", [1, 2, 3, 4, 5, 6, 7], 3)
    driver.submit("B", [1, 2, 3, 4, 9])
    driver.step()
    planned = driver.step()
    assert list(planned) == ["A"]
    assert (planned["A"].pages, planned["A"].begin, planned["A"].size, planned["A"].full) == ([3, 2], 2, 0, True)


def test_b07_batch_of_a_hit_and_a_miss(drive: Drive) -> None:
    """vllm-project/vllm#7018: one request's cached prefix leaves the other's row whole, in either order."""
    prompts = {"A": [1, 2, 3, 4, 5], "B": [8, 8, 8, 8, 8]}
    rows = {"AB": {"A": [1, 2, 3], "B": [4, 5, 6]}, "BA": {"A": [1, 2, 6], "B": [3, 4, 5]}}
    for order, expected in rows.items():
        driver = drive(page_size=2, shuffled=True)
        for seed in ([1, 2, 9], [1, 2, 3, 4, 9]):  # the tree: [1,2] in page 1, below it [3,4] in page 2
            driver.submit("seed", seed)
            driver.run()
        assert driver.tree == {1, 2}
        for name in order:
            driver.submit(name, prompts[name])
        assert {name: row.pages for name, row in driver.step().items()} == expected
        assert {name: driver.requests[name].cached_tokens for name in "AB"} == {"A": 4, "B": 0}


def test_b08_batch_position_is_not_the_row(hand: Any, drive: Drive) -> None:
    """vllm-project/vllm#51890: rows keep their numbers when a batch is condensed and put in another order."""
    prompts = {1: [1, 2, 3, 4, 5], 2: [7, 7], 3: [9, 9, 9, 9, 9]}
    pages = {1: [1, 2], 2: [3], 3: [4, 5]}
    runtime = hand.HandRuntime()
    runtime.step(*(hand.Row(row, pages[row], 0, prompts[row], full=True) for row in (1, 2, 3)))
    outputs: dict[int, list[int]] = {2: [], 3: []}
    for count, order in enumerate(([3, 2], [2, 3])):
        rows = [hand.Row(row, pages[row], len(prompts[row]) + count) for row in order]
        for row, token in zip(order, runtime.step(*rows, released=(1,) if count == 0 else ()), strict=True):
            outputs[row].append(token)
        assert [runtime.row(row) for row in (1, 2, 3)] == [[], [3], [4, 5]]
    assert outputs == {row: alone(prompts[row], 3)[1:] for row in (2, 3)}
    # The scheduler: C comes later and goes first, A ends, and every step is also run with its rows in another order.
    driver = drive(shuffled=True)
    driver.submit("A", [1, 2, 3, 4, 5], 2)
    driver.submit("B", [7, 7], 6)
    driver.step()
    driver.submit("C", [9, 9, 9, 9, 9], 6, priority=-1)
    assert [(name, row.row) for name, row in driver.step().items()] == [("C", 3), ("A", 1), ("B", 2)]
    assert driver.finish == {"A": "length"}
    for _ in range(2):
        assert [(name, row.row) for name, row in driver.step().items()] == [("C", 3), ("B", 2)]
    assert (driver.rows["B"], driver.rows["C"]) == ([3, 2], [4, 5])
    assert driver.scheduler.placement.rows.free_rows().count(1) == 1
