"""docs/limits.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime_service import app as runtime_app
from runtime_service import errors as runtime_errors
from runtime_service import execute_stream, servicer
from scheduler_service import call_gate, channels, errors, page_event_log, session_servicer, tokens, wire_facts, zmq_events
from scheduler_service.core import parameters
from scheduler_service.gateway import fields, stops
from scheduler_service.gateway import servicer as gateway_servicer
from scheduler_service.settings import SchedulerSettings

CONSTANTS = {
    "checks of health at a time": call_gate.MAX_CHECKS,
    "watchers of health and calls of reflection at a time": call_gate.MAX_OTHER_CALLS,
    "time from a call's beginning to its whole request": call_gate.REQUEST_TIMEOUT_S,
    "time to a session's hello": session_servicer.HELLO_TIMEOUT_S,
    "headers of a call": channels.MAX_METADATA_BYTES // 1024,
    "`request_id`, `cache_namespace`, `traceparent`": parameters.MAX_NAMESPACE_LEN,
    "`stop_token_ids`, entries of `logit_bias`": parameters.MAX_STOP_IDS,
    "`num_logprobs`": parameters.MAX_LOGPROBS,
    "completions of one request of the [gateway](gateway.md) (`n`)": fields.MAX_CHOICES,
    "stop strings of one request of the gateway": stops.MAX_STOP_STRINGS,
    "time for which the gateway's FlushCache waits": gateway_servicer.MAX_FLUSH_WAIT_S,
    "text of a status": errors.MAX_DETAIL_BYTES // 1024,
    "readers of [page events](kv-events.md) at a time": page_event_log.MAX_FOLLOWERS,
    "page events kept for readers that are behind or come back": page_event_log.MAX_HISTORY_BYTES // 2**20,
    "batches of page events that wait for one [ZeroMQ subscriber](kv-events.md#over-zeromq)": zmq_events.MAX_UNSENT,
    "time for which one message of a ZeroMQ replay waits to be taken": zmq_events.REPLAY_TIMEOUT_S,
    "size of a listing of rows": wire_facts.MAX_MESSAGE_BYTES // 2**20,
    "time to the hello": servicer.HELLO_TIMEOUT_S,
    "ops read and not answered": execute_stream.MAX_UNANSWERED_OPS,
    "resets read and not answered": execute_stream.MAX_UNANSWERED_RESETS,
    "time for which nothing of an answer is read": execute_stream.WRITE_TIMEOUT_S,
    "`ReadRows` at a time": servicer.MAX_CONCURRENT_READS,
    "calls at a time, of all kinds": runtime_app.MAX_CONCURRENT_RPCS,
}


@pytest.fixture(scope="module")
def rows(project_root: Path) -> list[list[str]]:
    """The cells of every row of every table: what, setting, default, beyond."""
    page = (project_root / "docs/limits.md").read_text()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", page, re.MULTILINE)]
    return [cells for cells in found if cells[0] not in {"what", "---"}]


def test_defaults_are_those_of_the_settings(rows: list[list[str]]) -> None:
    """Each option exists, and its default begins with the stated one."""
    options = 0
    for what, setting, default, _ in rows:
        for option in re.findall(r"^`--([a-z-]+)`$", setting):
            value = SchedulerSettings.model_fields[option.replace("-", "_")].default
            assert default.split(" ")[0] == f"{value:g}", what
            options += 1
    assert options >= 11


def test_constants_are_those_of_the_code(rows: list[list[str]]) -> None:
    """Numbers without a setting are the ones that the code has."""
    stated = {cells[0]: cells[2] for cells in reversed(rows)}
    for what, value in CONSTANTS.items():
        assert stated[what].split(" ")[0] == f"{value:g}", what
    assert parameters.MAX_REQUEST_ID_LEN == parameters.MAX_TRACEPARENT_LEN == parameters.MAX_NAMESPACE_LEN
    assert parameters.MAX_BIAS_ENTRIES == parameters.MAX_STOP_IDS
    assert runtime_app.MAX_CONNECTIONS == runtime_app.MAX_CONCURRENT_RPCS
    assert runtime_app.MAX_METADATA_BYTES == channels.MAX_METADATA_BYTES
    assert runtime_errors.MAX_DETAIL_BYTES == errors.MAX_DETAIL_BYTES


def test_tokens_are_described_as_they_are_checked(project_root: Path) -> None:
    """docs/security.md has the lengths and the number of tokens."""
    page = (project_root / "docs/security.md").read_text().replace("\n", " ")
    numbers = f"{tokens.MIN_TOKEN_LEN} to {tokens.MAX_TOKEN_LEN} printable ASCII characters each, at most {tokens.MAX_TOKENS}"
    assert numbers in page
