"""Bearer tokens: one a line in a file, which is read again when it changes."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from scheduler_service.errors import StartError

log = structlog.get_logger("pagemirror.tokens")

MIN_TOKEN_LEN = 16
MAX_TOKEN_LEN = 4096
MAX_TOKENS = 64

_SCHEME = "bearer "


class TokenFileError(StartError):
    """The file has no token that can be used; the message names file and line and never shows what is in it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"token file {path}: {reason}")


class TokenFile:
    """Tokens of a server, each of which admits, or of a client, which shows the first.

    Lines that are empty or begin with `#` are skipped. When the file cannot be used any more, the last good tokens stay valid
    and the log says so: an empty file must not open the door, nor a slip of the editor close it.

    Raises:
        TokenFileError: the file cannot be used now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._tokens = self._read()
        self._said = ""

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata shows one of the tokens: `authorization: Bearer TOKEN`, once."""
        shown = [value for key, value in metadata or () if key == "authorization"]
        if len(shown) != 1 or not isinstance(shown[0], str) or shown[0][: len(_SCHEME)].lower() != _SCHEME:
            return False
        token = shown[0][len(_SCHEME) :].strip().encode()
        # All of them, always: the time taken tells nothing about which one is nearly right.
        return sum(hmac.compare_digest(token, valid) for valid in self._current()) > 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client sends with a call."""
        return (("authorization", f"Bearer {self._current()[0].decode()}"),)

    def texts(self) -> list[str]:
        """All of them as they are now, for a program that is handed them once."""
        return [token.decode() for token in self._current()]

    def _current(self) -> list[bytes]:
        stamp = self._look()
        if stamp != self._stamp:
            try:
                self._tokens = self._read()
            except TokenFileError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    log.error("tokens_not_reloaded", reason=self._said)
            else:
                self._stamp, self._said = stamp, ""
                log.info("tokens_reloaded", path=str(self._path), count=len(self._tokens))
        return self._tokens

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> list[bytes]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise TokenFileError(self._path, error.strerror or "cannot be read") from None
        tokens = []
        for number, line in enumerate(lines, start=1):
            token = line.strip()
            if not token or token.startswith(b"#"):
                continue
            if not MIN_TOKEN_LEN <= len(token) <= MAX_TOKEN_LEN:
                limits = f"{MIN_TOKEN_LEN} to {MAX_TOKEN_LEN}"
                raise TokenFileError(self._path, f"line {number}: a token has {limits} characters, this one {len(token)}")
            if not all(0x21 <= byte <= 0x7E for byte in token):
                raise TokenFileError(self._path, f"line {number}: a token has printable ASCII characters and no spaces")
            tokens.append(token)
        if not 1 <= len(tokens) <= MAX_TOKENS:
            raise TokenFileError(self._path, f"holds {len(tokens)} tokens, but must hold 1 to {MAX_TOKENS}")
        return tokens
