"""The audit: what must hold between any two calls of the core.

Everything is derived anew by walking rows, tree and free list; nothing is believed that the core merely counts. O(pages +
rows), so it runs in tests, in the simulator, and in production only where `--check` asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from scheduler_service.core.config import RefreshPolicy
from scheduler_service.core.errors import InvariantViolation
from scheduler_service.core.ops import ForwardOp
from scheduler_service.core.page_pool import PageState
from scheduler_service.core.radix_cache import Node
from scheduler_service.core.row_table import Phase
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.states import State

_PHASES = {State.PREFILLING: Phase.PREFILLING, State.PREFILL_DONE: Phase.PREFILL_DONE, State.DECODING: Phase.DECODING}


def audit(scheduler: Scheduler) -> list[str]:
    """Every contradiction found, in words that name request, row and page; empty when there is none."""
    return [
        *_audit_rows(scheduler),
        *_audit_pages(scheduler),
        *_audit_tree(scheduler),
        *_audit_requests(scheduler),
        *_audit_sent(scheduler),
    ]


def check(scheduler: Scheduler) -> None:
    """Raise InvariantViolation if the audit finds anything."""
    findings = audit(scheduler)
    if findings:
        raise InvariantViolation(findings)


def audit_op(op: ForwardOp) -> list[str]:
    """What must hold in every op: no page of the tree is written, no page is in two places of a row, lengths fit."""
    findings = []
    if len(set(op.req_pool_indices.tolist())) != op.num_rows:
        findings.append(f"step {op.step}: a row number is named twice: {op.req_pool_indices.tolist()}")
    if (op.begins + op.sizes != op.row_lens).any():
        findings.append(f"step {op.step}: begin + size is not row_len: {op.begins.tolist()}, {op.sizes.tolist()}")
    if int(op.input_lens[: op.num_extend_rows].sum()) != len(op.input_ids):
        findings.append(f"step {op.step}: {len(op.input_ids)} input ids for lengths {op.input_lens.tolist()}")
    if (op.input_lens < 1).any():
        findings.append(f"step {op.step}: a row computes nothing: {op.input_lens.tolist()}")
    return findings


def audit_writes(scheduler: Scheduler, op: ForwardOp) -> list[str]:
    """Right after `plan()`: no planned row writes into a page that the tree owns, and every token has a page."""
    rows = scheduler.placement.rows
    first_written = op.num_computed // scheduler.config.page_size
    findings = [
        f"step {op.step}: row {row} writes logical page {page}, but its first {tree} pages are the tree's"
        for row, page, tree in zip(
            op.req_pool_indices.tolist(), first_written.tolist(), rows.num_tree[op.req_pool_indices], strict=True
        )
        if page < tree
    ]
    short = op.num_computed + op.input_lens > op.row_lens * scheduler.config.page_size
    findings += [f"step {op.step}: row {row} has no page for its last token" for row in op.req_pool_indices[short].tolist()]
    return findings


def _audit_rows(scheduler: Scheduler) -> Iterable[str]:
    placement = scheduler.placement
    rows = placement.rows
    owners: Counter[int] = Counter()
    private: Counter[int] = Counter()
    cached = set(placement.pool.pages_in(PageState.CACHED).tolist())
    for row, (request, pages) in scheduler.rows().items():
        entries = pages.tolist()
        tree = int(rows.num_tree[row])
        if len(set(entries)) != len(entries):
            yield f"request {request.request_id!r}: a page is in row {row} twice: {entries}"
        if not set(entries[:tree]) <= cached:
            yield f"request {request.request_id!r}: row {row} counts {tree} entries of {entries} as the tree's, some are not"
        if cached & set(entries[tree:]):
            yield f"request {request.request_id!r}: row {row} holds pages of the tree beyond its first {tree}: {entries}"
        if request.node is not None and placement.cache.path_pages(request.node).tolist() != entries[:tree]:
            yield f"request {request.request_id!r}: its locked path is not the first {tree} pages of its row {entries}"
        if request.row != row:
            yield f"request {request.request_id!r}: believes to hold row {request.row}, holds {row}"
        if int(rows.num_computed[row]) > len(entries) * scheduler.config.page_size:
            yield f"request {request.request_id!r}: {rows.num_computed[row]} tokens computed in {len(entries)} pages"
        owners.update(entries)
        private.update(entries[tree:])
    yield from (f"page {page} is private to {count} rows" for page, count in private.items() if count > 1)
    expected = placement.pool.pages_in(PageState.PRIVATE).tolist()
    if sorted(private) != expected:
        yield f"private pages are {expected}, rows hold {sorted(private)} besides the tree's"


def _audit_pages(scheduler: Scheduler) -> Iterable[str]:
    placement = scheduler.placement
    pool = placement.pool
    free = pool.free_pages().tolist()
    in_tree = [page for node in placement.cache.nodes() for page in node.pages.tolist()]
    if len(set(free)) != len(free):
        yield f"a page is free twice: {sorted(free)}"
    if len(set(in_tree)) != len(in_tree):
        yield f"a page is in the tree twice: {sorted(in_tree)}"
    if sorted(free) != pool.pages_in(PageState.FREE).tolist():
        yield "the free stack and the states of pages disagree"
    if sorted(in_tree) != pool.pages_in(PageState.CACHED).tolist():
        yield f"the tree holds {sorted(in_tree)}, the pool counts {pool.pages_in(PageState.CACHED).tolist()} as cached"
    private = len(pool.pages_in(PageState.PRIVATE))
    counted = (pool.num_free, pool.num_cached, pool.num_private, placement.cache.num_pages)
    if counted != (len(free), len(in_tree), private, len(in_tree)):
        yield (
            f"free {pool.num_free} + cached {pool.num_cached} (tree: {placement.cache.num_pages}) + private {pool.num_private} "
            f"is counted, but is not there: {len(free)} + {len(in_tree)} + {private}"
        )
    if not scheduler.requests and (pool.num_private or placement.cache.num_locked):
        yield f"idle, but {pool.num_private} pages are private and {placement.cache.num_locked} locked"
    if placement.rows.num_free + placement.num_holders != placement.rows.max_rows:
        yield f"{placement.rows.num_free} rows are free and {placement.num_holders} in use, of {placement.rows.max_rows}"
    if len(set(placement.rows.free_rows())) != placement.rows.num_free:
        yield f"a row is free twice: {placement.rows.free_rows()}"


def _audit_tree(scheduler: Scheduler) -> Iterable[str]:
    cache = scheduler.placement.cache
    locks: Counter[Node] = Counter()
    for request, _ in scheduler.rows().values():
        node = request.node
        while node is not None:
            locks[node] += 1
            node = node.parent
    locked_pages = 0
    for node in cache.nodes():
        parent = node.parent
        assert parent is not None
        if node.locks != locks[node]:
            yield f"the tree's node of pages {node.pages.tolist()} counts {node.locks} locks, requests hold {locks[node]}"
        if node.depth != parent.depth + len(node.pages) or len(node.tokens) != len(node.pages) * cache.page_size:
            yield f"the tree's node of pages {node.pages.tolist()} has depth {node.depth} and {len(node.tokens)} tokens"
        if parent.children.get(node.tokens[: cache.page_size].tobytes()) is not node or not len(node.pages):
            yield f"the tree's node of pages {node.pages.tolist()} is not found from its parent"
        if not node.locks and not node.children and not node.queued:
            yield f"the tree's leaf of pages {node.pages.tolist()} would never be evicted"
        locked_pages += len(node.pages) if node.locks else 0
    if locked_pages != cache.num_locked:
        yield f"{locked_pages} pages of the tree are locked, {cache.num_locked} are counted"


def _audit_requests(scheduler: Scheduler) -> Iterable[str]:
    rows = scheduler.placement.rows
    outstanding = Counter(request for op in scheduler.ops_in_flight() for request in op.requests)
    for request in scheduler.requests.values():
        name = f"request {request.request_id!r}"
        if request.state is State.FINISHED:
            yield f"{name} is over, but live"
        counted = request.num_outstanding
        if request.state.holds_row:
            counted += int(rows.num_outstanding[request.row])
            if rows.num_known[request.row] != len(request.tokens) or rows.phase[request.row] != _PHASES[request.state]:
                yield f"{name}: row {request.row} knows {rows.num_known[request.row]} tokens, the request {len(request.tokens)}"
        if counted != outstanding[request]:
            yield f"{name} counts {counted} ops in flight, there are {outstanding[request]}"
        if len(request.tokens) >= request.limit_len:
            yield f"{name} has all its {request.limit_len} tokens, but is {request.state}"
    states = Counter(request.state for request in scheduler.requests.values())
    if (scheduler.num_waiting, scheduler.num_retracted) != (states[State.SUBMITTED], states[State.RETRACTED]):
        yield f"queues hold {scheduler.num_waiting} and {scheduler.num_retracted} requests, states say {dict(states)}"


def _audit_sent(scheduler: Scheduler) -> Iterable[str]:
    rows = scheduler.placement.rows
    if rows.sent_pages is None or scheduler.config.refresh_policy is RefreshPolicy.TAIL_ONLY:
        return  # nothing to compare with, or wrong on purpose
    for row in np.flatnonzero(rows.live_generation).tolist():
        if not rows.unsent[row] and rows.changed_since_sent(row) and not rows.dirty[row]:
            yield f"row {row} changed below its sent length and is not marked dirty"
