"""Options of the engine: attention backend, graphs, the step that memory is kept for; and `up`, which passes them on."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from runtime_service import __main__ as runtime_main
from runtime_service.errors import SettingsError
from runtime_service.settings import RuntimeSettings, load_settings
from scheduler_service import cli, up


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTENTION_BACKEND", "GRAPHS", "GRAPH_BUCKETS", "MAX_STEP_TOKENS", "KV_MEMORY_FRACTION"):
        monkeypatch.delenv(f"PAGEMIRROR_RUNTIME_{name}", raising=False)


def test_defaults() -> None:
    """Kernels on a GPU, graphs on, default buckets, a step of the scheduler's default budget, nine tenths for KV."""
    settings = load_settings()
    assert (settings.attention_backend, settings.graphs, settings.graph_buckets) == ("auto", True, None)
    assert (settings.max_step_tokens, settings.kv_memory_fraction) == (2048, 0.9)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an environment variable as well, buckets in the form of the option."""
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_GRAPH_BUCKETS", "1,2,16")
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_GRAPHS", "false")
    monkeypatch.setenv("PAGEMIRROR_RUNTIME_ATTENTION_BACKEND", "torch")
    settings = load_settings()
    assert (settings.graph_buckets, settings.graphs, settings.attention_backend) == ((1, 2, 16), False, "torch")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_backend", "flash", "--attention-backend: 'flash': input should be 'auto', 'triton' or 'torch'"),
        ("graph_buckets", "", "--graph-buckets: '': write numbers of rows with commas between them"),
        ("graph_buckets", "1,,2", "--graph-buckets: '1,,2': write numbers of rows"),
        ("graph_buckets", "0,1", "--graph-buckets: '0,1': numbers of rows must be at least 1 and ascend"),
        ("graph_buckets", "2,2", "--graph-buckets: '2,2': numbers of rows must be at least 1 and ascend"),
        ("graph_buckets", "1,257", "--graph-buckets has 257, above --max-rows 256"),
        ("max_step_tokens", 0, "--max-step-tokens: 0: input should be greater than or equal to 1"),
        ("kv_memory_fraction", 1.5, "--kv-memory-fraction: 1.5: input should be less than or equal to 1"),
    ],
)
def test_refused_values(name: str, value: Any, message: str) -> None:
    """A value out of range is named with its option and its limit."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**{name: value})
    assert message in str(caught.value)


def test_up_passes_the_engines_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `up` is told of the engine reaches the runtime as settings, the token budget as the step to keep memory for."""
    seen: list[up.UpOptions] = []
    monkeypatch.setattr(up, "run_up", lambda options: seen.append(options) or 0)
    arguments = ["--model", "tiny", "--attention-backend", "torch", "--no-graphs", "--graph-buckets", "1,4"]
    arguments += ["--kv-memory-fraction", "0.5", "--token-budget", "777", "--device", "cpu"]
    done = CliRunner().invoke(cli.app, ["up", *arguments])
    assert done.exit_code == 0, done.output
    started: list[RuntimeSettings] = []
    monkeypatch.setattr(runtime_main, "start", lambda settings: started.append(settings) or 0)
    done = CliRunner().invoke(runtime_main.cli, seen[0].runtime_args)
    assert done.exit_code == 0, done.output
    settings = started[0]
    assert (settings.model, settings.attention_backend, settings.graphs, settings.graph_buckets) == (
        "tiny",
        "torch",
        False,
        (1, 4),
    )
    assert (settings.kv_memory_fraction, settings.max_step_tokens, settings.device) == (0.5, 777, "cpu")
    assert seen[0].scheduler_args[:2] == ["--token-budget", "777"]


def test_up_without_options_leaves_the_runtimes_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is passed on that was not given."""
    seen: list[up.UpOptions] = []
    monkeypatch.setattr(up, "run_up", lambda options: seen.append(options) or 0)
    assert CliRunner().invoke(cli.app, ["up", "--model", "tiny"]).exit_code == 0
    assert seen[0].runtime_args == ["--model", "tiny"]
