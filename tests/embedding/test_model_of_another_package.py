"""A model that another package adds by an entry point runs behind RuntimeService, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime_service import Capacity, RuntimeClient, RuntimeSettings, SettingsError, executors, open_runner
from runtime_service.executors.fingerprint import FingerprintExecutor

PLUGIN = '''
from dataclasses import replace

from runtime_service import Capacity, ModelInfo
from runtime_service.executors.fingerprint import FingerprintExecutor


class Acme(FingerprintExecutor):
    """Somebody's own model."""

    argument = ""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, name=f"acme-{self.argument}")


def create(settings):
    model = Acme(num_pages=8, page_size=settings.page_size)
    model.argument = settings.model.partition(":")[2]
    return model, Capacity(num_pages=8, max_pages_per_row=4)


def broken(settings):
    raise OSError("no licence file")
'''


NAMES = "'fingerprint' nor 'tiny' nor the path of an existing directory"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package acme is installed, as far as importlib.metadata can tell."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme.py").write_text(PLUGIN)
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagemirror.executors]\nacme = acme:create\nbroken = acme:broken\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "runtime_service", "--page-size", "4", *options]


def test_named_model_serves(environment: dict[str, str], tmp_path: Path) -> None:
    """`--model acme:ANYTHING` calls the entry point with the settings; its capacity and its name are those of the hello."""
    address = f"unix:{tmp_path}/acme.sock"
    command = _command("--model", "acme:large", "--listen", address)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "(model acme-large, " in process.stdout.readline()
            with RuntimeClient(address) as runtime:
                assert (runtime.info.num_pages, runtime.info.max_pages_per_row) == (8, 4)
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("broken", "error: --model: broken failed in acme:broken: OSError('no licence file')"),
        (
            "emca",
            f"error: --model: emca is neither {NAMES}, nor a model of another package (acme, broken)",
        ),
    ],
)
def test_model_that_cannot_be_had_is_named(environment: dict[str, str], model: str, expected: str) -> None:
    """A factory that fails and a name that nobody has: one line, and exit status 1."""
    done = subprocess.run(
        _command("--model", model, "--listen", "127.0.0.1:0"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert expected in done.stderr.splitlines()


FINE = Capacity(num_pages=8, max_pages_per_row=4)
NONSENSE = {
    "nothing": (None, TypeError, r"returns \(ModelExecutor, Capacity\), not None"),
    "alone": (FingerprintExecutor(8, 4), TypeError, r"returns \(ModelExecutor, Capacity\)"),
    "number": ((FingerprintExecutor(8, 4), 8), TypeError, "is a Capacity, not 8"),
    "no pages": ((FingerprintExecutor(8, 4), Capacity(0, 4)), ValueError, "at least a page"),
    "no model": ((None, FINE), TypeError, "'NoneType' is no ModelExecutor, it has no warm_up and no start_leases"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_is_no_model_is_told(name: str) -> None:
    """A creator given to `open_runner` that returns something else: what was expected stands in the error."""
    made, kind, text = NONSENSE[name]
    with pytest.raises(kind, match=text):
        open_runner(RuntimeSettings(page_size=4), lambda settings: made)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("loaded", [lambda settings: (object(), FINE), lambda settings: None, lambda: None, sys])
def test_entry_point_that_makes_no_model_is_a_setting_that_cannot_be_used(
    loaded: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else than a model, a function of no arguments, a module: each names option and entry point."""
    point = SimpleNamespace(name="acme", value="acme:create", load=lambda: loaded)
    monkeypatch.setattr(executors, "entry_points", lambda group: [point])
    with pytest.raises(SettingsError, match=r"--model: acme failed in acme:create: TypeError"):
        open_runner(RuntimeSettings(model="acme"))


def test_facts_of_a_model_are_its_own_kind() -> None:
    """`info` is a ModelInfo, not something like it."""

    class Acme(FingerprintExecutor):
        info = {"name": "acme"}  # type: ignore[assignment]  # noqa: RUF012

    with pytest.raises(TypeError, match="info of 'Acme' is a ModelInfo, not"):
        open_runner(RuntimeSettings(page_size=4), lambda settings: (Acme(8, 4), FINE))


def test_name_that_two_packages_claim_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two models is meant cannot be told."""
    points = [EntryPoint("acme", value, executors.ENTRY_POINTS) for value in ("acme:create", "emca:create")]
    monkeypatch.setattr(executors, "entry_points", lambda group: points)
    with pytest.raises(SettingsError, match="--model: acme:large is both acme:create and emca:create, of two packages"):
        open_runner(RuntimeSettings(model="acme:large"))
