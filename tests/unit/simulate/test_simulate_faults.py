"""`pagemirror simulate`: events that a server records: failures, results handed back one by one, smaller steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]


def computed(line: Line) -> dict[str, int]:
    """Tokens that each request computes in a step."""
    return {op["request"]: op["input_len"] for op in line["ops"]}


def test_failed_request_ends_alone(simulate: Simulate) -> None:
    """It ends in its step with what it has returned, and publishes nothing."""
    status, lines, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 9}
          - {step: 0, submit: B, prompt: [4, 5, 6], max_tokens: 2}
          - {step: 1, fail: A}
          - {step: 1, fail: nobody}
        """
    )
    assert status == 0
    assert lines[1]["ended"] == {"A": "failed", "B": "length"}
    assert summary["outputs"]["A"] == [20]
    assert (lines[1]["cached"], lines[1]["private"]) == (2, 0)  # those of B


def test_twice_failed_step_runs_its_requests_alone(simulate: Simulate) -> None:
    """After two failures both are suspects: A runs alone to its end, then B does."""
    status, lines, summary = simulate(
        """
        results: by_event
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 2}
          - {step: 0, submit: B, prompt: [4], max_tokens: 2}
          - {step: 1, step_failed: 1}
          - {step: 1, restart_runtime: true}
          - {step: 3, step_failed: 1}
          - {step: 3, restart_runtime: true}
        """
    )
    assert status == 0
    steps = [[op["request"] for op in line["ops"]] for line in lines]
    assert steps[:8] == [["A", "B"], [], ["A", "B"], [], ["A"], ["A"], ["B"], ["B"]]
    assert summary["finish"] == {"A": "length", "B": "length"}
    assert summary["retractions"] == {"A": 0, "B": 0}


def test_request_that_fails_alone_ends(simulate: Simulate) -> None:
    """The third failed step in which A was, alone by then, ends it; B goes on, and an op that is not there cannot fail."""
    status, _, summary = simulate(
        """
        results: by_event
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 2}
          - {step: 0, submit: B, prompt: [4], max_tokens: 2}
          - {step: 0, step_failed: 1}
          - {step: 1, step_failed: 1, rows: [1]}
          - {step: 1, restart_runtime: true}
          - {step: 3, step_failed: 1, rows: [1]}
          - {step: 3, restart_runtime: true}
          - {step: 5, step_failed: 2}
          - {step: 5, step_failed: 1}
          - {step: 5, restart_runtime: true}
        """
    )
    assert status == 0
    assert summary["finish"] == {"A": "failed", "B": "length"}
    assert summary["outputs"] == {"A": [], "B": [5, 17]}


