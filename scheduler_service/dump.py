"""From the history of a core that failed to a scenario file that leads there again.

Token ids of a model other than the fingerprint model are replaced. What matters to the core is only which pages of tokens are
equal, so each page is replaced by the number that it has among the pages that follow the same ones, written in base
`NUM_LABELS` with the first token as the lowest digit, plus `LABEL_STRIDE` times the position; equal prefixes stay equal and
different ones different, and nothing of what was said is in the file. A stop token becomes `STOP_LABEL`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path

import structlog
import yaml

from scheduler_service.core.errors import InvariantViolation
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.request import FinishReason, Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.recorder import Call, Entry, History, RecordingScheduler
from scheduler_service.scenario_events import VOCAB_SIZE

log = structlog.get_logger("pagemirror.dump")

STOP_LABEL = VOCAB_SIZE - 1
NUM_LABELS = VOCAB_SIZE - 1
LABEL_STRIDE = 7

_PLAIN_NAME = re.compile(r"(?!null$)[a-z_][a-z0-9_.-]*", re.IGNORECASE | re.ASCII)
_MAX_SHOWN_PAGES = 64


def dump_failure(core: RecordingScheduler, error: Exception, folder: Path) -> Path | None:
    """Write `pagemirror-dump-PID-N.yaml` into the folder, say where in the log, and return the path; None: it did not work."""
    try:
        text = dump_text(core, error)
        for number in count(1):
            path = folder / f"pagemirror-dump-{os.getpid()}-{number}.yaml"
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            log.error("dump_written", path=str(path), replay=f"pagemirror simulate {path}")
            return path
    except Exception:  # the failure itself has been told already and must not be hidden by this one
        log.exception("dump_failed", folder=str(folder))
    return None


def dump_text(core: RecordingScheduler, error: Exception | None = None) -> str:
    """The core's history as a scenario file, below a comment with what is known of the failure and of the moment."""
    writer = _Writer(core)
    body = list(writer.lines())
    comment = [*_story(core, error), "", *writer.remarks()]
    head = [f"# {_ascii(line)}".rstrip() for line in comment]
    return "\n".join([*head, *_settings(core), "results: by_event", "events:", *body]) + "\n"


