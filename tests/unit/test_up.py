"""scheduler_service.up: where the socket between the two processes lies, and when a runtime is started again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from scheduler_service.children import RestartPolicy
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


@pytest.mark.parametrize("status", [1, 2, 17])
def test_runtime_that_cannot_start_is_not_started_again(status: int) -> None:
    """A status of its own before it ever served will not change; that of a bad configuration never does."""
    assert RestartPolicy().next_pause(status, now=10.0) is None


def test_bad_configuration_is_final_even_after_service() -> None:
    """Status 2 is the configuration's fault, whatever was before."""
    policy = RestartPolicy()
    policy.note_ready()
    assert policy.next_pause(2, now=10.0) is None


def test_fifth_death_within_a_minute_is_the_last() -> None:
    """Pauses grow from none, and the fifth death in 60 s without service in between is not followed by a start."""
    policy = RestartPolicy()
    policy.note_ready()
    assert [policy.next_pause(-9, now=float(second)) for second in range(5)] == [0.0, 0.25, 0.5, 1.0, None]


@pytest.mark.parametrize("status", [-9, 0, 1])
def test_deaths_that_are_long_ago_or_before_service_do_not_count(status: int) -> None:
    """Each death a minute after the last, or with service in between, is met with a start at once."""
    policy = RestartPolicy()
    policy.note_ready()
    assert [policy.next_pause(status, now=61.0 * number) for number in range(12)] == [0.0] * 12
    policy.note_ready()
    for second in range(12):
        assert policy.next_pause(status, now=1000.0 + second) == 0.0
        policy.note_ready()


def test_killed_before_it_ever_served_is_started_again() -> None:
    """A signal is no refusal: somebody, or the kernel, took it away."""
    policy = RestartPolicy()
    assert policy.next_pause(-9, now=0.0) == 0.0
    assert policy.next_pause(1, now=1.0) is None
