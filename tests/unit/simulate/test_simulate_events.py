"""`pagemirror simulate`: events and keys of the file, and what they show in lines and summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]


def test_events_for_nobody_are_ignored(simulate: Simulate) -> None:
    """Requests that are unknown, over, or without a row to lose are passed over in silence."""
    status, lines, summary = simulate(
        """
        max_rows: 1
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 2}
          - {step: 0, submit: B, prompt: [1], max_tokens: 1}
          - {step: 1, retract: B}
          - {step: 1, retract: nobody}
          - {step: 1, abort: nobody}
          - {step: 4, retract: A}
          - {step: 4, abort: A}
        """
    )
    assert status == 0
    assert summary["finish"] == {"A": "length", "B": "length"}
    assert summary["retractions"] == {"A": 0, "B": 0}
    assert len(lines) == 5


@pytest.mark.parametrize(
    "request_of_b",
    ["prompt: []", "prompt: [997]", "prompt: [-1]", "prompt: [1], max_tokens: 0", "prompt: [1, 1, 1, 1, 1, 1, 1, 1, 1]"],
)
def test_refused_submit_ends_it_and_the_others_run(simulate: Simulate, request_of_b: str) -> None:
    """A refusal is an end of its own kind in its own step, with no output and exit status 0."""
    status, lines, summary = simulate(
        f"""
        num_pages: 2
        events:
          - {{step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 2}}
          - {{step: 1, submit: B, {request_of_b}}}
        """
    )
    assert status == 0
    assert [line["ended"] for line in lines] == [{}, {"A": "length", "B": "refused:INVALID_ARGUMENT"}]
    assert summary["finish"] == {"A": "length", "B": "refused:INVALID_ARGUMENT"}
    assert summary["outputs"] == {"A": [20, 104], "B": []}
    assert (summary["cached_tokens"]["B"], summary["retractions"]["B"]) == (0, 0)


def test_scenario_of_one_refusal(simulate: Simulate) -> None:
    """A run in which nothing ever runs has the line of the refusal and no step."""
    status, lines, summary = simulate("events: [{step: 0, submit: A, prompt: []}]")
    assert (status, len(lines), summary["steps"], summary["lines"]) == (0, 1, 0, 1)
    assert lines[0]["ended"] == {"A": "refused:INVALID_ARGUMENT"}


def test_scenario_without_events(simulate: Simulate) -> None:
    """Nothing to do is a summary without a line."""
    status, lines, summary = simulate("events: []")
    assert (status, lines) == (0, [])
    assert summary == {
        "outputs": {},
        "cached_tokens": {},
        "finish": {},
        "retractions": {},
        "steps": 0,
        "lines": 0,
        "pages_sent": 0,
        "violations": [],
    }


def test_capacity_and_stop_by_name(simulate: Simulate) -> None:
    """The pool alone ends A; a stop token, which is part of the output, ends B."""
    _, _, summary = simulate(
        """
        page_size: 2
        num_pages: 3
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 9}
          - {step: 0, submit: B, prompt: [1, 2, 3], max_tokens: 4, eos: [5, 104]}
        """
    )
    assert summary["finish"] == {"A": "capacity", "B": "stop"}
    assert summary["outputs"] == {"A": [20, 104, 629, 421], "B": [20, 104]}


def test_cache_reset_in_use_is_refused_in_its_line(simulate: Simulate) -> None:
    """The first reset meets a user and is told so; the second empties the tree, its line has no such entry."""
    status, lines, _ = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 4}
          - {step: 2, reset_prefix_cache: true}
          - {step: 4, reset_prefix_cache: true}
          - {step: 5, submit: B, prompt: [1, 2, 3], max_tokens: 1}
        """
    )
    assert status == 0
    assert [line.get("refused") for line in lines] == [None, None, ["reset_prefix_cache:FAILED_PRECONDITION"], None, None, None]
    assert (lines[3]["cached"], lines[4]["cached"], lines[4]["free"]) == (3, 0, 16)
    assert lines[5]["ops"][0]["num_computed"] == 0


def test_cached_tokens_of_the_first_admission(simulate: Simulate) -> None:
    """A hit of a later request counts, what a resume finds does not, and `prefix_cache: false` finds nothing."""
    _, _, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5], max_tokens: 3}
          - {step: 1, retract: A}
          - {step: 5, submit: B, prompt: [1, 2, 3, 4, 5], max_tokens: 1}
          - {step: 6, submit: C, prompt: [1, 2, 3, 4, 5], max_tokens: 1, prefix_cache: false}
        """
    )
    assert summary["cached_tokens"] == {"A": 0, "B": 4, "C": 0}


def test_restart_is_no_retraction_and_loses_results(simulate: Simulate) -> None:
    """The outstanding token is computed again; the holder misses the step of the restart and resumes cold in the next."""
    status, lines, summary = simulate(
        """
        page_size: 2
        overlap_depth: 1
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 3}
          - {step: 2, restart_runtime: true}
        """
    )
    assert status == 0
    assert [line["sampled"] for line in lines] == [{}, {"A": 20}, {}, {}, {"A": 104}, {"A": 629}]
    assert [[(op["cause"], op["num_computed"]) for op in line["ops"]] for line in lines] == [
        [("first_chunk", 0)],
        [("prefill_done_to_decode", 3)],
        [],
        [("resume", 0)],
        [("decode", 4)],
        [],
    ]
    assert (lines[2]["free"], lines[2]["cached"], lines[2]["mirror"]) == (16, 0, {})
    assert summary["retractions"] == {"A": 0}
    assert summary["outputs"] == {"A": [20, 104, 629]}


def test_priority_and_mixed_are_read(simulate: Simulate) -> None:
    """The keys of the file reach the policy."""
    _, lines, _ = simulate(
        """
        mixed: false
        events:
          - {step: 0, submit: A, prompt: [1], max_tokens: 2, priority: 1}
          - {step: 0, submit: B, prompt: [2], max_tokens: 2}
          - {step: 1, submit: C, prompt: [3], max_tokens: 1}
        """
    )
    assert [[op["request"] for op in line["ops"]] for line in lines] == [["B", "A"], ["C"], ["B", "A"]]


def test_pages_sent_counts_ids_on_the_wire(simulate: Simulate) -> None:
    """Whole rows of two refreshed ops and a tail of one id."""
    _, lines, summary = simulate("page_size: 2\nevents: [{step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 4}]")
    assert [(op["full_refresh"], op["size"], len(op["occupied_pages"])) for line in lines for op in line["ops"]] == [
        (True, 2, 2),
        (True, 0, 2),
        (False, 1, 3),
        (False, 0, 3),
    ]
    assert summary["pages_sent"] == 2 + 2 + 1 + 0
