"""`pagemirror simulate --json` from outside: hundreds of random scenario files, every line and every output checked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

PAGEMIRROR = Path(sys.executable).parent / "pagemirror"
VOCAB_SIZE = 997
NUM_FILES = 300

pytestmark = pytest.mark.timeout(900)  # the files take ten seconds of CPU time, which busy machines stretch

Scenario = dict[str, Any]
Line = dict[str, Any]


def random_scenario(rng: random.Random) -> Scenario:
    """Anything that a file can say."""
    num_pages = rng.randint(1, 16)
    names = [f"r{i}" for i in range(rng.randint(1, 8))]
    common = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 12))]
    events = [random_submit(rng, name, common) for name in names]
    for _ in range(rng.randint(0, 8)):
        step, name = rng.randint(0, 30), rng.choice(names)
        events.append(
            rng.choices(
                [
                    {"step": step, "retract": name},
                    {"step": step, "abort": name},
                    {"step": step, "fail": name},
                    {"step": step, "reset_prefix_cache": True, "force": rng.random() < 0.5},
                    {"step": step, "restart_runtime": True},
                    {"step": step, "flush_releases": True},
                ],
                weights=[10, 2, 1, 4, 4, 1],
            )[0]
        )
    token_budget = rng.randint(1, 24)
    if rng.random() < 0.2:
        events += [{"step": rng.randint(0, 20), "token_budget": rng.randint(1, token_budget)} for _ in range(2)]
    by_event = rng.random() < 0.3
    if by_event:
        events += [random_complete(rng) for _ in range(rng.randint(0, 12))]
    rng.shuffle(events)
    if rng.random() < 0.2:
        for _ in range(rng.randint(1, 6)):
            events += random_failure(rng)
    return {
        "page_size": rng.choice([1, 2, 3, 4, 5, 8]),
        "num_pages": num_pages,
        "max_rows": rng.randint(1, 6),
        "max_pages_per_row": rng.randint(1, num_pages + 2),
        "token_budget": token_budget,
        "chunk_size": rng.randint(1, 24),
        "refresh_policy": rng.choice(["transition", "diff", "always"]),
        "overlap_depth": rng.randint(0, 2),
        "mixed": rng.random() < 0.7,
        "prefix_cache": rng.random() < 0.85,
        "results": "by_event" if by_event else "by_delay",
        "events": events,
    }


def random_submit(rng: random.Random, name: str, common: list[int]) -> dict[str, Any]:
    """A request; its prompt may begin as others do."""
    alphabet = rng.choice([2, 3, VOCAB_SIZE, VOCAB_SIZE + 20])
    event: dict[str, Any] = {
        "step": rng.randint(0, 14),
        "submit": name,
        "prompt": common[: rng.choice([0, 4, 12])] + [rng.randrange(alphabet) for _ in range(rng.randint(0, 9))],
        "max_tokens": rng.choice([0, 1, 1, 2, 3, 5, 9, 14, 30, 2**31 - 1]),
    }
    if event["max_tokens"] == 2**31 - 1 or rng.random() < 0.2:
        event["eos"] = sorted(rng.sample(range(VOCAB_SIZE), 150))
    if rng.random() < 0.3:
        event["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.15:
        event["prefix_cache"] = False
    if rng.random() < 0.2:
        event["namespace"] = rng.choice(["a", "b"])
    if rng.random() < 0.2:
        event["output"] = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    return event


def random_complete(rng: random.Random) -> dict[str, Any]:
    event: dict[str, Any] = {"step": rng.randint(0, 30), "complete": rng.randint(1, 3)}
    return event | {"until": event["step"] + rng.randint(0, 9)} if rng.random() < 0.5 else event


def random_failure(rng: random.Random) -> list[dict[str, Any]]:
    step = rng.randint(0, 20)
    failed = {"step": step, "step_failed": rng.randint(1, 3), "crashed": rng.random() < 0.5}
    failed["rows"] = rng.sample(range(1, 5), rng.randint(0, 2))
    return [failed, {"step": step, "restart_runtime": True}]


def simulate(*arguments: str | Path) -> tuple[int, str, str]:
    run = subprocess.run([PAGEMIRROR, "simulate", *arguments], capture_output=True, text=True, timeout=800, check=False)
    return run.returncode, run.stdout, run.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Scenario, list[Line]]]:
    """Every scenario beside the lines that the program printed for it; the last line of each is its summary."""
    folder = tmp_path_factory.mktemp("scenarios")
    scenarios: dict[str, Scenario] = {}
    for seed in range(NUM_FILES):
        path = folder / f"{seed}.yaml"
        scenarios[str(path)] = random_scenario(random.Random(seed))
        path.write_text(json.dumps(scenarios[str(path)]), encoding="utf-8")
    status, out, err = simulate("--json", *scenarios)
    assert status == 0, err or [line for line in out.splitlines() if '"violations": ["' in line][:3]
    lines = [json.loads(line) for line in out.splitlines()]
    grouped = [(file, list(group)) for file, group in groupby(lines, key=lambda line: line["file"])]
    assert [file for file, _ in grouped] == list(scenarios)
    return [(scenarios[file], group) for file, group in grouped]


def submits(scenario: Scenario) -> Iterator[dict[str, Any]]:
    return (event for event in scenario["events"] if "submit" in event)


def by_definition(scenario: Scenario, event: dict[str, Any]) -> tuple[str, list[int]]:
    """(finish, output) of a request that is left alone, from the definitions of capacity and of the model."""
    tokens = list(event["prompt"])
    page_size, num_pages, width = scenario["page_size"], scenario["num_pages"], scenario["max_pages_per_row"]
    room = min(num_pages, width) * page_size
    if not tokens or max(tokens) >= VOCAB_SIZE or event["max_tokens"] < 1 or len(tokens) > room:
        return "refused:INVALID_ARGUMENT", []
    limit = min(event["max_tokens"], room - len(tokens) + 1)
    output: list[int] = []
    while len(output) < limit:
        said = event.get("output", [])[len(output) : len(output) + 1]
        output += said or [sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % VOCAB_SIZE]
        tokens.append(output[-1])
        if output[-1] in event.get("eos", []):
            return "stop", output
    return "length" if limit == event["max_tokens"] or width <= num_pages else "capacity", output


def test_outputs_and_endings_are_exact(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """Every request returns what its prompt alone gives, whatever happened around it."""
    for scenario, lines in runs:
        summary = lines[-1]["summary"]
        assert summary["violations"] == []
        aborted = {event["abort"] for event in scenario["events"] if "abort" in event}
        failed = {event["fail"] for event in scenario["events"] if "fail" in event}
        if any("step_failed" in event for event in scenario["events"]):
            failed |= {event["submit"] for event in submits(scenario)}
        for event in submits(scenario):
            name = event["submit"]
            finish, output = by_definition(scenario, event)
            if summary["finish"][name] in {"abort", "failed"}:
                assert name in (aborted if summary["finish"][name] == "abort" else failed)
                assert summary["outputs"][name] == output[: len(summary["outputs"][name])]
            else:
                assert (summary["finish"][name], summary["outputs"][name]) == (finish, output)


def test_mirror_rows_are_the_schedulers_and_pages_add_up(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """After every step: equal rows, no page twice in a row, free + cached + private = all; at the end nothing is private."""
    for scenario, lines in runs:
        for line in lines[:-1]:
            assert line["mirror"] == line["rows"]
            assert all(len(set(row)) == len(row) for row in line["rows"].values())
            assert line["free"] + line["cached"] + line["private"] == scenario["num_pages"]
        if len(lines) > 1:
            assert lines[-2]["private"] == 0


def test_a_page_in_two_rows_holds_the_same_tokens(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """Rows share a page only at the same depth, after the same tokens, in one namespace, and if both use the cache."""
    num_shared = 0
    for scenario, lines in runs:
        size = scenario["page_size"]
        tokens = {event["submit"]: event["prompt"] + by_definition(scenario, event)[1] for event in submits(scenario)}
        tenant = {event["submit"]: event.get("namespace", "") for event in submits(scenario)}
        cached = {e["submit"]: scenario["prefix_cache"] and e.get("prefix_cache", True) for e in submits(scenario)}
        for line in lines[:-1]:
            place: dict[int, tuple[str, int]] = {}
            for name, row in line["rows"].items():
                for depth, page in enumerate(row):
                    other, other_depth = place.setdefault(page, (name, depth))
                    if other != name:
                        num_shared += 1
                        assert depth == other_depth
                        assert tokens[name][: (depth + 1) * size] == tokens[other][: (depth + 1) * size]
                        assert cached[name]
                        assert cached[other]
                        assert tenant[name] == tenant[other]
    assert num_shared > 30


def test_cached_tokens_are_a_prefix_of_somebody_elses(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """Whole pages, never the last token, and no more than another request of the namespace has in common."""
    num_hits = 0
    for scenario, lines in runs:
        size, count = scenario["page_size"], lines[-1]["summary"]["cached_tokens"]
        tokens = {event["submit"]: event["prompt"] + by_definition(scenario, event)[1] for event in submits(scenario)}
        for event in submits(scenario):
            name, prompt = event["submit"], event["prompt"]
            num_hits += count[name] > 0
            assert count[name] % size == 0
            assert count[name] < max(len(prompt), 1)
            assert not count[name] or any(
                tokens[other["submit"]][: count[name]] == prompt[: count[name]]
                for other in submits(scenario)
                if other is not event and other.get("namespace", "") == event.get("namespace", "")
            )
    assert num_hits > 20


def test_ops_keep_to_budget_and_lengths(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """Token budget, chunk size, rows, begin and size, and the pages that a row needs."""
    for scenario, lines in runs:
        page_size, budget = scenario["page_size"], scenario["token_budget"]
        for line in lines[:-1]:
            ops = line["ops"]
            for event in scenario["events"]:
                budget = event["token_budget"] if "token_budget" in event and event["step"] == line["step"] else budget
            assert sum(op["input_len"] for op in ops) <= budget
            assert len({op["row"] for op in ops}) == len(ops) <= scenario["max_rows"]
            for op in ops:
                assert 1 <= op["input_len"] <= scenario["chunk_size"]
                assert op["begin"] + op["size"] == len(op["occupied_pages"])
                assert op["num_computed"] + op["input_len"] <= page_size * len(op["occupied_pages"])
                assert op["cause"] not in ("first_chunk", "resume") or op["begin"] == 0
            if not scenario["mixed"]:
                assert len({op["cause"] in ("decode", "prefill_done_to_decode") for op in ops}) <= 1


def test_full_refresh_follows_the_transition(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """Under `transition` the bit is clear on plain decode steps and set on all others; under `always` it is set."""
    seen = set()
    for scenario, lines in runs:
        for op in (op for line in lines[:-1] for op in line["ops"]):
            if scenario["refresh_policy"] == "transition":
                assert op["full_refresh"] == (op["cause"] != "decode")
                seen.add(op["cause"])
            elif scenario["refresh_policy"] == "always":
                assert op["full_refresh"]
    assert seen == {"first_chunk", "continuation", "prefill_done_to_decode", "decode", "resume"}


def test_something_always_runs(runs: list[tuple[Scenario, list[Line]]]) -> None:
    """With nothing in flight a step plans a row, unless every live request lost its row in that very step."""
    for scenario, lines in runs:
        if scenario["results"] == "by_event" or any("step_failed" in event for event in scenario["events"]):
            continue  # what is in flight is not told by the lines; a suspect that lost its row is waited for
        live: set[str] = set()
        in_flight: list[bool] = []
        for line in lines[:-1]:
            now = [event for event in scenario["events"] if event["step"] == line["step"]]
            live |= {event["submit"] for event in now if "submit" in event}
            restarted = any("restart_runtime" in event for event in now)
            if restarted:
                in_flight.clear()
            waited_for = in_flight[-scenario["overlap_depth"] :] if scenario["overlap_depth"] else []
            waiting = live - set(line["ended"]) - {event.get("retract") for event in now}
            if any(event.get("force") for event in now):
                waiting.clear()
            assert line["ops"] or any(waited_for) or restarted or not waiting
            live -= set(line["ended"])
            in_flight.append(bool(line["ops"]))


@pytest.mark.parametrize("policy", ["diff", "always", "transition"])
def test_policies_are_overridden_from_the_command_line(policy: str) -> None:
    """The worked example is right under every policy but one."""
    status, out, _ = simulate("--json", "--refresh-policy", policy, "examples/worked_example.yaml")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["summary"]["outputs"] == {"A": [168, 523, 254], "B": [90]}


def test_tail_only_goes_wrong_and_says_where() -> None:
    """The broken policy exits with 1 and names the aliased page and the wrong token."""
    status, out, _ = simulate("--json", "--refresh-policy", "tail_only", "examples/worked_example.yaml")
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert status == 1
    assert summary["outputs"]["A"] == [168, 523, 776]
    assert any("page 1 is aliased by logical pages 0 and 2" in violation for violation in summary["violations"])


def test_a_bad_file_costs_no_half_printed_output(tmp_path: Path) -> None:
    """All files are read first: a bad one exits with 2, names file, line and key, and nothing runs."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("page_size: 4\nevents:\n  - {step: 0, submit: A, promt: [1]}\n", encoding="utf-8")
    status, out, err = simulate("--json", "examples/worked_example.yaml", bad)
    assert (status, out) == (2, "")
    assert f"{bad}:3" in err
    assert "promt" in err
