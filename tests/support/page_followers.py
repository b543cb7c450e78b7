"""Followers of page events, written from the public formats alone: messages in, the set of cached pages out.

They know nothing of the product's classes for events. Hashes are computed once more, by the definition in docs/kv-events.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a page, 8 bytes; `before` is that of the page before it, or of its namespace."""
    return hashlib.blake2b(before + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=8).digest()


def namespace_hash(namespace: str) -> bytes:
    """What the first page of a namespace continues."""
    return hashlib.blake2b(b"pagemirror\0" + namespace.encode(), digest_size=8).digest()


def number(digest: bytes) -> int:
    """A hash as an unsigned number."""
    return int.from_bytes(digest, "little")


def hashes_of(tokens: Sequence[int], page_size: int, namespace: str = "") -> list[int]:
    """Hashes of the whole pages of a sequence."""
    last, found = namespace_hash(namespace), []
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        last = page_hash(last, tokens[start : start + page_size])
        found.append(number(last))
    return found


def tree_hashes(cache: Any) -> set[int]:
    """Hashes of all pages that the tree holds."""
    found: set[int] = set()
    for namespace, root in cache.roots().items():
        stack = [(child, namespace_hash(namespace)) for child in root.children.values()]
        while stack:
            node, last = stack.pop()
            tokens = node.tokens.tolist()
            for start in range(0, len(tokens), cache.page_size):
                last = page_hash(last, tokens[start : start + cache.page_size])
                assert number(last) not in found
                found.add(number(last))
            stack += [(child, last) for child in node.children.values()]
    return found


class CachedPages:
    """The set of cached pages as a follower knows it, with the tokens and the namespace of each."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        self.sequence = 0
        self.num_cleared = 0
        self.num_events = 0

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def hashes(self) -> set[int]:
        return set(self.pages)

    def store(self, hashes: Sequence[int], parent: int | None, tokens: Sequence[int], page_size: int, namespace: str) -> None:
        assert hashes
        assert len(tokens) == len(hashes) * page_size
        before = namespace_hash(namespace)
        if parent is not None:
            assert parent in self.pages, "what comes before a page is stored first"
            assert self.pages[parent][2] == namespace
            before = parent.to_bytes(8, "little")
        for index, value in enumerate(hashes):
            page = tuple(tokens[index * page_size : (index + 1) * page_size])
            before = page_hash(before, page)
            assert number(before) == value
            assert value not in self.pages, "a page is stored once"
            self.pages[value] = (parent, page, namespace)
            parent = value

    def remove(self, hashes: Iterable[int]) -> None:
        gone = set(hashes)
        assert gone
        for value in gone:
            del self.pages[value]
        assert not any(parent in gone for parent, _, _ in self.pages.values()), "what follows a page goes first"

    def clear(self) -> None:
        self.pages.clear()
        self.num_cleared += 1

    def _move_to(self, sequence: int, *, is_state: bool) -> None:
        assert is_state or sequence == self.sequence + 1
        self.sequence = sequence


def _uint64s(data: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<Q", data)]


class StreamFollower(CachedPages):
    """Of GenerationService.SubscribePageEvents."""

    def __init__(self) -> None:
        super().__init__()
        self._part = (0, 0)
        self._begun = False

    @property
    def after(self) -> int:
        """What to ask for when the stream has to be opened again."""
        return self.sequence

    def interrupted(self) -> None:
        """The stream has ended; another one begins."""
        self._begun = False

    def apply(self, message: Any) -> None:
        """One PageEventBatch."""
        assert message.events
        if message.HasField("state"):
            state = message.state
            assert state.index == (self._part[0] + 1 if self._begun else 0)
            self._part, self._begun = (state.index, state.count), state.index + 1 < state.count
            assert (message.events[0].WhichOneof("kind") == "cleared") is (state.index == 0)
            assert message.sequence == (0 if self._begun else state.sequence)
            self._move_to(message.sequence, is_state=True)
        else:
            assert not self._begun
            self._move_to(message.sequence, is_state=False)
        for event in message.events:
            self.num_events += 1
            kind = event.WhichOneof("kind")
            if kind == "stored":
                stored = event.stored
                parent = stored.parent_hash if stored.HasField("parent_hash") else None
                tokens = [value for (value,) in struct.iter_unpack("<i", stored.tokens)]
                self.store(_uint64s(stored.hashes), parent, tokens, stored.page_size, stored.cache_namespace)
            elif kind == "removed":
                self.remove(_uint64s(event.removed.hashes))
            else:
                assert kind == "cleared"
                self.clear()
        if message.HasField("state") and not self._begun:
            assert len(self) == message.state.num_pages


class GatewayFollower(CachedPages):
    """Of the gateway's SubscribeKvEvents."""

    def apply(self, message: Any) -> None:
        """One KvEventBatch."""
        is_state = message.HasField("snapshot")
        if is_state and message.snapshot.index:
            assert message.sequence_number == self.sequence + 1
        self._move_to(message.sequence_number, is_state=is_state)
        for event in message.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                stored = event.stored
                parent = stored.parent_block_hash % 2**64 if stored.HasField("parent_block_hash") else None
                tokens = [token for block in stored.blocks for token in block.token_ids]
                (size,) = {block.block_size for block in stored.blocks}
                self.store([block.block_hash % 2**64 for block in stored.blocks], parent, tokens, size, stored.cache_salt)
            elif kind == "removed":
                self.remove(value % 2**64 for value in event.removed.block_hashes)
            else:
                assert kind == "cleared"
                self.clear()


class BusFollower(CachedPages):
    """Of the ZeroMQ publisher: payloads as msgpack has decoded them."""

    def apply(self, sequence: int, payload: Any) -> None:
        """One batch: [time, events, rank]."""
        _, events, rank = payload
        assert rank == 0
        is_state = events[0]["type"] == "AllBlocksCleared"
        self._move_to(sequence, is_state=is_state or not self.sequence)
        for event in events:
            kind = event["type"]
            if kind == "BlockStored":
                keys = event["extra_keys"]
                if event["parent_block_hash"] is None:
                    namespace = keys[0][0] if keys[0] else ""
                else:
                    namespace = self.pages[event["parent_block_hash"]][2]
                self.store(
                    event["block_hashes"], event["parent_block_hash"], event["token_ids"], event["block_size"], namespace
                )
            elif kind == "BlockRemoved":
                self.remove(event["block_hashes"])
            else:
                assert kind == "AllBlocksCleared"
                self.clear()
