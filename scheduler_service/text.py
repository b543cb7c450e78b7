"""Text ↔ token ids: Hugging Face tokenizers with their chat templates, and plain bytes.

The packages `tokenizers` and `jinja2` come with the extra `text` and are imported when a tokenizer is loaded.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from scheduler_service.core.errors import PagemirrorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
_REPLACEMENT = "\ufffd"
_NUM_CONTEXT = 8


class TextError(PagemirrorError):
    """Text cannot be turned into tokens, or back; the message says what to do."""


class TextDecoder(Protocol):
    """Turns one request's tokens into text as they come, never half a character."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens; what may still change is held back."""

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that never became a character."""


class TextCodec(Protocol):
    """A model's way to write tokens as text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer itself puts around one."""

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a conversation of one user message, ready for the answer. Raises TextError without a template."""

    def decoder(self, prompt: Sequence[int] = ()) -> TextDecoder:
        """A decoder for what follows this prompt; special tokens give no text."""


def load_codec(model: str, architecture: str, tokenizer_path: str, override: Path | None = None) -> TextCodec:
    """The codec for what a server says of itself; `override` is a directory that the user named.

    Raises:
        TextError: the model has no tokenizer, its files are not here, or the extra `text` is not installed.
    """
    if override is not None:
        return HuggingFaceCodec(override)
    if tokenizer_path:
        path = Path(tokenizer_path)
        if not (path / "tokenizer.json").is_file():
            raise TextError(
                f"the server's tokenizer lies in {path}, which this machine does not have: name a copy with --tokenizer"
            )
        return HuggingFaceCodec(path)
    if is_byte_level(model, architecture):
        return ByteCodec()
    raise TextError(f"model {model!r} has no tokenizer: send --tokens, or name a tokenizer's directory with --tokenizer")


def is_byte_level(model: str, architecture: str) -> bool:
    """Whether a model without a tokenizer has bytes for tokens."""
    return "byte" in architecture.lower() or model == "tiny"


class ByteCodec:
    """Ids 0 … 255 are the bytes of UTF-8, everything above is special."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def encode_chat(self, text: str) -> list[int]:
        """Raises TextError: bytes know no conversation."""
        raise TextError("a byte-level model has no chat template: leave --chat out")

    def decoder(self, prompt: Sequence[int] = ()) -> TextDecoder:
        """See TextCodec. What precedes does not change how bytes are written."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in tokens if 0 <= token < NUM_BYTES))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceCodec:
    """`tokenizer.json`, and the chat template of `chat_template.jinja` or `tokenizer_config.json`, of one directory."""

    def __init__(self, directory: Path) -> None:
        """Raises TextError: no such files, or the extra `text` is missing."""
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        self._config = _read_json(directory / "tokenizer_config.json")

    def encode(self, text: str) -> list[int]:
        """See TextCodec."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, text: str) -> list[int]:
        """See TextCodec."""
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation of `{"role", "content"}` messages, ready for the answer. Raises TextError."""
        return list(self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model was trained to see it, up to where its answer begins.

        Raises:
            TextError: there is no template, or it refuses these messages.
        """
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            _missing("jinja2", error)
        # The settings with which templates of model repositories are written and tested.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            template = environment.from_string(self._template())
            return str(template.render(messages=messages, add_generation_prompt=True, **self._special_tokens()))
        except TemplateError as error:
            raise TextError(f"the chat template of {self._directory} fails: {error}") from error

    def decoder(self, prompt: Sequence[int] = ()) -> TextDecoder:
        """See TextCodec."""
        return _HuggingFaceDecoder(self._tokenizer, prompt)

    def _template(self) -> str:
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        if not isinstance(template, str):
            raise TextError(f"{self._directory} has no chat template: leave --chat out")
        return template

    def _special_tokens(self) -> dict[str, str]:
        named = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                named[key] = value
        return named


class _HuggingFaceDecoder:
    """Decodes a growing window instead of single tokens: one character may be several tokens, and many tokenizers drop the
    blank before a word at the start of a text. Text is certain when it does not end in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_NUM_CONTEXT:])  # tokens already written, for context, then tokens held back
        self._num_context = len(self._window)

    def push(self, tokens: Sequence[int]) -> str:
        pieces = []
        for token in tokens:
            self._window.append(token)
            before, after = self._decode(self._window[: self._num_context]), self._decode(self._window)
            if len(after) > len(before) and not after.endswith(_REPLACEMENT):
                pieces.append(after[len(before) :])
                self._window = self._window[self._num_context :]
                self._num_context = len(self._window)
        return "".join(pieces)

    def finish(self) -> str:
        before, after = self._decode(self._window[: self._num_context]), self._decode(self._window)
        self._num_context = len(self._window)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        _missing("tokenizers", error)
    if not path.is_file():
        raise TextError(f"no tokenizer.json in {path.parent}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for files it cannot read
        raise TextError(f"{path} is no tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _refuse_messages(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _missing(package: str, error: ImportError) -> NoReturn:
    raise TextError(f"text needs the package {package}: pip install 'pagemirror[text]'") from error
