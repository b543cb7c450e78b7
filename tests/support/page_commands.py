"""The commands of the documentation: where they stand, and how they are run on a machine where everything has another place."""

from __future__ import annotations

import re
import shlex
import socket
from dataclasses import dataclass, field
from pathlib import Path

_LANGUAGES = {"", "console", "sh", "bash", "shell"}
# What a server says when it is ready begins like a command of ours.
_OURS = r"pagemirror (?!ready|runtime ready)"
_PROGRAM = re.compile(rf"(\.venv/bin/|{_OURS}|(make|docker|kubectl|curl|pip|python|grpcurl|openssl|npm|node|smg) )")


@dataclass(frozen=True)
class Command:
    """One command as it stands on a page, continuation lines joined."""

    page: str
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """Without its comment, and with the interpreter's folder left out."""
        return [word.removeprefix(".venv/bin/") for word in shlex.split(self.text, comments=True)]


def commands_of(root: Path) -> list[Command]:
    """All commands of the pages for users, in their order."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    pages += sorted((root / "deploy").rglob("*.md"))
    return [command for page in pages for command in _commands(page, str(page.relative_to(root)))]


def _commands(path: Path, name: str) -> list[Command]:
    found: list[Command] = []
    language: str | None = None
    begun, joined = 0, ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
            continue
        if not (line.startswith("    ") if language is None else language in _LANGUAGES):
            continue
        text = line.strip().removeprefix("$ ")
        if joined:
            joined = f"{joined} {text}"
        elif _PROGRAM.match(text):
            begun, joined = number, text
        # A quoted argument or a backslash goes on in the next line.
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip()
        elif joined and joined.count("'") % 2 == 0:
            found.append(Command(name, begun, joined))
            joined = ""
    return found


@dataclass
class Places:
    """What the names on one page stand for here: ports, hosts, files and models."""

    folder: Path
    root: Path
    ports: dict[str, str] = field(default_factory=dict)

    def port(self, port: str) -> str:
        """A free one, the same each time; the page's 0 stays."""
        if port not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[port] = str(probe.getsockname()[1])
        return self.ports[port]

    def words(self, command: Command) -> list[str]:
        """The words of the command, each for here."""
        words = command.words
        here = [word for i in range(len(words)) for word in self._words(words, i)]
        # A certificate names the host of the page, which is this machine.
        if any("gpu-host:" in word for word in words) and any("tls" in word for word in words):
            here += ["--runtime-tls-name", "gpu-host"]
        if any("llm.example:" in word for word in words):
            here += ["--tls-name", "llm.example"]
        return here

    def _words(self, words: list[str], i: int) -> list[str]:
        word = self._word(words, i)
        if "*" in word:
            return sorted(map(str, Path(word).parent.glob(Path(word).name)))
        return [word]

    def _word(self, words: list[str], i: int) -> str:
        word, before = words[i], words[i - 1] if i else ""
        if before in {"--port", "--http", "--metrics-port"}:
            return self.port(word)
        if before == "--model":
            # What is tried is the command, not the model: one that loads at once.
            looks_only = "--print-plan" in words or "doctor" in words
            return str(self.root / word) if looks_only else "tiny" if "smollm2" in word else word
        word = re.sub(
            r"\b(127\.0\.0\.1|0\.0\.0\.0|gpu-host|llm\.example):(\d+)", lambda m: f"127.0.0.1:{self.port(m[2])}", word
        )
        if word.startswith("unix:/"):
            return f"unix:{self.folder}/{Path(word).name}"
        if before in {"--tls-cert", "--tls-key", "--tls-ca", "--token-file"} or before.startswith("--runtime-tls"):
            return str(self.folder / word)
        if word.startswith("examples/"):
            return str(self.root / word)
        return word
