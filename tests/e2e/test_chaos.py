"""Real processes under random faults, as benchmarks/soak.py runs them, for as long as a test suite may take."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 400.0
MINUTES = 0.5


@pytest.fixture
def ledger(soak_parts: Callable[[str], Any]) -> Any:
    """An empty account of calls."""
    return soak_parts("_soak_ledger").Ledger()


@pytest.fixture
def call(ledger: Any) -> Callable[..., None]:
    """Enters one call of client 3 from second 100 to second 110 with this outcome."""

    def enter(outcome: str, kind: str = "plain", number: int = 1) -> None:
        key = {"client": 3, "life": 1, "call": number}
        ledger.take({**key, "begin": 100.0})
        if outcome:
            end = {"end": 110.0, "kind": kind, "outcome": outcome, "detail": "why", "retractions": 2, "cached": 8}
            ledger.take({**key, **end})

    return enter


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("seed", "overlap_depth", "verify"), [(1, 2, "off"), (2, 0, "every")])
async def test_chaos_loses_nothing_and_nothing_is_wrong(
    child_env: dict[str, str], project_root: Path, seed: int, overlap_depth: int, verify: str
) -> None:
    """Forty clients, both services killed, stopped and cut off: each request ends once and right, and nothing is left open."""
    script = project_root / "benchmarks" / "soak.py"
    options = ("--minutes", str(MINUTES), "--seed", str(seed), "--overlap-depth", str(overlap_depth), "--verify", verify)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        *options,
        "--json",
        env=child_env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()  # its children watch it
            await process.wait()
    assert out, err.decode()
    summary = json.loads(out.splitlines()[-1])
    assert (summary["lost"], summary["wrong"], summary["findings"]) == (0, 0, []), f"{summary}\n{err.decode()}"
    assert process.returncode == 0
    assert summary["clients"] == 40
    outcomes = summary["outcomes"]
    assert summary["requests_finished"] >= 40
    assert sum(outcomes.values()) == summary["calls"]
    assert (
        {"finished"} <= set(outcomes) <= {"finished", "aborted", "vanished", "refused", "abandoned", "unavailable", "internal"}
    )
    assert outcomes.get("internal", 0) <= summary["suspects_ended"]
    faults = summary["faults"]
    for name in ("runtime", "scheduler"):
        assert faults.get(f"{name}_kill", 0) == summary["services"][name]["lives"] - 1
    assert sum(faults.get(kind, 0) for kind in ("runtime_kill", "scheduler_kill", "runtime_cut", "runtime_stop")) >= 2


async def test_soak_says_what_it_does_and_refuses_what_it_does_not_know(child_env: dict[str, str], project_root: Path) -> None:
    """Help explains the run and its result; an unknown fault is status 2 with the list of those that there are."""
    script = project_root / "benchmarks" / "soak.py"
    for options, status, words in (
        (["--help"], 0, ["--minutes 10 --seed 3", "Lost is a request", "--only"]),
        (["--only", "earthquake"], 2, ["there is no fault earthquake", "runtime_kill"]),
        (["--pages", "10"], 2, ["--pages must be at least"]),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, *options, env=child_env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert (process.returncode, [word for word in words if word not in out.decode()]) == (status, [])


def test_outcomes_that_must_be_told(ledger: Any, call: Callable[..., None]) -> None:
    """The account calls wrong outputs wrong, and failed, overdue, open and crashed calls lost."""
    for number, outcome in enumerate(["finished", "aborted", "refused", "vanished", "wrong", "failed", "overdue", ""]):
        call(outcome, number=number)
    ledger.take({"client": 5, "life": 1, "crashed": "KeyError"})
    ledger.close([], [], [])
    assert (len(ledger.wrong), len(ledger.lost), ledger.num_requests, ledger.num_calls) == (1, 4, 2, 8)
    assert (ledger.retractions, ledger.cached_tokens) == (14, 56)


def test_second_end_of_a_call_is_wrong(ledger: Any, call: Callable[..., None]) -> None:
    """One terminal event a call."""
    call("finished")
    call("finished")
    assert ledger.wrong == ["call (3, 1, 1) ended twice"]


@pytest.mark.parametrize(
    ("outages", "cuts", "lost"),
    [
        ([], [], 1),
        ([(60.0, 89.0)], [(3, 121.0, 122.0)], 1),  # long over, and much too late
        ([(60.0, 96.0)], [], 0),
        ([(109.0, float("inf"))], [], 0),
        ([], [(3, 104.0, 104.0)], 0),
        ([], [(4, 104.0, 104.0)], 1),  # another client's
    ],
)
def test_unavailable_needs_a_reason(
    ledger: Any, call: Callable[..., None], outages: list[tuple[float, float]], cuts: list[tuple[int, float, float]], lost: int
) -> None:
    """UNAVAILABLE is justified while there is no scheduler, and by a cut of one's own connection; otherwise it is a loss."""
    call("unavailable")
    ledger.close(outages, cuts, [])
    assert len(ledger.lost) == lost


@pytest.mark.parametrize(
    ("faults", "lost"),
    [
        ([], 1),
        (["runtime_step_fails", "runtime_cut"], 1),
        (["runtime_step_fails", "runtime_cut", "runtime_kill"], 0),
        (["runtime_kill", "runtime_cut", "runtime_stop", "runtime_stall"], 1),
        (["runtime_kill"] * 5, 0),
    ],
)
def test_internal_needs_several_reasons(ledger: Any, call: Callable[..., None], faults: list[str], lost: int) -> None:
    """A request may be taken for the cause only after as many failures, while it lived, as the rule for suspects says."""
    call("internal")
    long_ago = [("runtime_step_fails", 10.0, 10.0)] * 9
    ledger.close([], [], long_ago + [(name, 101.0, 102.0) for name in faults])
    assert len(ledger.lost) == lost


def test_call_of_a_killed_client_is_abandoned(ledger: Any, call: Callable[..., None]) -> None:
    """Its open call ended with its process and is not lost."""
    call("", number=1)
    call("finished", number=2)
    ledger.note_killed(3)
    ledger.close([], [], [])
    assert (ledger.lost, dict(ledger.outcomes)) == ([], {"finished": 1, "abandoned": 1})
