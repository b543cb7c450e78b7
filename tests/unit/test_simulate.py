"""`pagemirror simulate`: lines, summary and exit status, by the meaning that docs/scenario-files.md gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from scheduler_service import simulation
from scheduler_service.scenario import parse_scenario
from scheduler_service.simulate import main
from scheduler_service.simulation import Simulation

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]

_WORKED_EXAMPLE = """
    page_size: 4
    events:
      - {step: 0, submit: A, prompt: [1, 2, 3, 4, 5, 6, 7], max_tokens: 3}
      - {step: 0, submit: B, prompt: [1, 2, 3, 4, 9], max_tokens: 1}
      - {step: 1, retract: A}
    """


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Run one scenario text with --json; returns the exit status, the step lines without `file`, and the summary."""

    def run(text: str, policy: str | None = None) -> tuple[int, list[Line], Line]:
        path = tmp_path / "case.yaml"
        path.write_text(dedent(text), encoding="utf-8")
        status = main([path], policy, json_output=True)
        captured = capsys.readouterr()
        assert captured.err == ""
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert {line.pop("file") for line in lines} == {str(path)}
        return status, lines[:-1], lines[-1]["summary"]

    return run


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


def test_worked_example(simulate: Simulate) -> None:
    """Every value of every line, as the design spells them out."""
    status, lines, summary = simulate(_WORKED_EXAMPLE)
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


def test_worked_example_with_tails_only(simulate: Simulate) -> None:
    """The broken policy: the mirror reads [1, 2] and then [1, 2, 1], A samples 776, and the aliased page is named."""
    status, lines, summary = simulate(_WORKED_EXAMPLE, "tail_only")
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
def test_right_policies_differ_in_bytes(simulate: Simulate, policy: str, pages_sent: int) -> None:
    """Rows and tokens are the same; what is sent is not."""
    status, lines, summary = simulate(_WORKED_EXAMPLE, policy)
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


# Events without an effect, refusals


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


# Several files, bad files, options


def test_several_files_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file's lines name it as it was given, and its summary comes before the next one's first line."""
    names = []
    for name, prompt in (("b.yaml", "[1]"), ("a.yaml", "[2]")):
        path = tmp_path / name
        path.write_text(f"events: [{{step: 0, submit: A, prompt: {prompt}, max_tokens: 1}}]", encoding="utf-8")
        names.append(str(path))
    assert main([Path(name) for name in names], json_output=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["file"], "summary" in line) for line in lines] == [
        (names[0], False),
        (names[0], True),
        (names[1], False),
        (names[1], True),
    ]


def test_any_bad_file_keeps_all_from_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every bad file is reported on stderr, nothing is printed on stdout, the status is 2."""
    good, bad, missing = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "missing.yaml"
    good.write_text("events: []\n", encoding="utf-8")
    bad.write_text("events: []\npage_size: 0\n", encoding="utf-8")
    assert main([good, bad, missing], json_output=True) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"error: {bad}:2: page_size: is 0, but must be an integer from 1 to 2147483647",
        f"error: {missing}: cannot be read: No such file or directory",
    ]


def test_one_violated_file_makes_the_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later files run all the same."""
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("refresh_policy: tail_only\n" + dedent(_WORKED_EXAMPLE), encoding="utf-8")
    right.write_text(dedent(_WORKED_EXAMPLE), encoding="utf-8")
    assert main([wrong, right], json_output=True) == 1
    summaries = [line["summary"] for line in map(json.loads, capsys.readouterr().out.splitlines()) if "summary" in line]
    assert [bool(summary["violations"]) for summary in summaries] == [True, False]


def test_unknown_policy_is_a_bad_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the value and the choices; nothing runs."""
    path = tmp_path / "ok.yaml"
    path.write_text("events: []\n", encoding="utf-8")
    assert main([path], "never") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: --refresh-policy is 'never', but must be one of transition, diff, always, tail_only\n"


def test_policy_of_the_call_overrides_the_files(simulate: Simulate) -> None:
    """A file that asks for the broken policy runs right when told to."""
    status, _, summary = simulate("refresh_policy: tail_only\n" + dedent(_WORKED_EXAMPLE), "diff")
    assert (status, summary["violations"]) == (0, [])


@pytest.mark.parametrize(("policy", "status", "verdict"), [(None, 0, "ok: 3 steps"), ("tail_only", 1, "violated: 3 steps")])
def test_tables_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str | None, status: int, verdict: str
) -> None:
    """Without --json the same run is a table with rows, mirror, verdict and violations."""
    path = tmp_path / "case.yaml"
    path.write_text(dedent(_WORKED_EXAMPLE), encoding="utf-8")
    assert main([path], policy) == status
    text = capsys.readouterr().out
    assert verdict in text
    assert ("[3, 2, 1]" in text, "168" in text) == (True, True)
    assert ("aliased" in text) == (status == 1)


def test_run_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of steps the run ends with a violation instead of going on for ever."""
    monkeypatch.setattr(simulation, "MAX_IDLE_STEPS", 2)
    run = Simulation(parse_scenario("overlap_depth: 1\nevents: [{step: 0, submit: A, prompt: [1], max_tokens: 3}]", "x"))
    monkeypatch.setattr(run.scheduler, "complete", lambda _: None)
    lines = 0
    while run.step() is not None:
        lines += 1
    assert lines == run.summary.lines == 1 + 2 + 3
    assert run.summary.violations[-1] == "no progress: the run has not ended after 6 steps"


def test_contradiction_of_the_core_is_a_violation_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error of the scheduler ends the run with its text, and the line of its step is printed."""
    run = Simulation(parse_scenario("events: [{step: 0, submit: A, prompt: [1], max_tokens: 3}]", "x"))
    run.scheduler.placement.pool.take(16)
    line = run.step()
    assert line is not None
    assert line.ops == []
    assert run.step() is None
    assert any("the scheduler gave up: nothing was planned" in violation for violation in run.summary.violations)


def test_page_of_another_request_in_the_mirror_is_named() -> None:
    """A mirror row that reads another request's page says whose it is."""
    submits = "".join(f"  - {{step: 0, submit: {name}, prompt: [1], max_tokens: 4}}\n" for name in "AB")
    run = Simulation(parse_scenario(f"events:\n{submits}", "x"))
    run.step()
    run.step()
    run.runtime.mirror.table[1, 0] = 2
    assert run.summary.violations == []
    run.step()
    text = " ".join(run.summary.violations)
    assert "request A: mirror row [2] is not the scheduler's row [1]; logical page 0 reads page 2" in text
    assert "page 2 belongs to request B" in text
