"""scheduler_service.tokens: files of bearer tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.tokens import MAX_TOKEN_LEN, MAX_TOKENS, MIN_TOKEN_LEN, TokenFile, TokenFileError

TOKEN = "0123456789abcdef"


def shown(token: str) -> list[tuple[str, str | bytes]]:
    """Metadata of a call that shows a token."""
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


@pytest.mark.parametrize("length", [MIN_TOKEN_LEN, MAX_TOKEN_LEN])
def test_lengths_at_the_edge(tmp_path: Path, length: int) -> None:
    """The shortest and the longest token admit."""
    path = tmp_path / "tokens"
    path.write_text("x" * length)
    tokens = TokenFile(path)
    assert tokens.admits(shown("x" * length))
    assert not tokens.admits(shown("x" * (length - 1)))
    assert tokens.metadata() == (("authorization", "Bearer " + "x" * length),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds 0 tokens, but must hold 1 to 64"),
        ("# nothing\n\n", "holds 0 tokens"),
        ("x" * (MIN_TOKEN_LEN - 1), "line 1: a token has 16 to 4096 characters, this one 15"),
        (TOKEN + "\n" + "x" * (MAX_TOKEN_LEN + 1), "line 2: a token has 16 to 4096 characters, this one 4097"),
        (TOKEN + " " + TOKEN, "line 1: a token has printable ASCII characters and no spaces"),
        (TOKEN + "ü", "line 1: a token has printable ASCII characters"),
        ("\n".join(TOKEN + str(n) for n in range(MAX_TOKENS + 1)), "holds 65 tokens"),
    ],
    ids=["empty", "comments", "short", "long", "space", "umlaut", "too many"],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    """The message names the file and the line, and never shows a token."""
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(TokenFileError) as caught:
        TokenFile(path)
    assert str(caught.value).startswith(f"token file {path}: {reason}")
    assert TOKEN not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is refused, with the system's reason."""
    with pytest.raises(TokenFileError, match="No such file or directory"):
        TokenFile(tmp_path / "tokens")


def test_file_that_vanishes_or_breaks_keeps_the_last_good_tokens(tmp_path: Path) -> None:
    """What cannot be read opens no door and closes none; what can be read again counts at once."""
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    tokens = TokenFile(path)
    path.unlink()
    assert tokens.admits(shown(TOKEN))
    path.write_text("short")
    assert tokens.admits(shown(TOKEN))
    assert not tokens.admits(shown("short"))
    path.write_text(TOKEN + "2")
    assert not tokens.admits(shown(TOKEN))
    assert tokens.admits(shown(TOKEN + "2"))
    assert not tokens.admits(None)
    assert not tokens.admits([("authorization", b"Bearer " + TOKEN.encode())])