class PageLabels:
    """Numbers for pages of tokens, the same for the same page after the same pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._children: dict[tuple[int, bytes], int] = {}  # node and page → node below it; 0 is the root
        self._places = [0]  # of a node among its parent's children
        self._num_children = [0]

    def label(self, tokens: Int32Array) -> list[int]:
        """Tokens that stand for `tokens`, each below `STOP_LABEL`; those beyond the last whole page do not differ."""
        size, node, found = self._page_size, 0, []
        for begin in range(0, len(tokens), size):
            page = tokens[begin : begin + size]
            number = 0
            if len(page) == size:
                node = self._child(node, page.tobytes())
                number = self._places[node]
            for position in range(begin, begin + len(page)):
                number, digit = divmod(number, NUM_LABELS)
                found.append((digit + LABEL_STRIDE * position) % NUM_LABELS)
        return found

    def _child(self, node: int, page: bytes) -> int:
        child = self._children.get((node, page))
        if child is None:
            child = self._children[node, page] = len(self._places)
            self._places.append(self._num_children[node])
            self._num_children.append(0)
            self._num_children[node] += 1
        return child


class _Writer:
    """The lines of the events."""

    def __init__(self, core: RecordingScheduler) -> None:
        self._history: History = core.history
        self._config = core.config
        self._labels = (
            None if core.config.greedy_only and core.config.vocab_size <= VOCAB_SIZE else PageLabels(core.config.page_size)
        )
        self._names: dict[Request, str] = {}
        self._taken: set[str] = set()

    def lines(self) -> Iterator[str]:
        """One line an event."""
        start = self._history.start
        for live in start.live:
            yield self._submit(live.request, 0, live.num_known)
        entries = self._history.entries()
        unknown = start.num_in_flight  # results of steps that are not in the history
        index = 0
        while index < len(entries):
            entry = entries[index]
            if entry.call is Call.COMPLETE:
                if unknown:
                    unknown -= 1
                    index += 1
                    continue
                index, line = self._complete(entries, index)
                yield line
                continue
            if entry.call is Call.RESTART_RUNTIME:
                unknown = 0
            yield self._line(entry)
            index += 1

    def remarks(self) -> Iterator[str]:
        """What a reader must know of the events; complete once `lines` has been read."""
        start, history = self._history.start, self._history
        if start.first_step:
            missing = history.num_submitted - len(self._names)
            yield "The history is not whole, so the replay is not exact. Missing:"
            yield f"  the first {start.first_step} plans, and {missing} requests that had ended by then;"
            yield f"  the past of {len(start.live)} requests: their prompts are the tokens that were known then;"
            yield "  what was in the prefix cache."
        else:
            yield f"The history is whole: {history.num_steps} plans, {history.num_submitted} requests."
        if self._labels is not None:
            yield "Token ids are replaced: equal prefixes stay equal, different ones different."

    def _line(self, entry: Entry) -> str:
        step = entry.step - self._history.start.first_step
        if entry.call is Call.SUBMIT:
            assert entry.request is not None
            return self._submit(entry.request, step, entry.request.prompt_len)
        if entry.request is not None:
            return f"  - {{step: {step}, {entry.call}: {_scalar(self._names[entry.request])}}}"
        values = entry.values
        if entry.call is Call.TOKEN_BUDGET:
            what = f"{entry.call}: {values['token_budget']}"
        elif entry.call is Call.STEP_FAILED:
            what = f"{entry.call}: {values['place']}, rows: {values['rows']}, crashed: {str(values['crashed']).lower()}"
        else:
            what = f"{entry.call}: true" + (", force: true" if values.get("force") else "")
        return f"  - {{step: {step}, {what}}}"

    def _complete(self, entries: list[Entry], index: int) -> tuple[int, str]:
        """One line for as many `complete` entries as it can say; returns the index behind them as well."""
        first = entries[index].step
        number = _run_length(entries, index)
        index += number
        last = first
        while index < len(entries) and entries[index].step == last + 1 and _run_length(entries, index) == number:
            index += number
            last += 1
        base = self._history.start.first_step
        until = f", until: {last - base}" if last > first else ""
        return index, f"  - {{step: {first - base}, complete: {number}{until}}}"

    def _submit(self, request: Request, step: int, num_known: int) -> str:
        tokens = request.token_slice(0, len(request.tokens))
        parts = [f"step: {step}", f"submit: {_scalar(self._name(request))}"]
        stopped = request.finish_reason is FinishReason.STOP
        output: Sequence[int] = ()
        stop_ids: Sequence[int] = request.stop_ids
        if self._labels is None:
            labels: list[int] = tokens.tolist()
        else:
            # A stop token is the last of its request and has no page that could be shared.
            labels = [*self._labels.label(tokens[:-1]), STOP_LABEL] if stopped else self._labels.label(tokens)
            output = labels[num_known:]
            stop_ids = [STOP_LABEL] if stopped else []
        parts.append(f"prompt: {labels[:num_known]}")
        whole = num_known == request.prompt_len and not self._config.max_context
        parts.append(f"max_tokens: {request.max_tokens if whole else request.limit_len - num_known}")
        if stop_ids:
            parts.append(f"eos: {list(stop_ids)}")
        if request.priority:
            parts.append(f"priority: {request.priority}")
        if not request.prefix_cache:
            parts.append("prefix_cache: false")
        if request.cache_namespace:
            parts.append(f"namespace: {_quoted(request.cache_namespace)}")
        if output:
            parts.append(f"output: {list(output)}")
        return f"  - {{{', '.join(parts)}}}"

    def _name(self, request: Request) -> str:
        """Its id, with a number where an earlier request had the same one."""
        name = request.request_id
        for number in count(2):
            if name not in self._taken:
                break
            name = f"{request.request_id}#{number}"
        self._taken.add(name)
        self._names[request] = name
        return name


def _run_length(entries: list[Entry], index: int) -> int:
    """How many `complete` entries of the same step follow each other from `index` on."""
    end = index
    while end < len(entries) and entries[end].call is Call.COMPLETE and entries[end].step == entries[index].step:
        end += 1
    return end - index


def _settings(core: Scheduler) -> Iterator[str]:
    config = core.config
    for key in ("page_size", "num_pages", "max_rows", "max_pages_per_row", "token_budget", "chunk_size"):
        yield f"{key}: {getattr(config, key)}"
    yield f"refresh_policy: {config.refresh_policy}"
    yield f"overlap_depth: {config.overlap_depth}"
    yield f"mixed: {str(config.mixed).lower()}"
    yield f"prefix_cache: {str(config.prefix_cache).lower()}"


def _story(core: Scheduler, error: Exception | None) -> Iterator[str]:
    yield f"pagemirror {version('pagemirror')}, {datetime.now(UTC).isoformat(timespec='seconds')}"
    if error is not None:
        yield f"{type(error).__name__}:"
        findings = error.findings if isinstance(error, InvariantViolation) else [str(error)]
        yield from (f"  {line}" for finding in findings for line in finding.splitlines())
    stats = core.stats()
    yield ""
    yield f"After step {core.last_step} of session {core.session_no}, {core.num_in_flight} results awaited:"
    yield f"  {stats.free} pages free, {stats.cached} cached, {stats.private} private"
    yield f"  {core.num_waiting} requests wait, {core.num_retracted} are retracted, {core.num_running} hold a row:"
    table = core.placement.rows
    for row, (request, pages) in core.rows().items():
        shown = " ".join(map(str, pages[:_MAX_SHOWN_PAGES].tolist()))
        more = f" and {len(pages) - _MAX_SHOWN_PAGES} more" if len(pages) > _MAX_SHOWN_PAGES else ""
        yield (
            f"  row {row}: {request.request_id!r} {request.state}, {len(request.tokens)} tokens known, "
            f"{table.num_computed[row]} computed, the tree's {table.num_tree[row]} of pages {shown}{more}"
        )


def _ascii(text: str) -> str:
    """As it may stand in a comment."""
    return text.encode("unicode_escape").decode()


def _scalar(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    quoted: str = yaml.safe_dump(text, default_style='"', width=2**31).strip()
    return quoted
