"""`pagemirror events`: what is shown of page events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from scheduler_service import client
from scheduler_service.cli import app
from scheduler_service.client import RpcFailedError
from scheduler_service.page_events import PageBatch, PagesCleared, PagesRemoved, PagesStored, SnapshotPart


class FakeClient(contextlib.AbstractAsyncContextManager[Any]):
    """Tells a state and one batch, and then that the server is draining."""

    def __init__(self, target: str, security: Any) -> None:
        self.target = target

    async def __aexit__(self, *_: object) -> None:
        pass

    async def page_events(self) -> AsyncIterator[PageBatch]:
        import grpc

        stored = PagesStored(np.array([1, 2], np.uint64), None, np.arange(4, dtype=np.int32), 2, "tenant")
        yield PageBatch(7, 5.0, (PagesCleared(), stored), SnapshotPart(0, 1, 2))
        more = PagesStored(np.array([255], np.uint64), 2, np.arange(2, dtype=np.int32), 2)
        yield PageBatch(8, 6.0, (more, PagesRemoved(np.arange(1, 7, dtype=np.uint64))))
        raise RpcFailedError(self.target, grpc.StatusCode.UNAVAILABLE, "draining")


@pytest.fixture(autouse=True)
def fake_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Client", FakeClient)


def test_lines_for_people() -> None:
    """One line an event, with the first hashes; the status that ends it all goes to stderr."""
    done = CliRunner().invoke(app, ["events"])
    assert done.stdout.splitlines() == [
        "cleared",
        "stored  2 pages of 'tenant': 0000000000000001 0000000000000002",
        "stored  1 page after 0000000000000002: 00000000000000ff",
        "removed 6 pages: 0000000000000001 0000000000000002 0000000000000003 0000000000000004 …",
    ]
    assert (done.exit_code, done.stderr) == (1, "error: UNAVAILABLE: draining\n")


def test_json_has_everything() -> None:
    """A batch a line."""
    state, batch = map(json.loads, CliRunner().invoke(app, ["events", "--json"]).stdout.splitlines())
    assert (state["sequence"], state["timestamp"], state["state"]) == (7, 5.0, {"index": 0, "count": 1, "num_pages": 2})
    assert state["events"][1] == {
        "type": "stored",
        "hashes": ["0000000000000001", "0000000000000002"],
        "parent": None,
        "tokens": [0, 1, 2, 3],
        "page_size": 2,
        "cache_namespace": "tenant",
    }
    assert (batch["state"], batch["events"][1]["type"], len(batch["events"][1]["hashes"])) == (None, "removed", 6)
