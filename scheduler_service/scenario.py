"""Scenario files: a bug report that runs. docs/scenario-files.md is the reference.

YAML is read by PyYAML and checked by pydantic; every complaint names the file, the line and the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, StrictBool, StrictInt, ValidationError

from scheduler_service.core.config import RefreshPolicy, SchedulerConfig
from scheduler_service.core.errors import ConfigError, PagemirrorError
from scheduler_service.scenario_events import (
    EVENT_TYPES,
    REQUEST_KEYS,
    SWITCH_KEYS,
    VOCAB_SIZE,
    Complete,
    Event,
    Strict,
    Submit,
    TokenBudget,
)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # dumps can be long, and libyaml reads them four times as fast


class Results(StrEnum):
    """What decides when results are handed to the scheduler."""

    BY_DELAY = "by_delay"
    BY_EVENT = "by_event"


class ScenarioError(PagemirrorError):
    """A scenario file cannot be run as it stands."""

    def __init__(self, path: str, line: int | None, key: str, problem: str) -> None:
        self.path, self.line, self.key, self.problem = path, line, key, problem
        place = f"{path}:{line}" if line is not None else path
        super().__init__(f"{place}: {key}: {problem}" if key else f"{place}: {problem}")


_Model = TypeVar("_Model", bound=BaseModel)


class _File(Strict):
    """The keys of a file beside its events, with their defaults."""

    page_size: StrictInt = 4
    num_pages: StrictInt = 16
    max_rows: StrictInt = 8
    max_pages_per_row: StrictInt = 16
    token_budget: StrictInt = 64
    chunk_size: StrictInt = 64
    refresh_policy: RefreshPolicy = RefreshPolicy.TRANSITION
    overlap_depth: StrictInt = 0
    results: Results = Results.BY_DELAY
    mixed: StrictBool = True
    prefix_cache: StrictBool = True
    events: list[Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file that was read and found sound."""

    path: str
    config: SchedulerConfig
    events: tuple[Event, ...]
    results: Results = Results.BY_DELAY

    @property
    def last_event_step(self) -> int:
        """Step of the last event; -1 when there is none."""
        return max((last_step(event) for event in self.events), default=-1)

    def with_policy(self, policy: RefreshPolicy) -> Scenario:
        """The same scenario under another refresh policy."""
        return replace(self, config=replace(self.config, refresh_policy=policy))


def last_step(event: Event) -> int:
    """The last step in which it happens."""
    return event.step if not isinstance(event, Complete) or event.until is None else event.until


def load_scenario(path: str | Path) -> Scenario:
    """Read one file.

    Raises:
        ScenarioError: it cannot be read, is no YAML, or has a key or a value that is not allowed.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScenarioError(name, None, "", f"cannot be read: {reason}") from error
    return parse_scenario(text, name)


def parse_scenario(text: str, path: str) -> Scenario:
    """Read a scenario from text; `path` is used in messages. Raises ScenarioError."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
        plain = yaml.load(text, Loader=_LOADER)  # noqa: S506  (a safe loader, see above)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise ScenarioError(path, line, "", f"is no YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(root, yaml.MappingNode) or not isinstance(plain, dict):
        raise ScenarioError(path, 1, "", "must be a mapping of keys such as page_size and events")
    _refuse_repeated_keys(root, path)
    file = _validate(_File, plain, root, path, ())
    config = _config(file, root, path)
    events_node = _child(root, "events")
    assert isinstance(events_node, yaml.SequenceNode)  # _File has seen a list
    events = tuple(
        _event(entry, node, path, index) for index, (entry, node) in enumerate(zip(file.events, events_node.value, strict=True))
    )
    _refuse_repeated_ids(events, events_node, path)
    _refuse_contradictions(events, events_node, path, file)
    return Scenario(path, config, events, file.results)


def _config(file: _File, root: yaml.MappingNode, path: str) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            page_size=file.page_size,
            num_pages=file.num_pages,
            max_rows=file.max_rows,
            max_pages_per_row=file.max_pages_per_row,
            vocab_size=VOCAB_SIZE,
            token_budget=file.token_budget,
            chunk_size=file.chunk_size,
            refresh_policy=file.refresh_policy,
            overlap_depth=file.overlap_depth,
            mixed=file.mixed,
            prefix_cache=file.prefix_cache,
        )
    except ConfigError as error:
        raise ScenarioError(
            path, _line(root, (error.key,)), error.key, f"is {error.value!r}, but must be {error.expected}"
        ) from error


