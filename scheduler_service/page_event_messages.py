"""Page events ↔ messages of GenerationService."""

from __future__ import annotations

from pagemirror.v1 import generation_pb2
from scheduler_service.columns import int32_of_peer, int32_to_bytes, uint64_of_peer, uint64_to_bytes
from scheduler_service.errors import ProtocolError
from scheduler_service.page_events import PageBatch, PageEvent, PagesCleared, PagesRemoved, PagesStored, SnapshotPart


def batch_message(batch: PageBatch) -> generation_pb2.PageEventBatch:
    """A batch as it is sent."""
    message = generation_pb2.PageEventBatch(
        sequence=batch.sequence, timestamp=batch.timestamp, events=[_event_message(event) for event in batch.events]
    )
    if (part := batch.snapshot) is not None:
        if part.index < part.count - 1:
            message.sequence = 0
        message.state.index, message.state.count, message.state.num_pages = part.index, part.count, part.num_pages
        message.state.sequence = batch.sequence
    return message


def _event_message(event: PageEvent) -> generation_pb2.PageEvent:
    if isinstance(event, PagesStored):
        stored = generation_pb2.PagesStored(
            hashes=uint64_to_bytes(event.hashes),
            parent_hash=event.parent,
            tokens=int32_to_bytes(event.tokens),
            page_size=event.page_size,
            cache_namespace=event.namespace,
        )
        return generation_pb2.PageEvent(stored=stored)
    if isinstance(event, PagesRemoved):
        return generation_pb2.PageEvent(removed=generation_pb2.PagesRemoved(hashes=uint64_to_bytes(event.hashes)))
    return generation_pb2.PageEvent(cleared=generation_pb2.PagesCleared())


def batch_of(message: generation_pb2.PageEventBatch) -> PageBatch:
    """A batch as it was received. Raises ProtocolError for one that the definition does not allow."""
    events = tuple(_event_of(event) for event in message.events)
    if not message.HasField("state"):
        return PageBatch(message.sequence, message.timestamp, events)
    state = message.state
    part = SnapshotPart(state.index, state.count, state.num_pages)
    return PageBatch(state.sequence, message.timestamp, events, part)


def _event_of(message: generation_pb2.PageEvent) -> PageEvent:
    kind = message.WhichOneof("kind")
    if kind == "stored":
        stored = message.stored
        hashes = uint64_of_peer(stored.hashes, "hashes of stored pages")
        tokens = int32_of_peer(stored.tokens, "tokens of stored pages")
        if not len(hashes) or len(tokens) != len(hashes) * stored.page_size:
            raise ProtocolError(f"{len(hashes)} pages of {stored.page_size} tokens are stored with {len(tokens)} tokens")
        parent = stored.parent_hash if stored.HasField("parent_hash") else None
        return PagesStored(hashes, parent, tokens, stored.page_size, stored.cache_namespace)
    if kind == "removed":
        return PagesRemoved(uint64_of_peer(message.removed.hashes, "hashes of removed pages"))
    if kind == "cleared":
        return PagesCleared()
    raise ProtocolError("a page event is of no known kind")
