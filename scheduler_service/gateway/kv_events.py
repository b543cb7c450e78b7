"""Page events as the gateway wants them: KvEventBatch, which is the same for both of its engines' APIs.

A cursor of the gateway is the number of the last batch that it applied, and 0 asks for the present state: just what
`PageEventLog.follow` takes. The statuses with which a stream ends where it cannot go on, OUT_OF_RANGE and DATA_LOSS, make the
gateway forget what it knows and ask for the state.
"""

from __future__ import annotations

import numpy as np
from smg_grpc_proto.generated import common_pb2

from scheduler_service.core.ops import UInt64Array
from scheduler_service.page_events import PageBatch, PageEvent, PagesRemoved, PagesStored


def kv_event_batch(batch: PageBatch) -> common_pb2.KvEventBatch:
    """A batch of events, or a part of the present state, as a message."""
    part = batch.snapshot
    number = 0 if part is not None else batch.sequence
    message = common_pb2.KvEventBatch(
        sequence_number=batch.stamp, timestamp=batch.timestamp, events=[_event(event, number) for event in batch.events]
    )
    if part is not None:
        message.snapshot.index, message.snapshot.count, message.snapshot.blocks = part.index, part.count, part.num_pages
    return message


def _event(event: PageEvent, number: int) -> common_pb2.KvCacheEvent:
    if isinstance(event, PagesStored):
        return common_pb2.KvCacheEvent(event_id=number, stored=_stored(event))
    if isinstance(event, PagesRemoved):
        removed = common_pb2.KvBlocksRemoved(
            block_hashes=_signed(event.hashes), cache_level=0, tier=common_pb2.KV_CACHE_TIER_DEVICE
        )
        return common_pb2.KvCacheEvent(event_id=number, removed=removed)
    return common_pb2.KvCacheEvent(event_id=number, cleared=common_pb2.KvCacheCleared())


def _stored(event: PagesStored) -> common_pb2.KvBlocksStored:
    size, tokens = event.page_size, event.tokens.tolist()
    stored = common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(block_hash=value, token_ids=tokens[start : start + size], block_size=size, cache_level=0)
            for value, start in zip(_signed(event.hashes), range(0, len(tokens), size), strict=True)
        ],
        tier=common_pb2.KV_CACHE_TIER_DEVICE,
    )
    if event.parent is not None:
        stored.parent_block_hash = event.parent - 2**64 if event.parent >= 2**63 else event.parent
    if event.namespace:
        stored.cache_salt = event.namespace
    return stored


def _signed(hashes: UInt64Array) -> list[int]:
    """The same 64 bits as the message has them."""
    values: list[int] = hashes.view(np.int64).tolist()
    return values
