"""Options, environment variables, and the messages for values that cannot be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_service.__main__ import start
from runtime_service.errors import AddressInUseError, SettingError, SettingsError
from runtime_service.executors import create_executor
from runtime_service.listen import claim_unix_path
from runtime_service.settings import MAX_UNIX_PATH_BYTES, load_settings, prepare_environment, uses_gpu


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PAGEMIRROR_RUNTIME_") or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)


def test_defaults_listen_on_loopback() -> None:
    """Without any setting the runtime serves on loopback only, with the exact test model."""
    settings = load_settings()
    assert (settings.listen, settings.model, settings.page_size, settings.max_rows) == (
        "127.0.0.1:50061",
        "fingerprint",
        16,
        256,
    )
    assert (settings.num_pages, settings.max_pages_per_row, settings.max_context) == (None, None, None)
    assert (settings.kv_memory_fraction, settings.kv_cache_gib) == (0.9, 1.0)


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given beats environment beats default; None counts as not given."""
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_PAGE_SIZE", "4")
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_MAX_ROWS", "7")
    settings = load_settings(page_size=8, max_rows=None)
    assert (settings.page_size, settings.max_rows) == (8, 7)


@pytest.mark.parametrize(
    "listen",
    ["127.0.0.2:1", "localhost:50061", "[::1]:65535", "127.0.0.1:0", "unix:/tmp/x.sock", "unix:" + "x" * MAX_UNIX_PATH_BYTES],
)
def test_addresses(listen: str) -> None:
    """Host and port, bracketed IPv6 and unix sockets are taken."""
    assert load_settings(listen=listen).listen == listen


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("listen", "50061", "--listen: '50061': write HOST:PORT"),
        ("listen", "host:65536", "port 65536 is above 65535"),
        ("listen", "::1:5", "write HOST:PORT"),
        ("listen", "unix:", "1 to 107 bytes, this one has 0"),
        ("listen", "unix:" + "é" * 54, "this one has 108"),
        ("model", "", "--model: ''"),
        ("device", "tpu", "--device: 'tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("dtype", "float64", "--dtype: 'float64'"),
        ("page_size", 0, "--page-size: 0: input should be greater than or equal to 1"),
        ("page_size", 257, "less than or equal to 256"),
        ("num_pages", 0, "--num-pages: 0"),
        ("max_rows", 0, "--max-rows: 0"),
        ("max_pages_per_row", 2**27, "--max-pages-per-row 134217728 times --page-size 16 is above 2147483647"),
        ("max_context", 0, "--max-context: 0"),
        ("kv_memory_fraction", 0.0, "--kv-memory-fraction: 0.0: input should be greater than 0"),
        ("kv_memory_fraction", 1.5, "less than or equal to 1"),
        ("kv_cache_gib", 0.0, "--kv-cache-gib: 0.0"),
        ("heartbeat_interval_s", 0.0, "--heartbeat-interval-s: 0.0"),
        ("exit_with_parent", 0, "--exit-with-parent: 0"),
        ("world_size", 0, "--world-size: 0"),
        ("rank", 1, "--rank 1 is not below --world-size 1; ranks count from 0"),
        ("keepalive_s", 0.0, "--keepalive-s: 0.0"),
    ],
)
def test_refused_values(name: str, value: object, message: str) -> None:
    """A value that cannot be used is refused by the option's name, with the value and the limit."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**{name: value})
    assert message in str(caught.value)


def test_refused_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad environment variable is blamed by its own name, together with every other problem."""
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_MAX_ROWS", "many")
    with pytest.raises(SettingsError) as caught:
        load_settings(page_size=0)
    assert len(caught.value.problems) == 2
    assert "--max-rows (from PAGEMIRROR_RUNTIME_MAX_ROWS): 'many'" in str(caught.value)


def test_unknown_setting_is_refused() -> None:
    """A misspelt name does not pass silently."""
    with pytest.raises(SettingsError, match="--page-sise"):
        load_settings(page_sise=4)


def test_openmp_waits_passively_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the policy is set before torch is loaded, unless the user has set another; on a GPU it is left alone."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    prepare_environment(load_settings(device="cuda"))
    assert "OMP_WAIT_POLICY" not in os.environ
    prepare_environment(load_settings(device="cpu"))
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_environment(load_settings(device="cpu"))
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_gpu_is_not_used_when_it_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` means the CPU for the test model and where every device is hidden."""
    assert not uses_gpu(load_settings())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not uses_gpu(load_settings(model="tiny"))
    assert uses_gpu(load_settings(model="tiny", device="cuda"))


def test_fingerprint_capacity() -> None:
    """The test model has stated defaults; a context gives the width of the mirror."""
    executor, capacity = create_executor(load_settings())
    assert executor.info.name == "fingerprint"
    assert (capacity.num_pages, capacity.max_pages_per_row) == (4096, 512)
    _, capacity = create_executor(load_settings(num_pages=9, page_size=4, max_context=10))
    assert (capacity.num_pages, capacity.max_pages_per_row) == (9, 3)
    _, capacity = create_executor(load_settings(num_pages=9, max_pages_per_row=5, max_context=10))
    assert capacity.max_pages_per_row == 5


def test_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    """A path that is no directory is named, before anything heavy is loaded."""
    with pytest.raises(SettingError, match=r"--model: .*missing is neither 'fingerprint' nor 'tiny' nor the path"):
        create_executor(load_settings(model=str(tmp_path / "missing")))


def test_file_in_the_way_of_a_socket_is_not_removed(tmp_path: Path) -> None:
    """Only a dead socket is cleared away, never a file."""
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(AddressInUseError, match="no socket"):
        claim_unix_path(f"unix:{path}")
    assert path.read_text() == "data"


def test_command_line(child_env: dict[str, str]) -> None:
    """`--help` teaches without loading torch; a bad value exits 2 with one line per problem and no traceback."""
    loads_torch = "import sys, runtime_service.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads_torch], env=child_env, check=False).returncode == 0
    command = [sys.executable, "-m", "runtime_service"]
    shown = subprocess.run([*command, "--help"], env=child_env, capture_output=True, text=True, check=True)
    assert "python -m runtime_service --model fingerprint" in shown.stdout
    assert "--exit-with-parent" in shown.stdout
    refused = subprocess.run(
        [*command, "--page-size", "0", "--listen", "nowhere"], env=child_env, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert [line.split(":")[1].strip() for line in refused.stderr.splitlines()] == ["--listen", "--page-size"]


def test_first_process_of_a_container_can_be_ended_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 has a handler for SIGTERM before torch is loaded, which ends it; any other process has the kernel's."""
    handlers: list[Callable[[int, None], None]] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    monkeypatch.setattr("runtime_service.app.run", lambda settings: 0)
    assert start(load_settings()) == 0
    assert handlers == []
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert start(load_settings()) == 0
    with pytest.raises(SystemExit) as ended:
        handlers[0](signal.SIGTERM, None)
    assert ended.value.code == 143
