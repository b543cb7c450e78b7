"""scheduler_service.up: where the socket between the two processes lies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from scheduler_service.errors import StartError
from scheduler_service.up import UpOptions, run_up, socket_base


def test_socket_lies_in_tmpdir_unless_its_name_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A unix socket's path has about 100 bytes; a deeper TMPDIR is passed over for /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert socket_base() == "/var/tmp"
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert socket_base() == "/tmp"


def test_no_place_for_the_socket_is_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither will do, nothing is started and the message says why."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(StartError, match="no directory for the socket"):
        run_up(UpOptions(listen="127.0.0.1:0"))
