"""`pagemirror simulate`: files, options and exit status, tables, and runs that go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_service import simulation
from scheduler_service.cli import app
from scheduler_service.scenario import parse_scenario
from scheduler_service.simulate import main
from scheduler_service.simulation import Simulation

Line = dict[str, Any]
Simulate = Callable[..., tuple[int, list[Line], Line]]


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


def test_a_file_is_named_as_it_was_given(
    worked_example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line and in the output a path reads the same, also one that could be written shorter."""
    monkeypatch.chdir(tmp_path)
    Path("case.yaml").write_text(worked_example, encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        app(["simulate", "--json", ".//case.yaml"])
    assert caught.value.code == 0
    assert {json.loads(line)["file"] for line in capsys.readouterr().out.splitlines()} == {".//case.yaml"}


def test_a_file_that_no_memory_holds_is_a_bad_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The status is that of a file that cannot be run, not of a violation, and the message says what was asked for."""
    path = tmp_path / "wide.yaml"
    path.write_text("max_rows: 1000000\nmax_pages_per_row: 2147483647\nevents: []\n", encoding="utf-8")
    assert main([path], json_output=True) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{path}: num_pages, page_size, max_rows, max_pages_per_row: no memory for 16 pages" in captured.err
    assert "1000000 rows of 2147483647 pages" in captured.err


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


def test_one_violated_file_makes_the_status_1(worked_example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later files run all the same."""
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("refresh_policy: tail_only\n" + worked_example, encoding="utf-8")
    right.write_text(worked_example, encoding="utf-8")
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


def test_policy_of_the_call_overrides_the_files(worked_example: str, simulate: Simulate) -> None:
    """A file that asks for the broken policy runs right when told to."""
    status, _, summary = simulate("refresh_policy: tail_only\n" + worked_example, "diff")
    assert (status, summary["violations"]) == (0, [])


@pytest.mark.parametrize(("policy", "status", "verdict"), [(None, 0, "ok: 3 steps"), ("tail_only", 1, "violated: 3 steps")])
def test_tables_for_people(
    worked_example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str | None, status: int, verdict: str
) -> None:
    """Without --json the same run is a table with rows, mirror, verdict and violations."""
    path = tmp_path / "case.yaml"
    path.write_text(worked_example, encoding="utf-8")
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
