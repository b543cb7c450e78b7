"""Every command of README and docs is run: here, page by page and as it stands but for ports, hosts, files and the model; or by
the test that is named here. A command that is in neither place fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from page_commands import Command, Places, commands_of

LIMIT_S = 90.0
LONGEST_S = 300.0  # of a command that is to end: the demo takes half a minute on a machine with nothing else to do

# Commands that another test, or CI itself, runs; each with where. The part after `::` must stand in that file.
ELSEWHERE = {
    r"make (venv|check|test)\b": ".ci/run::make {0}",
    r"make (smoke|model)\b": "tests/smoke/test_accuracy_smoke.py::def test_",
    r"pip install": "tests/contract/test_packaging.py::def test_metadata_keeps_torch_in_an_extra",
    r"pre-commit install": "tests/contract/test_conventions.py::def test_",
    r"docker compose": "tests/contract/test_compose.py::def test_services_are_those_that_the_page_tells_of",
    r"curl http://127.0.0.1:8080/v1/models": "tests/e2e/test_page_commands.py::/v1/models",
    r"kubectl ": "tests/contract/test_kubernetes.py::def test_manifests_fit_the_schema",
    r"python -m pytest tests/cases": "tests/contract/test_cases.py::def test_",
    r"python benchmarks/soak.py": "tests/e2e/test_chaos.py::soak",
    r"curl .*/v1/chat/completions": "tests/e2e/test_http_openai.py::def test_examples_of_the_pages_answer",
}
SERVERS = {"up", "scheduler", "runtime", "frontend"}
ROOT = Path(__file__).parents[2]
PAGES = {page: list(group) for page, group in itertools.groupby(commands_of(ROOT), key=lambda command: command.page)}


def _elsewhere(command: Command) -> str | None:
    text = " ".join(command.words)
    for pattern, where in ELSEWHERE.items():
        if match := re.match(pattern, text):
            return where.format(*match.groups())
    return None


def _is_here(command: Command) -> bool:
    return _elsewhere(command) is None


def _is_server(command: Command) -> bool:
    words = command.words
    return words[0] == "smg" or (words[:1] == ["pagemirror"] and words[1] in SERVERS and "--print-plan" not in words)


@pytest.mark.parametrize("command", [c for c in commands_of(ROOT) if not _is_here(c)], ids=lambda c: c.where)
def test_place_that_is_named_runs_it(command: Command) -> None:
    """The file that is said to run a command exists and has the words that are meant."""
    file, _, words = str(_elsewhere(command)).partition("::")
    assert words in (ROOT / file).read_text()


def test_pages_have_commands() -> None:
    """The commands are found: a page that shows none any more would otherwise pass by itself."""
    assert len(PAGES["README.md"]) >= 10
    assert sum(map(len, PAGES.values())) >= 50
    assert next(c.words for c in PAGES["README.md"]) == ["make", "demo"]


class Page:
    """The processes that the commands of one page have started."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.places = Places(folder, ROOT)
        self.folder = folder
        self.env = env
        self.servers: list[tuple[set[str], asyncio.subprocess.Process]] = []

    async def run(self, words: list[str], *, shell: str | None = None) -> str:
        """To the end; the output. Its status must be 0, or 1 for the policy that is there to be seen failing."""
        pipe = asyncio.subprocess.PIPE
        options: dict[str, Any] = {"env": self.env, "cwd": self.folder, "stdout": pipe, "stderr": pipe}
        if shell is not None:
            process = await asyncio.create_subprocess_exec("bash", "-ec", shell, **options)
        else:
            process = await asyncio.create_subprocess_exec(*words, **options)
        async with asyncio.timeout(LONGEST_S):
            out, err = await process.communicate()
        assert process.returncode == int("tail_only" in words), f"{words or shell}: {err.decode()}"
        return out.decode()

    async def serve(self, words: list[str]) -> None:
        """Start a server, once those are gone that have its ports, and wait until it serves."""
        ports = {port for port in self.places.ports.values() if any(port in word for word in words[1:])}
        own = {port for port, word in itertools.product(ports, self._listens(words)) if port in word}
        for held, process in list(self.servers):
            if held & own:
                await self._end(process)
                self.servers.remove((held, process))
        if "--runtime" in words:
            await self._have_runtime(words[words.index("--runtime") + 1])
        log = (self.folder / f"log-{len(self.servers)}").open("wb")
        with log:
            process = await asyncio.create_subprocess_exec(
                *words, env=self.env, cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        self.servers.append((own, process))
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            if words[0] == "smg":
                await self._until_served(words[words.index("--port") + 1], process)
            else:
                line = (await process.stdout.readline()).decode()
                assert " ready on " in line, f"{words}: {line!r}; {Path(log.name).read_text()}"

    @staticmethod
    def _listens(words: list[str]) -> list[str]:
        options = {"--port", "--http", "--listen", "--gateway-listen", "--metrics-port"}
        found = [words[i + 1] for i, word in enumerate(words) if word in options]
        if words[1:2] == ["scheduler"] and "--listen" not in words:
            found.append("127.0.0.1:50051")
        return found

    async def _have_runtime(self, address: str) -> None:
        """A runtime at that address, where the page has started none."""
        if any(address.rpartition(":")[2] in held for held, _ in self.servers):
            return
        await self.serve(["pagemirror", "runtime", "--listen", address])

    async def _until_served(self, port: str, process: asyncio.subprocess.Process) -> None:
        def ask() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                    return b'"id"' in answer.read()
            except (urllib.error.URLError, OSError):
                return False

        while not await asyncio.to_thread(ask):
            assert process.returncode is None, "smg has ended"
            await asyncio.sleep(0.1)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            await process.communicate()

    async def close(self) -> None:
        """End what still runs, the last one first."""
        for _, process in reversed(self.servers):
            try:
                await self._end(process)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@pytest.fixture
async def page(short_tmp: Path, child_env: dict[str, str]) -> AsyncIterator[Page]:
    page = Page(short_tmp, child_env)
    try:
        yield page
    finally:
        await page.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, commands in PAGES.items() if any(map(_is_here, commands))])
async def test_commands_of_a_page_run(name: str, page: Page) -> None:
    """One after the other, as a reader would: servers say that they are ready, everything else ends with status 0."""
    here = [command for command in PAGES[name] if _is_here(command) and command.words[0] != "openssl"]
    if any("--tls-cert" in command.words for command in here):
        await page.run([], shell=_certificates())
        await page.run([], shell=_tokens())
    for command in here:
        words = page.places.words(command)
        if words[:2] == ["make", "demo"]:
            words = ["pagemirror", "demo", "--model", str(ROOT / "models/smollm2-135m-instruct")]
        if _is_server(command):
            await page.serve(words)
        elif ">" in words:
            await page.run([], shell=command.text)
        else:
            output = await page.run(words)
            assert output
            if words[1] == "demo":
                assert re.fullmatch(r"OK: \d+ steps, \d+ rows compared, mirror == scheduler rows", output.splitlines()[-1])


def _certificates() -> str:
    """The first block of commands of the page about security, as a script, for one host more."""
    block = re.search(r"^```console\n(.*?)^```", (ROOT / "docs/security.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1].replace("$ openssl", "openssl").replace("$ for who in ", "for who in scheduler ")


def _tokens() -> str:
    """The command of that page that makes a token, and what its client has of it."""
    (command,) = (command for command in PAGES["docs/security.md"] if "token_urlsafe" in command.text)
    return f"{command.text}; cp tokens my-token"
