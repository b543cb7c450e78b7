"""The files in examples/ do what their comments say, and the picture in the documentation shows what the simulator prints."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

Line = dict[str, Any]
ANSWERS: dict[str, dict[str, list[int]]] = {
    "worked_example": {"A": [168, 523, 254], "B": [90]},
    "pressure": {"A": [20, 104, 629, 421, 384, 473, 751, 295], "B": [38, 194, 172, 213, 714, 452, 541, 976]},
}


def _fingerprints(prompt: Sequence[int], count: int) -> list[int]:
    """The fingerprint model's tokens by its definition."""
    known = list(prompt)
    for _ in range(count):
        known.append(sum((i + 1) * (token + 1) for i, token in enumerate(known)) % 997)
    return known[len(prompt) :]


def _simulate(names: Sequence[str], root: Path, env: dict[str, str], *options: str) -> tuple[int, dict[str, list[Line]]]:
    """Exit status, and per example the lines that `pagemirror simulate --json` prints; the last of each is its summary."""
    paths = [f"examples/{name}.yaml" for name in names]
    command = [str(Path(sys.executable).with_name("pagemirror")), "simulate", "--json", *options, *paths]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr == "" or done.returncode != 2, done.stderr
    lines: dict[str, list[Line]] = {name: [] for name in names}
    for text in done.stdout.splitlines():
        line = json.loads(text)
        lines[Path(line["file"]).stem].append(line)
    return done.returncode, lines