def _event(entry: object, node: yaml.Node, path: str, index: int) -> Event:
    line = node.start_mark.line + 1
    if not isinstance(entry, dict) or not isinstance(node, yaml.MappingNode):
        raise ScenarioError(path, line, f"events[{index}]", "must be a mapping such as {step: 0, submit: A, prompt: [1, 2]}")
    _refuse_repeated_keys(node, path)
    actions = [key for key in entry if key in EVENT_TYPES]
    if len(actions) != 1:
        found = f"has {' and '.join(actions)}" if actions else "has none"
        raise ScenarioError(path, line, f"events[{index}]", f"must have exactly one of {', '.join(EVENT_TYPES)}; it {found}")
    action = actions[0]
    if action in REQUEST_KEYS:
        # An id is the text that stands in the file, also where YAML would read a number or a truth value.
        value = _child(node, action)
        if value is not None:
            if not isinstance(value, yaml.ScalarNode) or value.tag == "tag:yaml.org,2002:null":
                raise ScenarioError(path, line, f"events[{index}].{action}", "must be a request's id")
            entry = {**entry, action: value.value}
    event = _validate(EVENT_TYPES[action], entry, node, path, ("events", index))
    if action in SWITCH_KEYS and not entry[action]:
        raise ScenarioError(path, _line(node, (action,)), f"events[{index}].{action}", "must be true")
    return event


def _validate(model: type[_Model], data: object, node: yaml.Node, path: str, prefix: tuple[str | int, ...]) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A misspelt key says more than the key that is missing because of it.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        location = first["loc"]
        problem = {
            "extra_forbidden": f"is no key here; known are {', '.join(model.model_fields)}",
            "missing": "is missing",
        }.get(first["type"], f"is {first['input']!r}: {first['msg']}")
        key = ""
        for part in (*prefix, *location):
            key += f"[{part}]" if isinstance(part, int) else f"{'.' if key else ''}{part}"
        raise ScenarioError(path, _line(node, location), key, problem) from None


def _child(node: yaml.Node, key: object) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == str(key):
                value: yaml.Node = value_node
                return value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        child: yaml.Node = node.value[key]
        return child
    return None


def _line(node: yaml.Node, location: tuple[int | str, ...]) -> int:
    """Line of the deepest node on the way along `location`, counted from 1; of the key where there is one."""
    line = node.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for key_node, _ in node.value:
                if key_node.value == str(part):
                    line = key_node.start_mark.line
        child = _child(node, part)
        if child is None:
            break
        if isinstance(node, yaml.SequenceNode):
            line = child.start_mark.line
        node = child
    return line + 1


def _refuse_repeated_keys(node: yaml.MappingNode, path: str) -> None:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ScenarioError(path, key_node.start_mark.line + 1, "", "a key must be a word")
        if key_node.value in seen:
            raise ScenarioError(path, key_node.start_mark.line + 1, key_node.value, "is given twice")
        seen.add(key_node.value)


def _refuse_repeated_ids(events: tuple[Event, ...], node: yaml.SequenceNode, path: str) -> None:
    seen: set[str] = set()
    for index, event in enumerate(events):
        if isinstance(event, Submit):
            if event.submit in seen:
                line = node.value[index].start_mark.line + 1
                raise ScenarioError(path, line, f"events[{index}].submit", f"request {event.submit!r} is submitted twice")
            seen.add(event.submit)


def _refuse_contradictions(events: tuple[Event, ...], node: yaml.Node, path: str, file: _File) -> None:
    for index, event in enumerate(events):
        if isinstance(event, Complete) and file.results is Results.BY_DELAY:
            key, problem = "complete", f"is for files with `results: {Results.BY_EVENT}`"
        elif isinstance(event, TokenBudget) and event.token_budget > file.token_budget:
            key, problem = "token_budget", f"is {event.token_budget}, but must be at most {file.token_budget}, the file's own"
        else:
            continue
        raise ScenarioError(path, _line(node, (index, key)), f"events[{index}].{key}", problem)
