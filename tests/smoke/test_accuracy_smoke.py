"""The accuracy smoke: a short run of the whole thing, and what its gate lets through. `make smoke` asks all questions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

NUM_QUESTIONS = 8


@pytest.fixture(scope="module")
def quiz_module(project_root: Path) -> ModuleType:
    pytest.importorskip("tokenizers", reason="prompts as text need the extra `text`")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(project_root / "tools")
        import accuracy_quiz

    return accuracy_quiz


@pytest.mark.timeout(240)  # three starts of a real model, on a machine that may be doing other things
def test_answers_survive_page_pressure(project_root: Path, child_env: dict[str, str], tmp_path: Path) -> None:
    """The first questions through both processes: the gate holds, rows were really lost, texts stay as they were."""
    if not (project_root / "models" / "smollm2-135m-instruct" / "model.safetensors").is_file():
        pytest.skip("models/smollm2-135m-instruct is not there: run `make model`")
    file = tmp_path / "report.json"
    command = [sys.executable, "tools/accuracy_smoke.py", "--limit", str(NUM_QUESTIONS), "--json", str(file)]
    done = subprocess.run(command, cwd=project_root, env=child_env, capture_output=True, text=True, check=False, timeout=220)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.endswith("gate: passed\n")
    report = json.loads(file.read_text())
    assert report["num_questions"] == len(report["questions"]) == NUM_QUESTIONS
    assert report["gate"] == {"min_alone": 0.6, "min_share_of_alone": 0.75, "passed": True, "problems": []}
    alone, pressure, tail_only = (report["columns"][name] for name in ("alone", "transition", "tail_only"))
    assert alone["retractions"] == 0
    assert 0 < pressure["forced_retractions"] < pressure["retractions"]
    # A near tie may fall the other way after a resume; most texts must not change at all.
    assert pressure["same_text_as_alone"] >= NUM_QUESTIONS - 2
    # The broken policy was at work: the mirror differed from the scheduler, and texts with it.
    assert tail_only["stale_rows"] > 0
    assert tail_only["same_text_as_alone"] < NUM_QUESTIONS


def test_all_questions_are_usable(project_root: Path, quiz_module: ModuleType) -> None:
    """Forty different questions, no answer given away by its own question, every one with an accepted answer."""
    content = quiz_module.load_questions(project_root / "tests" / "smoke" / "questions.yaml")
    asked = [entry["ask"] for entry in content["questions"]]
    assert len(asked) == len(set(asked)) == 40
    for entry in content["questions"]:
        assert entry["accept"]
        assert all(isinstance(answer, str) and answer for answer in entry["accept"])
        question = quiz_module.Question(entry["ask"], entry["accept"], [])
        assert not question.is_answered_by(entry["ask"]), entry["ask"]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("The capital of France is Paris.", True),
        ("PARIS", True),
        ("It is in the Parisian region.", False),
        ("A comparison", False),
        ("", False),
    ],
)
def test_answers_count_as_whole_words(quiz_module: ModuleType, text: str, is_right: bool) -> None:
    """An accepted answer counts in any case, but not as part of a longer word."""
    assert quiz_module.Question("?", ["Paris"], []).is_answered_by(text) is is_right


@pytest.mark.parametrize(
    ("num_right", "retractions", "problem"),
    [
        ((6, 5), (3, 2), None),
        ((8, 6), (3, 2), None),  # exactly three quarters
        ((8, 5), (3, 2), "under pressure 0.500 of the answers are right, below 0.75 x alone = 0.600"),
        ((5, 5), (3, 2), "served alone 0.500 of the answers are right, below 0.6"),
        ((8, 8), (2, 2), "no pressure: 2 retractions, 2 of them by request"),
        ((8, 8), (2, 0), "no pressure: 2 retractions, 0 of them by request"),
    ],
)
def test_gate(quiz_module: ModuleType, num_right: tuple[int, int], retractions: tuple[int, int], problem: str | None) -> None:
    """The gate names what fails: too few right alone, too few under pressure, or no pressure to speak of."""

    def column(right: int, total_retractions: int, forced: int) -> object:
        replies = [quiz_module.Reply("", number < right, total_retractions if number == 0 else 0) for number in range(10)]
        return quiz_module.Column(replies, forced)

    columns = {"alone": column(num_right[0], 0, 0), "transition": column(num_right[1], *retractions)}
    problems = quiz_module.judge(columns)
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert problems[0].startswith(problem)
