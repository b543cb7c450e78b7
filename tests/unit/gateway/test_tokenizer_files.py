"""The tokenizer as an archive: what is in it, and that it is the same wherever it is made."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from scheduler_service.errors import NoTokenizerError
from scheduler_service.gateway.byte_tokenizer import byte_tokenizer
from scheduler_service.gateway.tokenizer_files import CHUNK_BYTES, TokenizerFiles, make_archive, read_folder

FILES = {
    "tokenizer_config.json": b'{"model_max_length": 10}',
    "generation_config.json": b'{"temperature": 0.5}',
    "chat_template.jinja": b"{{ messages }}",
    "spiece.model": os.urandom(3 * CHUNK_BYTES),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, weights included."""
    path = tmp_path / "model"
    path.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "train.py").write_bytes(b"print()")
    (path / "nested.model").mkdir()
    return path


def test_archive_has_the_tokenizer_and_nothing_else(folder: Path) -> None:
    """Files that tell how text becomes tokens, unchanged; no weights, no code, no folders."""
    archive = make_archive(read_folder(str(folder)))
    assert archive.sha256 == hashlib.sha256(archive.data).hexdigest()
    assert b"".join(archive.chunks()) == archive.data
    assert len(archive.chunks()) > 3
    assert max(map(len, archive.chunks())) == CHUNK_BYTES
    with zipfile.ZipFile(io.BytesIO(archive.data)) as found:
        assert {name: found.read(name) for name in found.namelist()} == FILES | {
            "tokenizer.json": (folder / "tokenizer.json").read_bytes()
        }


def test_archive_is_the_same_for_the_same_files(folder: Path) -> None:
    """Times of files are not in it, so that every replica sends the same bytes."""
    before = make_archive(read_folder(str(folder)))
    os.utime(folder / "tokenizer.json", (0, 0))
    assert make_archive(read_folder(str(folder))) == before


async def test_files_that_are_not_here(tmp_path: Path) -> None:
    """A model without a tokenizer, and one whose folder is on another machine, are told with what to do."""
    for path in ("", str(tmp_path / "elsewhere")):
        files = TokenizerFiles(None)
        with pytest.raises(NoTokenizerError, match="--gateway-tokenizer"):
            await files.archive(path)
        with pytest.raises(NoTokenizerError):
            await files.decoder(path, skip_special=True)
        assert await files.config(path, "config.json") == {}


async def test_named_folder_goes_before_the_runtimes(folder: Path) -> None:
    """A folder of the settings is used whatever the runtime says; files appear once and are kept."""
    files = TokenizerFiles(folder)
    assert files.path("/another/machine") == str(folder)
    assert await files.config("/another/machine", "generation_config.json") == {"temperature": 0.5}
    decode = await files.decoder("", skip_special=False)
    assert decode([0]) == "a"
    assert await files.archive("") is await files.archive("/another/machine")


async def test_byte_level_model_has_a_tokenizer_without_files() -> None:
    """Ids are bytes, those above are special; it is made when there is no folder, and encodes any text and back."""
    files = TokenizerFiles(None)
    files.generate(byte_tokenizer(259, (257,)))
    text = "naïve €uro 😀\n\0"
    decode = await files.decoder("", skip_special=True)
    assert decode([257, *text.encode(), 256]) == text
    archive = await files.archive("")
    with zipfile.ZipFile(io.BytesIO(archive.data)) as found:
        tokenizer = Tokenizer.from_str(found.read("tokenizer.json").decode())
        config = json.loads(found.read("tokenizer_config.json"))
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.get_vocab_size() == 259
    assert config["eos_token"] == "<|257|>"
    assert byte_tokenizer(49_152, ()) == {}


async def test_broken_configuration_counts_as_none(folder: Path) -> None:
    """What is no JSON object says nothing."""
    (folder / "config.json").write_text("[1, 2")
    assert await TokenizerFiles(folder).config("", "config.json") == {}
