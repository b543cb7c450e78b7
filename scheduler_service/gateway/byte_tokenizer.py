"""The tokenizer of a model over bytes, which has no file of one: ids 0 … 255 are the bytes of UTF-8, those above special."""

from __future__ import annotations

import json
from collections.abc import Sequence

from scheduler_service.text import NUM_BYTES

_MOST = 4096
"""Ids of a vocabulary at most: one that is larger is none of bytes."""

_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def byte_tokenizer(vocab_size: int, stop_ids: Sequence[int]) -> dict[str, bytes]:
    """Its files, by name; empty where the vocabulary cannot be that of bytes. A conversation is written one message a line."""
    if not NUM_BYTES <= vocab_size <= _MOST:
        return {}
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Byte-level tokenizers write each byte as a letter: bytes that are letters as themselves, others as letters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(letter): letter for letter in alphabet if ord(letter) < NUM_BYTES}
    others = iter(letter for letter in alphabet if ord(letter) >= NUM_BYTES)
    vocab = {printable[byte] if byte in printable else next(others): byte for byte in range(NUM_BYTES)}
    special = [f"<|{token}|>" for token in range(NUM_BYTES, vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    if stop_ids and NUM_BYTES <= stop_ids[0] < vocab_size:
        config["eos_token"] = special[stop_ids[0] - NUM_BYTES]
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
