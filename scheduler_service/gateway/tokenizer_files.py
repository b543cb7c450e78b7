"""The tokenizer of the model that is served: to look for stop strings, and as the archive that a gateway fetches."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler_service.errors import NoTokenizerError
from scheduler_service.gateway.stops import Decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_T = TypeVar("_T")

CHUNK_BYTES = 64 * 1024
"""Of the archive, in one message."""

_NAMES = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
_SUFFIXES = {".jinja", ".model", ".tiktoken"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that an archive can hold


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip of a tokenizer's files, and its SHA-256 in hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> list[bytes]:
        """The data in parts of at most CHUNK_BYTES."""
        return [self.data[start : start + CHUNK_BYTES] for start in range(0, len(self.data), CHUNK_BYTES)]


class TokenizerFiles:
    """Files of one folder; each is read when it is first wanted, on a thread.

    Args:
        folder: of the settings; None: the runtime says.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._generated: dict[str, bytes] = {}
        self._made: dict[str, asyncio.Task[Any]] = {}

    def path(self, tokenizer_path: str) -> str:
        """Where the files lie, when the runtime says `tokenizer_path`; empty where there is no tokenizer."""
        return str(self._folder) if self._folder is not None else tokenizer_path

    def generate(self, files: dict[str, bytes]) -> None:
        """What stands for the files of a model that has none, by their names; `tokenizer.json` at least."""
        self._generated = files

    def _read(self, path: str) -> dict[str, bytes]:
        return dict(self._generated) if self._generated and not path else read_folder(path)

    async def decoder(self, tokenizer_path: str, *, skip_special: bool) -> Decode:
        """How tokens are written as text. Raises NoTokenizerError."""
        path = self.path(tokenizer_path)
        tokenizer = await self._once(f"tokenizer {path}", lambda: _tokenizer(self._read(path)["tokenizer.json"]))
        return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=skip_special))

    async def archive(self, tokenizer_path: str) -> Archive:
        """The files for a gateway. Raises NoTokenizerError."""
        path = self.path(tokenizer_path)
        return await self._once(f"archive {path}", lambda: make_archive(self._read(path)))

    async def config(self, tokenizer_path: str, name: str) -> dict[str, Any]:
        """A JSON file beside the tokenizer; empty where there is none."""
        path = self.path(tokenizer_path)
        return await self._once(f"{name} {path}", lambda: _read_json(path, name))

    async def _once(self, key: str, make: Callable[[], _T]) -> _T:
        task = self._made.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._made[key] = asyncio.create_task(asyncio.to_thread(make))
        return await asyncio.shield(task)  # one caller's end must not end it for the others


def read_folder(path: str) -> dict[str, bytes]:
    """Everything in the folder that tells how text becomes tokens and back, by name. Raises NoTokenizerError."""
    if not path or not (Path(path) / "tokenizer.json").is_file():
        raise NoTokenizerError(path)
    files = [file for file in Path(path).iterdir() if file.name in _NAMES or file.suffix in _SUFFIXES]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def make_archive(files: dict[str, bytes]) -> Archive:
    """These files as a zip; the same bytes wherever it is made."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def _tokenizer(content: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(content.decode())


def _read_json(path: str, name: str) -> dict[str, Any]:
    if not path or not (file := Path(path) / name).is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