@pytest.fixture(scope="module")
def names(project_root: Path) -> list[str]:
    """Every scenario file's name without its ending."""
    return sorted(path.stem for path in (project_root / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def runs(names: list[str], project_root: Path, child_env: dict[str, str]) -> dict[str, list[Line]]:
    """All scenario files, run as they are."""
    status, lines = _simulate(names, project_root, child_env)
    assert status == 0
    return lines


def _steps(lines: list[Line]) -> list[Line]:
    return lines[:-1]


def _rows(lines: list[Line], request: str) -> list[list[int]]:
    """A request's row after each step in which it held one."""
    return [line["rows"][request] for line in _steps(lines) if request in line["rows"]]


def _op(line: Line, request: str) -> Line:
    (op,) = (op for op in line["ops"] if op["request"] == request)
    return op


def test_every_output_is_the_definition(names: list[str], runs: dict[str, list[Line]], project_root: Path) -> None:
    """Whatever happens in a scenario, each request says a beginning of what it says alone, and nothing is violated."""
    for name in names:
        summary = runs[name][-1]["summary"]
        assert summary["violations"] == [], name
        events = yaml.safe_load((project_root / "examples" / f"{name}.yaml").read_text())["events"]
        prompts = {event["submit"]: event["prompt"] for event in events if "submit" in event}
        assert set(summary["finish"]) == set(prompts)
        for request, output in summary["outputs"].items():
            assert output == _fingerprints(prompts[request], len(output)), (name, request)
        for request, output in ANSWERS.get(name, {}).items():
            assert summary["outputs"][request] == output


def test_worked_example_flips_with_nothing_appended(runs: dict[str, list[Line]]) -> None:
    """A goes from [1, 2] to [3, 2] to [3, 2, 1], and the flip carries the bit."""
    lines = runs["worked_example"]
    assert [line["rows"].get("A") for line in _steps(lines)][:3] == [[1, 2], None, [3, 2]]
    assert _op(lines[3], "A")["occupied_pages"] == [3, 2, 1]
    assert _op(lines[2], "A") == {
        "request": "A",
        "cause": "resume",
        "row": _op(lines[2], "A")["row"],
        "begin": 0,
        "size": 2,
        "full_refresh": True,
        "occupied_pages": [3, 2],
        "num_computed": 4,
        "input_len": 4,
    }


def test_worked_example_goes_wrong_with_tails_only(
    runs: dict[str, list[Line]], project_root: Path, child_env: dict[str, str]
) -> None:
    """The broken policy samples 776, exits with 1, and the violations name the page that is in the row twice."""
    status, lines = _simulate(["worked_example"], project_root, child_env, "--refresh-policy", "tail_only")
    assert status == 1
    broken = lines["worked_example"]
    assert [line["mirror"].get("A") for line in _steps(broken)][2] == [1, 2]
    assert broken[3]["sampled"]["A"] == 776
    assert any("page 1" in violation for violation in broken[-1]["summary"]["violations"])


def test_picture_shows_what_the_simulator_prints(
    runs: dict[str, list[Line]], project_root: Path, child_env: dict[str, str]
) -> None:
    """The rows in docs/images/worked-example.svg are those of the run, on both sides."""
    spec = importlib.util.spec_from_file_location("draw_page_rows", project_root / "tools/draw_page_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_page_rows"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    _, broken = _simulate(["worked_example"], project_root, child_env, "--refresh-policy", "tail_only")
    for moment in module.MOMENTS:
        right, wrong = runs["worked_example"][moment.step], broken["worked_example"][moment.step]
        if moment.step < 3:
            assert tuple(right["rows"].get("A", ())) == moment.row
            assert tuple(right["mirror"].get("A", ())) == moment.refreshed
            assert tuple(wrong["mirror"].get("A", ())) == moment.tail_only
        else:  # A ended in this step and holds no row at its end
            assert tuple(_op(right, "A")["occupied_pages"]) == moment.row == moment.refreshed


def test_twins_adopt_with_size_zero(runs: dict[str, list[Line]]) -> None:
    """B's two duplicate pages are replaced in a step that appends nothing, and come back as both fourth pages."""
    lines = runs["twins"]
    assert [line["rows"] for line in _steps(lines)][:3] == [
        {"A": [1, 2, 3], "B": [4, 5, 6]},
        {"A": [1, 2, 3], "B": [1, 2, 6]},
        {"A": [1, 2, 3], "B": [1, 2, 6]},
    ]
    flip = _op(lines[1], "B")
    assert (flip["begin"], flip["size"], flip["full_refresh"]) == (3, 0, True)
    assert (_op(lines[2], "B")["size"], _op(lines[2], "B")["full_refresh"]) == (0, False)
    assert _op(lines[3], "A")["occupied_pages"] == [1, 2, 3, 5]
    assert _op(lines[3], "B")["occupied_pages"] == [1, 2, 6, 4]


def test_chunked_twins_change_the_first_owner(runs: dict[str, list[Line]]) -> None:
    """The request that was admitted first repoints its logical page 0 to the copy that the second one published."""
    lines = runs["chunked_twins"]
    assert _rows(lines, "A")[:3] == [[1, 2, 3], [1, 2, 3], [4, 2, 3, 1]]
    assert _rows(lines, "B")[:3] == [[4], [4, 5, 6], [4, 2, 3, 6]]
    assert _op(lines[2], "A")["full_refresh"] is True


def test_pressure_retracts_once(runs: dict[str, list[Line]]) -> None:
    """The younger request loses its row once, the older one never."""
    summary = runs["pressure"][-1]["summary"]
    assert summary["retractions"] == {"A": 0, "B": 1}
    assert summary["finish"] == {"A": "length", "B": "length"}
    assert summary["steps"] == 12


def test_overlap_drops_what_comes_after_the_stop_token(runs: dict[str, list[Line]]) -> None:
    """A ends by its stop token although two more steps were on their way; B resumes after its own late tokens."""
    summary = runs["overlap"][-1]["summary"]
    assert summary["outputs"]["A"] == [20, 104, 629]
    assert summary["finish"] == {"A": "stop", "B": "length"}
    assert len(summary["outputs"]["B"]) == 6
    assert summary["retractions"]["B"] == 1


def test_restart_is_a_pause(runs: dict[str, list[Line]]) -> None:
    """Losing the runtime costs steps, no tokens, and is not counted as a retraction."""
    summary = runs["restart"][-1]["summary"]
    assert {request: len(output) for request, output in summary["outputs"].items()} == {"A": 6, "B": 6}
    assert summary["retractions"] == {"A": 0, "B": 0}


def test_capacity_cuts_and_refuses(runs: dict[str, list[Line]]) -> None:
    """The pool alone ends A, C is refused by name, D is over before it ran."""
    summary = runs["capacity"][-1]["summary"]
    assert summary["finish"] == {"A": "capacity", "B": "length", "C": "refused:INVALID_ARGUMENT", "D": "abort"}
    assert {request: len(output) for request, output in summary["outputs"].items() if output} == {"A": 3, "B": 2}


def test_prefix_cache_hits_and_resets(runs: dict[str, list[Line]]) -> None:
    """A whole hit leaves a page to compute; a reset in use is refused, a later one is not."""
    lines = runs["prefix_cache"]
    assert lines[-1]["summary"]["cached_tokens"] == {"A": 0, "B": 4, "C": 8, "D": 0, "E": 0}
    assert [line["step"] for line in _steps(lines) if "refused" in line] == [3]
    assert lines[3]["refused"] == ["reset_prefix_cache:FAILED_PRECONDITION"]
    assert lines[6]["cached"] == 0


def test_embedding_example_runs(project_root: Path, child_env: dict[str, str]) -> None:
    """The library example prints the same tokens as the simulator, with a toy in place of the runtime."""
    command = [sys.executable, "examples/embed_scheduler.py"]
    done = subprocess.run(command, cwd=project_root, env=child_env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "second: [90] (length), cached 0",
        "first: [168, 523, 254] (length), cached 0",
        "third: [112, 903] (length), cached 4",
    ]
