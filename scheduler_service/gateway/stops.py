"""Stop strings, looked for while tokens come: the request ends at the token that completes one.

Work per token is bounded. A few tokens are decoded together, since one character may be several tokens and many tokenizers drop
the blank before a word at the start of a text; text counts when it no longer ends in the middle of a character. It is searched
with as much of what came before as a stop string can have begun in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_service.core.errors import BadParameterError

MAX_STOP_STRINGS = 64
"""Stop strings of one request at most."""
MAX_STOP_LEN = 1024
"""Characters of one at most."""

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT = 8  # tokens of the prompt before the output
_MAX_HELD = 8  # tokens that wait for the end of a character: more than one has bytes, so most of them are none
_MAX_PART = 3  # tokens that may be the begin of one

Decode = Callable[[list[int]], str]


def check_stop_strings(request_id: str, name: str, stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request, each once. Raises BadParameterError."""
    if len(stops) > MAX_STOP_STRINGS:
        raise BadParameterError(request_id, name, f"{len(stops)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LEN:
            shown = stop if len(stop) <= MAX_STOP_LEN else f"a string of {len(stop)} characters"
            raise BadParameterError(request_id, name, shown, f"strings of 1 to {MAX_STOP_LEN} characters")
    return tuple(dict.fromkeys(stops))


class Detokenizer:
    """Text of a growing list of tokens, in pieces that never change later.

    Args:
        decode: text of some tokens; the text of some and more tokens begins with that of some, but for a character's rest.
        context: tokens before the first, whose text is not wanted.
    """

    __slots__ = ("_decode", "_given", "_num_known", "_text", "_window")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_NUM_CONTEXT:])  # tokens before, then tokens that end in the middle of a character
        self._num_known = len(self._window)
        self._text = decode(self._window)
        self._given = len(self._text)  # characters of it that are given or not wanted

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        window = self._window
        window.append(token)
        text = self._decode(window)
        if not text.endswith(_REPLACEMENT):
            if text == self._text:  # a special token, or none of this vocabulary: it adds nothing to any text
                window.pop()
                return ""
            return self._slide(len(window), text)
        if len(window) - self._num_known > _MAX_HELD:
            # These never become a character. They are done with up to where one ends, or else but for what may still be one.
            for stop in range(len(window) - 1, self._num_known, -1):
                part = self._decode(window[:stop])
                if not part.endswith(_REPLACEMENT):
                    return self._slide(stop, part)
            stop = len(window) - _MAX_PART
            return self._slide(stop, self._decode(window[:stop]))
        self._text = text
        certain = len(text.rstrip(_REPLACEMENT))
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _slide(self, stop: int, text: str) -> str:
        """Be done with the tokens up to `stop`, whose text is `text`: what of it was not given. They precede what comes."""
        piece, more = text[self._given :], max(0, self._given - len(text))
        self._window = self._window[self._num_known :]
        self._num_known = stop - self._num_known
        known = self._decode(self._window[: self._num_known])
        self._given = len(known) + more
        self._text = known if self._num_known == len(self._window) else self._decode(self._window)
        return piece


class StopStrings:
    """Which of these strings the text of some tokens has first: the one that ends first; of several the longest.

    Args:
        min_tokens: a string that ends within so many tokens does not count.
    """

    __slots__ = ("_count", "_min_tokens", "_stops", "_tail", "_tail_len", "_text")

    def __init__(self, text: Detokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._text = text
        self._stops = stops
        self._min_tokens = min_tokens
        self._count = 0
        self._tail_len = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """The string that the text has with this token; None: none yet."""
        self._count += 1
        piece = self._text.push(token)
        if not piece:
            return None
        tail, text = self._tail, self._tail + piece
        self._tail = text[len(text) - self._tail_len :] if len(text) > self._tail_len else text
        if self._count <= self._min_tokens:
            return None
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(tail) - len(stop) + 1))  # what ends in the tail was looked at before
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        return min(ends)[2] if ends else None
