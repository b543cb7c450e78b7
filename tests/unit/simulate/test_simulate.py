"""`pagemirror simulate`: the lines of a run, by the meaning that docs/scenario-files.md gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]


def _op(
    request: str, cause: str, row: int, span: tuple[int, int], *, full: bool, pages: list[int], tokens: tuple[int, int]
) -> Line:
    return {
        "request": request,
        "cause": cause,
        "row": row,
        "begin": span[0],
        "size": span[1],
        "full_refresh": full,
        "occupied_pages": pages,
        "num_computed": tokens[0],
        "input_len": tokens[1],
    }


# The worked example, line by line


def test_worked_example(worked_example: str, simulate: Simulate) -> None:
    """Every value of every line, as the design spells them out."""
    status, lines, summary = simulate(worked_example)
    assert status == 0
    assert lines == [
        {
            "step": 0,
            "ops": [
                _op("A", "first_chunk", 1, (0, 2), full=True, pages=[1, 2], tokens=(0, 7)),
                _op("B", "first_chunk", 2, (0, 2), full=True, pages=[3, 4], tokens=(0, 5)),
            ],
            "mirror": {"A": [1, 2]},
            "rows": {"A": [1, 2]},
            "sampled": {"A": 168, "B": 90},
            "ended": {"B": "length"},
            "free": 13,
            "cached": 1,
            "private": 2,
        },
        {
            "step": 1,
            "ops": [],
            "mirror": {},
            "rows": {},
            "sampled": {},
            "ended": {},
            "free": 15,
            "cached": 1,
            "private": 0,
        },
        {
            "step": 2,
            "ops": [_op("A", "resume", 1, (0, 2), full=True, pages=[3, 2], tokens=(4, 4))],
            "mirror": {"A": [3, 2]},
            "rows": {"A": [3, 2]},
            "sampled": {"A": 523},
            "ended": {},
            "free": 14,
            "cached": 1,
            "private": 1,
        },
        {
            "step": 3,
            "ops": [_op("A", "decode", 1, (2, 1), full=False, pages=[3, 2, 1], tokens=(8, 1))],
            "mirror": {},
            "rows": {},
            "sampled": {"A": 254},
            "ended": {"A": "length"},
            "free": 14,
            "cached": 2,
            "private": 0,
        },
    ]
    assert summary == {
        "outputs": {"A": [168, 523, 254], "B": [90]},
        "cached_tokens": {"A": 0, "B": 0},
        "finish": {"A": "length", "B": "length"},
        "retractions": {"A": 1, "B": 0},
        "steps": 3,
        "lines": 4,
        "pages_sent": 7,
        "violations": [],
    }


def test_worked_example_with_tails_only(worked_example: str, simulate: Simulate) -> None:
    """The broken policy: the mirror reads [1, 2] and then [1, 2, 1], A samples 776, and the aliased page is named."""
    status, lines, summary = simulate(worked_example, "tail_only")
    assert status == 1
    assert lines[2]["ops"] == [_op("A", "resume", 1, (2, 0), full=False, pages=[3, 2], tokens=(4, 4))]
    assert (lines[2]["mirror"], lines[2]["rows"]) == ({"A": [1, 2]}, {"A": [3, 2]})
    assert lines[3]["ops"] == [_op("A", "decode", 1, (2, 1), full=False, pages=[3, 2, 1], tokens=(8, 1))]
    assert lines[3]["sampled"] == {"A": 776}
    assert summary["outputs"]["A"] == [168, 523, 776]
    assert any("page 1 is aliased by logical pages 0 and 2" in violation for violation in summary["violations"])
    assert any("mirror row [1, 2, 1] is not the scheduler's row [3, 2, 1]" in violation for violation in summary["violations"])
    assert any("sampled 776, its own tokens give 254" in violation for violation in summary["violations"])


@pytest.mark.parametrize(("policy", "pages_sent"), [("transition", 7), ("diff", 7), ("always", 9)])
def test_right_policies_differ_in_bytes(worked_example: str, simulate: Simulate, policy: str, pages_sent: int) -> None:
    """Rows and tokens are the same; what is sent is not."""
    status, lines, summary = simulate(worked_example, policy)
    assert (status, summary["outputs"]["A"], summary["pages_sent"]) == (0, [168, 523, 254], pages_sent)
    assert lines[3]["ops"][0]["full_refresh"] is (policy == "always")


# The order within a step


def test_events_come_before_the_plan(simulate: Simulate) -> None:
    """A request submitted in step 2 is in the op of step 2; empty lines before it count as lines, not as steps."""
    _, lines, summary = simulate("events: [{step: 2, submit: A, prompt: [1, 2, 3], max_tokens: 1}]")
    assert [len(line["ops"]) for line in lines] == [0, 0, 1]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert (summary["steps"], summary["lines"]) == (1, 3)


def test_events_of_one_step_are_applied_in_file_order(simulate: Simulate) -> None:
    """Submission and abort in one step: only the order in the file says whether the abort finds the request."""
    submit, abort = "{step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 1}", "{step: 0, abort: A}"
    _, _, summary = simulate(f"events: [{submit}, {abort}]")
    assert summary["finish"] == {"A": "abort"}
    _, _, summary = simulate(f"events: [{abort}, {submit}]")
    assert summary["finish"] == {"A": "length"}


def test_events_need_not_be_sorted(simulate: Simulate) -> None:
    """Steps decide between events of different steps."""
    _, lines, _ = simulate(
        """
        events:
          - {step: 1, submit: B, prompt: [4], max_tokens: 1}
          - {step: 0, submit: A, prompt: [1], max_tokens: 1}
        """
    )
    assert [line["ops"][0]["request"] for line in lines] == ["A", "B"]


def test_ended_of_an_abort_is_in_its_own_step(simulate: Simulate) -> None:
    """An abort in step 2 is told in line 2, and no op of that step has the request."""
    _, lines, summary = simulate(
        """
        page_size: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 9}
          - {step: 2, abort: A}
        """
    )
    assert [line["ended"] for line in lines] == [{}, {}, {"A": "abort"}]
    assert [len(line["ops"]) for line in lines] == [1, 1, 0]
    assert (summary["finish"], summary["outputs"]) == ({"A": "abort"}, {"A": [20, 104]})
    assert (lines[2]["free"], lines[2]["cached"], lines[2]["private"]) == (14, 2, 0)


@pytest.mark.parametrize("overlap_depth", [0, 1, 2])
def test_results_come_overlap_depth_steps_later(simulate: Simulate, overlap_depth: int) -> None:
    """Step s samples what step s - overlap_depth computed, and the last lines only wait."""
    _, lines, summary = simulate(
        f"""
        overlap_depth: {overlap_depth}
        events: [{{step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 4}}]
        """
    )
    waiting = [{}] * overlap_depth
    assert [line["sampled"] for line in lines] == [*waiting, {"A": 20}, {"A": 104}, {"A": 629}, {"A": 421}]
    assert [len(line["ops"]) for line in lines] == [1, 1, 1, 1] + [0] * overlap_depth
    assert lines[-1]["ended"] == {"A": "length"}
    assert (summary["steps"], summary["lines"]) == (4, 4 + overlap_depth)


def test_step_with_nothing_planned_counts_in_the_delay(simulate: Simulate) -> None:
    """Lines go on to the last result, also when its request is over."""
    _, lines, summary = simulate(
        """
        overlap_depth: 2
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 6, eos: [20]}
        """
    )
    assert [line["sampled"] for line in lines] == [{}, {}, {"A": 20}, {}, {}]
    assert [len(line["ops"]) for line in lines] == [1, 1, 1, 0, 0]
    assert summary["finish"] == {"A": "stop"}


def test_retracted_request_resumes_a_step_later_at_the_earliest(simulate: Simulate) -> None:
    """The step of the retraction has no op for it, the next one resumes it."""
    _, lines, summary = simulate(
        """
        events:
          - {step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 3}
          - {step: 1, retract: A}
        """
    )
    assert [[op["cause"] for op in line["ops"]] for line in lines] == [["first_chunk"], [], ["resume"], ["decode"]]
    assert summary["retractions"] == {"A": 1}


def test_mirror_and_rows_are_of_the_end_of_the_step(simulate: Simulate) -> None:
    """A request that ended in the step has no row any more, though it had one in the op."""
    _, lines, _ = simulate("events: [{step: 0, submit: A, prompt: [1, 2, 3], max_tokens: 1}]")
    assert lines[0]["ops"][0]["occupied_pages"] == [1]
    assert (lines[0]["mirror"], lines[0]["rows"]) == ({}, {})
