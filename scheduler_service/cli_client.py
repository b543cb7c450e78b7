"""Bodies of the commands that talk to a running scheduler: `generate` and `rows`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scheduler_service.client import Client, ClientRows, Ending, Piece, RpcFailedError
from scheduler_service.client_security import ClientSecurity
from scheduler_service.errors import StartError
from scheduler_service.text import TextCodec, TextError, load_codec


class _Output:
    """Stdout, and whether the cursor stands at the start of a line."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._in_line = False

    def write(self, text: str) -> None:
        """Write and flush: the reader watches tokens as they come."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """A line break, unless the line is empty."""
        if self._in_line:
            self.write("\n")

    def show(self, piece: Piece, words: list[str], *, is_text: bool) -> None:
        """The tokens of a piece: as JSON, or their words on stdout with log probabilities, where asked for, on stderr.

        `words` has what is written for each token: a piece of text, or the token id after a separator.
        """
        for index, (token, word) in enumerate(zip(piece.tokens, words, strict=True)):
            if self.as_json:
                text = {"text": word} if is_text else {}
                self.write(json.dumps({"token": token} | text | _logprobs(piece, index)) + "\n")
                continue
            self.write(word)
            if piece.logprobs:
                name = f"{token} {word!r}" if is_text else str(token)
                top = ", ".join(f"{other} {value:.4f}" for other, value in piece.top_logprobs[index] if other >= 0)
                print(f"{name}: {piece.logprobs[index]:.4f}{' | ' + top if top else ''}", file=sys.stderr)

    def finish(self, rest: str, ending: Ending | None) -> None:
        """What is left of the text, and the end of the line, or of the JSON."""
        if not self.as_json:
            self.write(rest)
            self.end_line()
        elif ending is not None:
            self.write(json.dumps(({"text": rest} if rest else {}) | asdict(ending)) + "\n")


def _logprobs(piece: Piece, index: int) -> dict[str, Any]:
    if not piece.logprobs:
        return {}
    top = [{"token": token, "logprob": value} for token, value in piece.top_logprobs[index] if token >= 0]
    return {"logprob": piece.logprobs[index], "top_logprobs": top}


def generate(
    target: str,
    *,
    tokens: list[int] | None,
    prompt: str | None,
    chat: bool,
    tokenizer: Path | None,
    show_stats: bool,
    as_json: bool,
    options: dict[str, Any],
    security: dict[str, Any],
) -> int:
    """Stream one request to stdout: token ids where tokens were given, text where a prompt was. Returns the exit status."""
    out = _Output(as_json)
    try:
        secured = ClientSecurity.of(**security)
        if tokens is not None:
            ending = asyncio.run(_generate_tokens(out, target, secured, tokens, options))
        else:
            ending = asyncio.run(_generate_text(out, target, secured, prompt or "", chat, tokenizer, options))
    except (RpcFailedError, TextError, StartError) as error:
        out.end_line()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        out.end_line()
        return 130
    if show_stats and ending is not None:
        print(
            f"{ending.reason}: {ending.prompt_tokens} prompt tokens ({ending.cached_tokens} cached),"
            f" {ending.completion_tokens} returned, {ending.num_retractions} retractions",
            file=sys.stderr,
        )
    return 0


async def _generate_tokens(
    out: _Output, target: str, security: ClientSecurity, tokens: list[int], options: dict[str, Any]
) -> Ending | None:
    ending = None
    separator = ""
    async with Client(target, security) as client:
        async for piece in client.generate(tokens, **options):
            words = []
            for token in piece.tokens:
                words.append(f"{separator}{token}")
                separator = " "
            out.show(piece, words, is_text=False)
            ending = piece.ending or ending
    out.finish("", ending)
    return ending


async def _generate_text(
    out: _Output,
    target: str,
    security: ClientSecurity,
    prompt: str,
    chat: bool,
    tokenizer: Path | None,
    options: dict[str, Any],
) -> Ending | None:
    ending = None
    async with Client(target, security) as client:
        codec = await _codec(client, tokenizer)
        tokens = codec.encode_chat(prompt) if chat else codec.encode(prompt)
        decoder = codec.decoder(tokens)
        async for piece in client.generate(tokens, **options):
            out.show(piece, [decoder.push([token]) for token in piece.tokens], is_text=True)
            ending = piece.ending or ending
    out.finish(decoder.finish(), ending)
    return ending


async def _codec(client: Client, tokenizer: Path | None) -> TextCodec:
    served = await client.info()
    return load_codec(served.model, served.architecture, served.tokenizer_path, tokenizer)


def show_rows(target: str, *, security: dict[str, Any], as_json: bool) -> int:
    """Print every row in use beside the mirror's. Returns 0 when all are equal, else 1."""
    try:
        found = asyncio.run(_rows(target, ClientSecurity.of(**security)))
    except (RpcFailedError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print_table(found)
    return 0 if all(row.equal for row in found.rows) else 1


async def _rows(target: str, security: ClientSecurity) -> ClientRows:
    async with Client(target, security) as client:
        return await client.rows()


def _print_table(found: ClientRows) -> None:
    console = Console()
    title = f"step {found.step} of session {found.session_no}: "
    if not found.rows:
        console.print(Text(title + "no row is in use"))
        return
    table = Table(
        "row", "request", "state", "scheduler pages", "mirror pages", "equal", title=title + f"{len(found.rows)} rows"
    )
    for row in found.rows:
        # Text, not str: a request's id may look like markup.
        table.add_row(
            str(row.row),
            Text(row.request_id),
            row.state,
            Text(_pages(row.scheduler_pages)),
            Text(f"rank {row.rank}: " * bool(row.rank) + _pages(row.mirror_pages), style="" if row.equal else "bold red"),
            Text("yes") if row.equal else Text("NO", style="bold red"),
        )
    console.print(table)


def _pages(pages: list[int]) -> str:
    return " ".join(str(page) for page in pages)
