"""What a dump says: labels in place of tokens, a comment for people, and a file that nobody else reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import InvariantViolation
from scheduler_service.core.ops import StepResult
from scheduler_service.dump import LABEL_STRIDE, NUM_LABELS, STOP_LABEL, PageLabels, dump_failure, dump_text
from scheduler_service.recorder import RecordingScheduler
from scheduler_service.scenario import parse_scenario
from scheduler_service.scenario_events import Submit

# Labels


def test_labels_keep_what_is_equal_and_what_is_not() -> None:
    """Pages get equal labels where they and all before them are equal, and different ones everywhere else."""
    rng = np.random.default_rng(1)
    size, labels = 2, PageLabels(2)
    prompts = [rng.integers(0, 3, int(rng.integers(1, 9))).astype(np.int32) + 50_000 for _ in range(200)]
    made = [labels.label(prompt) for prompt in prompts]
    for prompt, new in zip(prompts, made, strict=True):
        assert len(new) == len(prompt)
        assert all(0 <= label < STOP_LABEL for label in new)
        for other, other_new in zip(prompts, made, strict=True):
            for end in range(size, min(len(prompt), len(other)) + 1, size):
                assert (new[:end] == other_new[:end]) == (prompt[:end].tolist() == other[:end].tolist())


def test_labels_do_not_run_out() -> None:
    """A page's number is spread over its tokens, so more pages than labels may follow the same one."""
    labels = PageLabels(2)
    made = {tuple(labels.label(np.array([i, i], dtype=np.int32))) for i in range(3 * NUM_LABELS)}
    assert len(made) == 3 * NUM_LABELS
    assert labels.label(np.array([NUM_LABELS + 4, NUM_LABELS + 4], dtype=np.int32)) == [4, 1 + LABEL_STRIDE]


def test_nothing_said_is_in_the_dump() -> None:
    """Token ids of a real model do not appear; a stop token is the one label that stops."""
    config = SchedulerConfig(page_size=2, num_pages=64, max_rows=4, max_pages_per_row=16, vocab_size=50_000, overlap_depth=0)
    core = RecordingScheduler(config)
    core.submit("A", [40_001, 40_002, 40_003], max_tokens=9, stop_ids=[40_009])
    for token in (40_004, 40_005, 40_009):
        op = core.plan()
        assert op is not None
        core.complete(StepResult(1, op.step, np.array([token], dtype=np.int32)))
    text = dump_text(core)
    assert "400" not in text
    (event,) = [event for event in parse_scenario(text, "x").events if isinstance(event, Submit)]
    assert (event.prompt, event.output, event.max_tokens, event.eos) == ([0, 7, 14], [21, 28, 996], 9, [996])


# The file


def failed_core() -> RecordingScheduler:
    core = RecordingScheduler(
        SchedulerConfig(page_size=2, num_pages=8, max_rows=2, max_pages_per_row=8, vocab_size=997, greedy_only=True)
    )
    core.submit('A\n"é\x85', [1, 2, 3], max_tokens=3)
    core.submit("B", [4], max_tokens=3)
    core.plan()
    core.retract("B")
    return core


def test_comment_tells_findings_and_moment() -> None:
    """What failed, with which version, and who held which pages, in ASCII whatever names there are."""
    core = failed_core()
    text = dump_text(core, InvariantViolation(["page 7 is lost", "row 1: é\x85"]))
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert comment[0].startswith("# pagemirror ")
    assert comment[1:4] == ["# InvariantViolation:", "#   page 7 is lost", "#   row 1: \\xe9"]
    assert "# After step 1 of session 1, 1 results awaited:" in comment
    assert "#   5 pages free, 0 cached, 3 private" in comment or "#   6 pages free, 0 cached, 2 private" in comment
    assert "#   0 requests wait, 1 are retracted, 1 hold a row:" in comment
    assert [line for line in comment if "prefill_done, 3 tokens known, 3 computed, the tree's 0 of pages 1 2" in line]
    assert "# The history is whole: 1 plans, 2 requests." in comment
    names = [event.submit for event in parse_scenario(text, "x").events if isinstance(event, Submit)]
    assert names == ['A\n"é\x85', "B"]


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    """Each dump has a name of its own and is for the owner's eyes."""
    core = failed_core()
    paths = [dump_failure(core, RuntimeError("no"), tmp_path) for _ in range(2)]
    assert [path.name.rpartition("-")[2] for path in paths if path is not None] == ["1.yaml", "2.yaml"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert all(path.name.startswith("pagemirror-dump-") for path in tmp_path.iterdir())


def test_folder_that_is_gone_hides_nothing(tmp_path: Path) -> None:
    """A dump that cannot be written is a line in the log, not another failure."""
    assert dump_failure(failed_core(), RuntimeError("no"), tmp_path / "gone") is None
