"""Scenario files: what is read, and for every kind of bad file a message that names file, line and key."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.scenario import Results, Scenario, ScenarioError, load_scenario, parse_scenario
from scheduler_service.scenario_events import (
    EVENT_TYPES,
    Abort,
    Complete,
    Fail,
    FlushReleases,
    ResetPrefixCache,
    RestartRuntime,
    Retract,
    StepFailed,
    Submit,
    TokenBudget,
)

_SUBMIT = "  - {step: 0, submit: A, prompt: [1, 2]}\n"


def _parse(text: str) -> Scenario:
    return parse_scenario(dedent(text), "case.yaml")


def _error(text: str) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        _parse(text)
    return caught.value


# Good files


def test_defaults_are_those_of_the_format() -> None:
    """A file of events alone has the documented values."""
    scenario = _parse("events: []")
    config = scenario.config
    assert (config.page_size, config.num_pages, config.max_rows, config.max_pages_per_row) == (4, 16, 8, 16)
    assert (config.token_budget, config.chunk_size, config.overlap_depth) == (64, 64, 0)
    assert (config.refresh_policy, config.mixed, config.prefix_cache) == (RefreshPolicy.TRANSITION, True, True)
    assert (config.vocab_size, config.max_context, config.max_waiting) == (997, 0, 0)
    assert (scenario.events, scenario.last_event_step, scenario.path) == ((), -1, "case.yaml")


def test_every_key_is_read() -> None:
    """Each key of the format reaches the configuration."""
    config = _parse(
        """
        page_size: 2
        num_pages: 5
        max_rows: 3
        max_pages_per_row: 4
        token_budget: 8
        chunk_size: 6
        refresh_policy: diff
        overlap_depth: 2
        mixed: false
        prefix_cache: false
        events: []
        """
    ).config
    assert (config.page_size, config.num_pages, config.max_rows, config.max_pages_per_row) == (2, 5, 3, 4)
    assert (config.token_budget, config.chunk_size, config.overlap_depth) == (8, 6, 2)
    assert (config.refresh_policy, config.mixed, config.prefix_cache) == (RefreshPolicy.DIFF, False, False)


def test_every_event_is_read() -> None:
    """Every kind of event, in file order, with its defaults."""
    scenario = _parse(
        """
        results: by_event
        events:
          - {step: 0, submit: A, prompt: [1, 2]}
          - {step: 1, submit: B, prompt: [3], max_tokens: 2, eos: [7], priority: -1, prefix_cache: false, namespace: t,
             output: [4]}
          - {step: 2, retract: A}
          - {step: 3, abort: B}
          - {step: 4, reset_prefix_cache: true}
          - {step: 4, reset_prefix_cache: true, force: true}
          - {step: 5, restart_runtime: true}
          - {step: 5, fail: A}
          - {step: 5, step_failed: 1}
          - {step: 5, step_failed: 2, rows: [3], crashed: true}
          - {step: 6, flush_releases: true}
          - {step: 6, token_budget: 64}
          - {step: 6, complete: 2}
          - {step: 6, complete: 1, until: 9}
        """
    )
    defaults = {"max_tokens": 16, "eos": [], "priority": 0, "prefix_cache": True, "namespace": "", "output": []}
    b = {"max_tokens": 2, "eos": [7], "priority": -1, "prefix_cache": False, "namespace": "t", "output": [4]}
    assert scenario.events == (
        Submit.model_validate({"step": 0, "submit": "A", "prompt": [1, 2]} | defaults),
        Submit.model_validate({"step": 1, "submit": "B", "prompt": [3]} | b),
        Retract(step=2, retract="A"),
        Abort(step=3, abort="B"),
        ResetPrefixCache(step=4, reset_prefix_cache=True, force=False),
        ResetPrefixCache(step=4, reset_prefix_cache=True, force=True),
        RestartRuntime(step=5, restart_runtime=True),
        Fail(step=5, fail="A"),
        StepFailed(step=5, step_failed=1, rows=[], crashed=False),
        StepFailed(step=5, step_failed=2, rows=[3], crashed=True),
        FlushReleases(step=6, flush_releases=True),
        TokenBudget(step=6, token_budget=64),
        Complete(step=6, complete=2, until=None),
        Complete(step=6, complete=1, until=9),
    )
    assert scenario.results is Results.BY_EVENT
    assert scenario.last_event_step == 9


@pytest.mark.parametrize("name", ["7", "yes", "1.50", "'a b'", "0x10", "2024-01-01", "ä"])
def test_request_ids_are_the_text_of_the_file(name: str) -> None:
    """An id is what stands there, also where YAML reads a number, a truth value or a date."""
    (event,) = _parse(f"events: [{{step: 0, submit: {name}, prompt: [1]}}]").events
    assert isinstance(event, Submit)
    assert event.submit == name.strip("'")


@pytest.mark.parametrize("prompt", ["[]", "[-1]", "[99999999999999999999]"])
def test_request_that_will_be_refused_is_no_bad_file(prompt: str) -> None:
    """A prompt that no scheduler takes is an answer of the scheduler, not a fault of the file."""
    assert len(_parse(f"events: [{{step: 0, submit: A, prompt: {prompt}, max_tokens: 0}}]").events) == 1


def test_anchors_and_comments_are_yaml() -> None:
    """What YAML offers may be used."""
    scenario = _parse(
        """
        events:
          - {step: 0, submit: A, prompt: &tokens [1, 2, 3]}  # the first
          - {step: 0, submit: B, prompt: *tokens}
        """
    )
    assert [event.prompt for event in scenario.events if isinstance(event, Submit)] == [[1, 2, 3], [1, 2, 3]]


def test_policy_can_be_replaced() -> None:
    """The override changes the policy and nothing else."""
    scenario = _parse("page_size: 2\nevents: []")
    other = scenario.with_policy(RefreshPolicy.TAIL_ONLY)
    assert other.config.refresh_policy is RefreshPolicy.TAIL_ONLY
    assert other.with_policy(RefreshPolicy.TRANSITION) == scenario


# Bad files


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        # The file as a whole
        ("", 1, "", "must be a mapping"),
        ("- 1\n- 2\n", 1, "", "must be a mapping"),
        ("just words\n", 1, "", "must be a mapping"),
        ("page_size: 4\n", 1, "events", "is missing"),
        ("page_size: [\nevents: []\n", 3, "", "is no YAML"),
        ("page_size: 4\n\tevents: []\n", 2, "", "is no YAML"),
        ("events: []\n---\nevents: []\n", 2, "", "is no YAML"),
        ("events: *nothing\n", 1, "", "is no YAML"),
        ("[1, 2]: 3\nevents: []\n", 1, "", ""),
        # Its keys
        ("events: []\npage_sise: 4\n", 2, "page_sise", "is no key here; known are page_size"),
        ("page_size: 4\nevents: []\npage_size: 4\n", 3, "page_size", "is given twice"),
        ("events: []\n\npage_size: four\n", 3, "page_size", "is 'four'"),
        ("events: []\npage_size: 4.0\n", 2, "page_size", "is 4.0"),
        ("events: []\npage_size: true\n", 2, "page_size", "is True"),
        ("events: []\npage_size:\n", 2, "page_size", "is None"),
        ("events: []\nmixed: 1\n", 2, "mixed", "is 1"),
        ("events: []\nrefresh_policy: sometimes\n", 2, "refresh_policy", "is 'sometimes'"),
        ("events:\n", 1, "events", "is None"),
        ("page_size: 4\nevents: {step: 0}\n", 2, "events", "list"),
        ("7: 8\nevents: []\n", 1, "[7]", ""),
        # Their values
        ("events: []\npage_size: 0\n", 2, "page_size", "is 0, but must be an integer from 1"),
        ("events: []\nnum_pages: -3\n", 2, "num_pages", "is -3, but must be"),
        ("events: []\noverlap_depth: 3\n", 2, "overlap_depth", "is 3, but must be an integer from 0 to 2"),
        ("events: []\nresults: soon\n", 2, "results", "is 'soon'"),
        ("events: []\nchunk_size: 99999999999\n", 2, "chunk_size", "is 99999999999, but must be"),
        # Events
        ("events:\n  - submit\n", 2, "events[0]", "must be a mapping"),
        ("events:\n" + _SUBMIT + "  - [1]\n", 3, "events[1]", "must be a mapping"),
        ("events:\n  - {step: 0}\n", 2, "events[0]", "must have exactly one of submit, retract"),
        ("events:\n  - {step: 0, submit: A, abort: A, prompt: [1]}\n", 2, "events[0]", "it has submit and abort"),
        ("events:\n  - {submit: A, prompt: [1]}\n", 2, "events[0].step", "is missing"),
        ("events:\n  - {step: 0, submit: A}\n", 2, "events[0].prompt", "is missing"),
        ("events:\n  - step: 0\n    submit: A\n    prompt: 5\n", 4, "events[0].prompt", "is 5"),
        ("events:\n  - step: 0\n    submit: A\n    prompt: [1,\n      x]\n", 5, "events[0].prompt[1]", "is 'x'"),
        ("events:\n  - step: -1\n    submit: A\n    prompt: [1]\n", 2, "events[0].step", "is -1"),
        ("events:\n  - step: 0.5\n    submit: A\n    prompt: [1]\n", 2, "events[0].step", "is 0.5"),
        ("events:\n  - {step: 0, submit: [A], prompt: [1]}\n", 2, "events[0].submit", "must be a request's id"),
        ("events:\n  - {step: 0, submit: , prompt: [1]}\n", 2, "events[0].submit", "must be a request's id"),
        ("events:\n  - {step: 0, abort: }\n", 2, "events[0].abort", "must be a request's id"),
        ('events:\n  - {step: 0, retract: ""}\n', 2, "events[0].retract", ""),
        ("events:\n  - {step: 0, submit: A, prompt: [1], max_tokens: many}\n", 2, "events[0].max_tokens", "is 'many'"),
        ("events:\n  - {step: 0, submit: A, prompt: [1], eos: 7}\n", 2, "events[0].eos", "is 7"),
        ("events:\n  - {step: 0, submit: A, prompt: [1], eos: [true]}\n", 2, "events[0].eos[0]", "is True"),
        ("events:\n  - {step: 0, submit: A, prompt: [1], prefix_cache: 0}\n", 2, "events[0].prefix_cache", "is 0"),
        ("events:\n  - {step: 0, submit: A, prompt: [1], tokens: 4}\n", 2, "events[0].tokens", "is no key here"),
        ("events:\n  - {step: 0, abort: A, prompt: [1]}\n", 2, "events[0].prompt", "is no key here"),
        ("events:\n  - {step: 0, step: 1, abort: A}\n", 2, "step", "is given twice"),
        ("events:\n  - {step: 0, reset_prefix_cache: false}\n", 2, "events[0].reset_prefix_cache", "must be true"),
        ("events:\n  - {step: 0, flush_releases: false}\n", 2, "events[0].flush_releases", "must be true"),
        ("events:\n  - {step: 0, submit: A, prompt: [1], output: [997]}\n", 2, "events[0].output[0]", "is 997"),
        ("events:\n  - {step: 0, step_failed: 0}\n", 2, "events[0].step_failed", "is 0"),
        ("events:\n  - step: 0\n    complete: 1\n", 3, "events[0].complete", "is for files with `results: by_event`"),
        ("results: by_event\nevents:\n  - {step: 5, complete: 1, until: 4}\n", 3, "events[0]", "until is 4"),
        ("events:\n  - {step: 0, token_budget: 65}\n", 2, "events[0].token_budget", "is 65, but must be at most 64"),
        ("events:\n  - {step: 0, restart_runtime: 1}\n", 2, "events[0].restart_runtime", "is 1"),
        ("events:\n" + _SUBMIT + "\n" + _SUBMIT, 4, "events[1].submit", "request 'A' is submitted twice"),
    ],
)
def test_bad_file(text: str, line: int, key: str, words: str) -> None:
    """Every complaint has the file, the line and the key, and says what is wrong."""
    error = _error(text)
    assert (error.line, error.key) == (line, key)
    assert words in error.problem
    place = f"case.yaml:{line}: {key}: " if key else f"case.yaml:{line}: "
    assert str(error) == place + error.problem


def test_same_id_in_other_spelling_is_the_same_id() -> None:
    """Quotes are not part of an id, so a second submission is found."""
    error = _error("events:\n  - {step: 0, submit: 7, prompt: [1]}\n  - {step: 1, submit: '7', prompt: [1]}\n")
    assert (error.line, error.problem) == (3, "request '7' is submitted twice")


def test_deep_nesting_is_a_bad_file() -> None:
    """A file that nests beyond all reason is refused like any other, not a crash of the reader."""
    assert "is no YAML" in _error("[" * 5000).problem


def test_bad_date_is_a_bad_file() -> None:
    """YAML's own types can fail in their constructors."""
    assert _error("events: []\npage_size: 2024-13-45\n").problem.startswith("is")


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is named, without a line."""
    path = tmp_path / "none.yaml"
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"
    assert caught.value.line is None


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    """A folder cannot be read."""
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path)


def test_file_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are refused by name."""
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"events: [\xff\xfe]\n")
    with pytest.raises(ScenarioError, match=r"binary\.yaml: cannot be read: it is not UTF-8 text"):
        load_scenario(path)


def test_file_is_loaded_under_its_given_name(tmp_path: Path) -> None:
    """The path in messages and output is the one that was given."""
    path = tmp_path / "ok.yaml"
    path.write_text("events: []\n", encoding="utf-8")
    assert load_scenario(path).path == str(path)


def test_every_key_is_documented(project_root: Path) -> None:
    """The reference names each key of a file and of each event."""
    page = (project_root / "docs" / "scenario-files.md").read_text()
    words = set(re.findall(r"`([a-z_]+)(?:: [^`]+)?`", page))
    event_keys = {key for event in EVENT_TYPES.values() for key in event.model_fields}
    assert (event_keys | {"page_size", "results", "prefix_cache"}) - {"step"} <= words
