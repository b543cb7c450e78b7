"""Stop strings in text that comes token by token: found where a search of all the text finds them, whatever a token holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

from scheduler_service.core.errors import BadParameterError
from scheduler_service.gateway.stops import MAX_STOP_LEN, MAX_STOP_STRINGS, Detokenizer, StopStrings, check_stop_strings

REPLACEMENT = "\ufffd"
ALPHABET = "ab é€😀\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


def search(text: str, start: int, stops: list[str]) -> str | None:
    """The stop string that ends first in `text`, beyond its first `start` characters; of several the longest."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len)
    return None


def by_search(
    decode: Callable[[list[int]], str], tokens: list[int], stops: list[str], min_tokens: int
) -> tuple[int, str | None]:
    """How many tokens it takes to the first stop string, by decoding everything after each token, and which one."""
    before = 0
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip(REPLACEMENT)
        found = search(text, before, stops) if count > min_tokens else None
        if found is not None:
            return count, found
        before = max(before, len(text))
    return len(tokens), None


def as_it_comes(
    decode: Callable[[list[int]], str], tokens: list[int], stops: list[str], min_tokens: int
) -> tuple[int, str | None]:
    """The same by StopStrings."""
    watch = StopStrings(Detokenizer(decode), stops, min_tokens)
    for count, token in enumerate(tokens, 1):
        found = watch.push(token)
        if found is not None:
            return count, found
    return len(tokens), None


@given(st.text(ALPHABET, max_size=40), st.lists(st.integers(1, 6), max_size=60), STOPS, st.integers(0, 5))
@example("a€b", [2, 1, 1, 1], ["a"], 0)
def test_any_split_of_a_text_is_searched_like_the_whole(text: str, sizes: list[int], stops: list[str], min_tokens: int) -> None:
    """Tokens of any bytes of a text, characters cut in the middle included."""
    data, parts = text.encode(), []
    for size in [*sizes, *[1] * len(data)]:
        parts.append(data[:size])
        data = data[size:]
    parts = [part for part in parts if part]
    decode = lambda tokens: b"".join(parts[token] for token in tokens).decode("utf-8", "replace")  # noqa: E731
    tokens = list(range(len(parts)))
    assert as_it_comes(decode, tokens, stops, min_tokens) == by_search(decode, tokens, stops, min_tokens)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """Token n is the byte n, and 256 a special token."""
    alphabet = sorted(ByteLevelSplit.alphabet())
    plain = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    others = iter(letter for letter in alphabet if ord(letter) >= 256)
    vocab = {plain[byte] if byte in plain else next(others): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab | {"<end>": 256}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@given(st.data())
def test_bytes_that_are_no_text_are_searched_as_well(byte_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A real byte-level tokenizer, with characters, bytes that become none, and special tokens among them."""
    characters = st.text(ALPHABET, min_size=1, max_size=3).map(lambda text: list(text.encode()))
    garbage = st.lists(st.sampled_from([0xFF, 0x80, 0xE2, 0xF0, 0xC3]), min_size=1, max_size=12)
    tokens = sum(data.draw(st.lists(st.one_of(characters, garbage, st.just([256])), max_size=10)), [])
    stops = data.draw(STOPS)
    for skip in (True, False):
        decode = lambda some: byte_tokenizer.decode(some, skip_special_tokens=skip)  # noqa: E731, B023
        assert as_it_comes(decode, tokens, stops, 0) == by_search(decode, tokens, stops, 0)


def test_work_per_token_is_bounded(byte_tokenizer: Tokenizer) -> None:
    """Neither bytes that never become text nor special tokens make the pieces that are decoded together longer and longer."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return byte_tokenizer.decode(tokens, skip_special_tokens=True)

    text = Detokenizer(decode, [97] * 50)
    pieces = [text.push(token) for token in [0xFF] * 200 + [256] * 200 + [0xE2, 0x82] * 100 + list(b"end")]
    assert longest <= 32
    assert "".join(pieces).endswith("end")


def test_text_goes_on_where_the_prompt_ended() -> None:
    """A tokenizer that drops the blank at the start of a text keeps it here: the prompt's last tokens are decoded along."""
    words = ["Hello", " big", " world"]
    decode = lambda tokens: "".join(words[token] for token in tokens).removeprefix(" ")  # noqa: E731
    text = Detokenizer(decode, [0])
    assert [text.push(1), text.push(2)] == [" big", " world"]


@pytest.mark.parametrize("stops", [[""], ["x" * (MAX_STOP_LEN + 1)], [str(n) for n in range(MAX_STOP_STRINGS + 1)]], ids=len)
def test_stop_strings_out_of_range(stops: list[str]) -> None:
    """Empty, too long, too many: each is named with the limit."""
    with pytest.raises(BadParameterError) as caught:
        check_stop_strings("r", "stop", stops)
    assert caught.value.name == "stop"
    assert len(str(caught.value)) < 200


def test_equal_stop_strings_are_one() -> None:
    """Their order stays."""
    assert check_stop_strings("r", "stop", ["b", "a", "b"]) == ("b", "a")