def test_forced_cache_reset_retracts_its_users(simulate: Simulate) -> None:
    """The cache is empty in that step; the holder resumes in a later one, cold, and returns the right tokens."""
    status, lines, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 4}
          - {step: 2, reset_prefix_cache: true, force: true}
        """
    )
    assert status == 0
    assert (lines[2]["ops"], lines[2]["cached"], lines[2]["free"]) == ([], 0, 16)
    assert [(op["cause"], op["num_computed"]) for op in lines[3]["ops"]] == [("resume", 0)]
    assert summary["outputs"]["A"] == [20, 104, 629, 421]
    assert summary["retractions"]["A"] == 1


def test_namespaces_share_nothing(simulate: Simulate) -> None:
    """B of the same namespace hits A's pages, C of another one does not."""
    _, _, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 1, namespace: one}
          - {step: 1, submit: B, prompt: [1, 2, 3], max_tokens: 1, namespace: one}
          - {step: 1, submit: C, prompt: [1, 2, 3], max_tokens: 1, namespace: two}
        """
    )
    assert summary["cached_tokens"] == {"A": 0, "B": 2, "C": 0}


def test_output_comes_in_place_of_the_models(simulate: Simulate) -> None:
    """The tokens that are named come first, across a retraction, then the model's own go on from them; they are published."""
    status, _, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 4, output: [5, 6]}
          - {step: 1, retract: A}
          - {step: 9, submit: B, prompt: [1, 2, 3, 5, 6], max_tokens: 1}
          - {step: 9, submit: C, prompt: [1, 2, 3], max_tokens: 9, output: [5, 7, 8], eos: [7]}
        """
    )
    tokens = [1, 2, 3, 5, 6]
    for _ in range(2):
        tokens.append(sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % 997)
    assert status == 0
    assert summary["outputs"] == {"A": tokens[3:], "B": [tokens[5]], "C": [5, 7]}
    assert summary["cached_tokens"]["B"] == 4
    assert summary["finish"]["C"] == "stop"


def test_wrong_read_shows_in_a_given_output_too(simulate: Simulate) -> None:
    """Tokens that are given do not hide a stale mirror: the model is shifted, not replaced."""
    text = """
        page_size: 4
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7], max_tokens: 3, output: [8, 8, 8]}
          - {step: 0, submit: B, prompt: [1, 2, 3, 4, 9], max_tokens: 1}
          - {step: 1, retract: A}
        """
    status, _, summary = simulate(text)
    assert (status, summary["outputs"]["A"]) == (0, [8, 8, 8])
    status, _, summary = simulate(text, "tail_only")
    assert status == 1
    assert summary["outputs"]["A"] != [8, 8, 8]


def test_budget_may_shrink_and_grow(simulate: Simulate) -> None:
    """From the step of the event on; never above the file's own."""
    _, lines, _ = simulate(
        """
        token_budget: 8
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], max_tokens: 1}
          - {step: 1, token_budget: 3}
          - {step: 2, token_budget: 8}
        """
    )
    assert [computed(line) for line in lines] == [{"A": 8}, {"A": 3}, {"A": 5}]


def test_flushed_releases_are_a_step_of_their_own(simulate: Simulate) -> None:
    """Rows given back are told at once; the op that follows has nothing to release, and without any there is no op."""
    status, lines, summary = simulate(
        """
        events:
          - {step: 0, submit: A, prompt: [1], max_tokens: 1}
          - {step: 1, flush_releases: true}
          - {step: 1, flush_releases: true}
          - {step: 2, submit: B, prompt: [1, 2, 3], max_tokens: 1}
        """
    )
    assert status == 0
    assert [len(line["ops"]) for line in lines] == [1, 0, 1]
    assert summary["outputs"]["B"] == [20]


# Results by event


def test_results_by_event(simulate: Simulate) -> None:
    """A result is handed back when the file says so: here two steps late, then both at once."""
    status, lines, summary = simulate(
        """
        overlap_depth: 2
        results: by_event
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 5}
          - {step: 3, complete: 3}
          - {step: 4, complete: 1, until: 5}
        """
    )
    assert status == 0
    assert [line["sampled"] for line in lines[:6]] == [{}, {}, {}, {"A": 629}, {"A": 421}, {"A": 384}]
    assert [len(line["ops"]) for line in lines] == [1, 1, 1, 1, 1, 0]
    assert summary["outputs"]["A"] == [20, 104, 629, 421, 384]


def test_too_few_complete_events_cannot_stop_a_run(simulate: Simulate) -> None:
    """At most overlap_depth results are outstanding before a step, and all come when nothing else can happen."""
    status, lines, summary = simulate(
        """
        overlap_depth: 1
        results: by_event
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 3}
        """
    )
    assert status == 0
    assert [line["sampled"] for line in lines] == [{}, {}, {"A": 20}, {"A": 629}]  # 104 came in the last step as well
    assert summary["outputs"] == {"A": [20, 104, 629]}


def test_complete_with_nothing_in_flight_does_nothing(simulate: Simulate) -> None:
    """More results than there are cannot be handed back."""
    status, _, summary = simulate(
        """
        results: by_event
        events:
          - {step: 0, complete: 5, until: 20}
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 2}
        """
    )
    assert status == 0
    assert (summary["outputs"]["A"], summary["lines"]) == ([20, 104], 21)
