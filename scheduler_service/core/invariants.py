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
from scheduler_service.core.radix_node import Node, joined
from scheduler_service.core.request import Request
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
    """Right after `plan()`: no planned row writes into a page that the tree owns, every token has a page, and the op says what
    the rows are.
    """
    rows, indices = scheduler.placement.rows, op.req_pool_indices
    first_written = op.num_computed // scheduler.config.page_size
    findings = [
        f"step {op.step}: row {row} writes logical page {page}, but its first {tree} pages are the tree's"
        for row, page, tree in zip(indices.tolist(), first_written.tolist(), rows.num_tree[indices], strict=True)
        if page < tree
    ]
    short = op.num_computed + op.input_lens > op.row_lens * scheduler.config.page_size
    findings += [f"step {op.step}: row {row} has no page for its last token" for row in indices[short].tolist()]
    pages = rows.gather(indices, np.where(op.full_refresh, 0, op.begins))
    if not np.array_equal(op.row_lens, rows.num_pages[indices]) or not np.array_equal(op.occupied_pages, pages):
        findings.append(
            f"step {op.step}: the op says lengths {op.row_lens.tolist()} and pages {op.occupied_pages.tolist()}, rows "
            f"{indices.tolist()} have {rows.num_pages[indices].tolist()} and {pages.tolist()}"
        )
    return findings


def _audit_rows(scheduler: Scheduler) -> Iterable[str]:
    placement = scheduler.placement
    rows = placement.rows
    private: Counter[int] = Counter()
    cached = set(placement.pool.pages_in(PageState.CACHED).tolist())
    for row, (request, pages) in scheduler.rows().items():
        name, entries = f"request {request.request_id!r}", pages.tolist()
        tree, computed = int(rows.num_tree[row]), int(rows.num_computed[row])
        if len(set(entries)) != len(entries):
            yield f"{name}: a page is in row {row} twice: {entries}"
        if not set(entries[:tree]) <= cached:
            yield f"{name}: row {row} counts {tree} entries of {entries} as the tree's, some are not"
        if cached & set(entries[tree:]):
            yield f"{name}: row {row} holds pages of the tree beyond its first {tree}: {entries}"
        if tree * placement.page_size > computed:
            yield f"{name}: {tree} pages of row {row} are the tree's, but only {computed} tokens are computed"
        if computed > len(entries) * placement.page_size:
            yield f"{name}: {computed} tokens computed in {len(entries)} pages"
        if computed >= int(rows.num_known[row]) + int(rows.num_outstanding[row]):
            yield (
                f"{name}: {computed} tokens computed, {rows.num_known[row]} known, "
                f"and {rows.num_outstanding[row]} results awaited of row {row}"
            )
        if request.row != row or scheduler.requests.get(request.request_id) is not request:
            yield f"{name}: row {row} is its, but it is not live or believes to hold row {request.row}"
        yield from _audit_prefix(scheduler, request, entries[:tree], name)
        private.update(entries[tree:])
    yield from (f"page {page} is private to {count} rows" for page, count in private.items() if count > 1)
    expected = placement.pool.pages_in(PageState.PRIVATE).tolist()
    if sorted(private) != expected:
        yield f"private pages are {expected}, rows hold {sorted(private)} besides the tree's"
    yield from _audit_leases(scheduler)


def _audit_prefix(scheduler: Scheduler, request: Request, pages: list[int], name: str) -> Iterable[str]:
    """The pages that a row takes from the tree are those of its request's own tokens, in its namespace, and locked for it."""
    cache, node = scheduler.placement.cache, request.node
    if node is None:
        if pages or request.prefix_cache:
            yield f"{name}: it locks nothing in the tree and uses {pages} of it, with prefix_cache {request.prefix_cache}"
        return
    if cache.path_pages(node).tolist() != pages:
        yield f"{name}: its locked path is not the first {len(pages)} pages of its row"
        return
    parts = []
    while node.parent is not None:
        parts.append(node.tokens)
        node = node.parent
    if node is not cache.roots().get(request.cache_namespace):
        yield f"{name}: its locked path does not begin at the root of namespace {request.cache_namespace!r}"
    if parts and not np.array_equal(np.concatenate(parts[::-1]), request.token_slice(0, len(pages) * cache.page_size)):
        yield f"{name}: the tokens of its locked path are not its own"


def _audit_leases(scheduler: Scheduler) -> Iterable[str]:
    """Rows in use, rows that are free, and the order of those in use."""
    placement = scheduler.placement
    rows, order = placement.rows, placement.holder_rows().tolist()
    free = rows.free_rows()
    if len(free) + len(order) != rows.max_rows:
        yield f"{len(free)} rows are free and {len(order)} in use, of {rows.max_rows}"
    if len(set(free)) != len(free):
        yield f"a row is free twice: {free}"
    leased = np.flatnonzero(rows.live_generation).tolist()
    if sorted(order) != leased:
        yield f"rows {sorted(order)} are in use, but rows {leased} are leased"
    if set(free) & set(leased):
        yield f"rows {sorted(set(free) & set(leased))} are leased, but free"
    orders = [placement.request_of_row[row].order for row in order]
    if orders != sorted(orders):
        yield f"rows {order} are not in the order of their requests: {orders}"


def _audit_pages(scheduler: Scheduler) -> Iterable[str]:
    placement = scheduler.placement
    pool = placement.pool
    # Sorted arrays and no sets, since a pool may have millions of pages.
    free = np.sort(pool.free_pages())
    in_tree = np.sort(joined([node.pages for node in placement.cache.nodes()]))
    cached = pool.pages_in(PageState.CACHED)
    if (free[1:] == free[:-1]).any():
        yield f"a page is free twice: {free.tolist()}"
    if (in_tree[1:] == in_tree[:-1]).any():
        yield f"a page is in the tree twice: {in_tree.tolist()}"
    if not np.array_equal(free, pool.pages_in(PageState.FREE)):
        yield "the free stack and the states of pages disagree"
    if not np.array_equal(in_tree, cached):
        yield f"the tree holds {in_tree.tolist()}, the pool counts {cached.tolist()} as cached"
    private = len(pool.pages_in(PageState.PRIVATE))
    counted = (pool.num_free, pool.num_cached, pool.num_private, placement.cache.num_pages)
    if counted != (len(free), len(in_tree), private, len(in_tree)):
        yield (
            f"free {pool.num_free} + cached {pool.num_cached} (tree: {placement.cache.num_pages}) + private {pool.num_private} "
            f"is counted, but is not there: {len(free)} + {len(in_tree)} + {private}"
        )
    if not scheduler.requests and (pool.num_private or placement.cache.num_locked):
        yield f"idle, but {pool.num_private} pages are private and {placement.cache.num_locked} locked"


def _audit_tree(scheduler: Scheduler) -> Iterable[str]:
    cache = scheduler.placement.cache
    locks: Counter[Node] = Counter()
    for request, _ in scheduler.rows().values():
        node = request.node
        while node is not None:
            locks[node] += 1
            node = node.parent
    for namespace, root in cache.roots().items():
        if root.locks != locks[root]:
            yield f"the root of namespace {namespace!r} counts {root.locks} locks, requests hold {locks[root]}"
        if namespace and not root.locks and not root.children:
            yield f"the root of namespace {namespace!r} is kept, but nobody uses it"
    locked_pages = 0
    for node in cache.nodes():
        parent = node.parent
        assert parent is not None
        if node.locks != locks[node]:
            yield f"the tree's node of pages {node.pages.tolist()} counts {node.locks} locks, requests hold {locks[node]}"
        if node.depth != parent.depth + len(node.pages) or len(node.tokens) != len(node.pages) * cache.page_size:
            yield f"the tree's node of pages {node.pages.tolist()} has depth {node.depth} and {len(node.tokens)} tokens"
        if parent.children.get(cache.key(node.tokens, 0)) is not node or not len(node.pages):
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
            row = request.row
            counted += int(rows.num_outstanding[row])
            if rows.num_known[row] != len(request.tokens) or rows.phase[row] != _PHASES[request.state]:
                known = int(rows.num_known[row])
                yield f"{name}: row {row} knows {known} tokens, the request {len(request.tokens)} and is {request.state}"
            stop_ids = {stop_id for stop_id in rows.stop_ids[row].tolist() if stop_id >= 0}
            if rows.limit_len[row] != request.limit_len or stop_ids != set(request.stop_ids):
                yield f"{name}: row {row} ends at {rows.limit_len[row]} tokens or {sorted(stop_ids)}, the request does not"
        if counted != outstanding[request]:
            yield f"{name} counts {counted} ops in flight, there are {outstanding[request]}"
        if len(request.tokens) >= request.limit_len:
            yield f"{name} has all its {request.limit_len} tokens, but is {request.state}"
    waiting, retracted = scheduler.queues()
    for queued, counted, state in (
        (waiting, scheduler.num_waiting, State.SUBMITTED),
        (retracted, scheduler.num_retracted, State.RETRACTED),
    ):
        live = [request for request in scheduler.requests.values() if request.state is state]
        if Counter(queued) != Counter(live) or counted != len(live):
            yield f"the queue of {state} requests holds {_names(queued)} and counts {counted}, live are {_names(live)}"


def _names(requests: Iterable[Request]) -> list[str]:
    return sorted(request.request_id for request in requests)


def _audit_sent(scheduler: Scheduler) -> Iterable[str]:
    """What the runtime was told of each row, as far as it must be known here."""
    rows = scheduler.placement.rows
    if rows.sent_pages is None or scheduler.config.refresh_policy is RefreshPolicy.TAIL_ONLY:
        return  # nothing to compare with, or wrong on purpose
    for row in np.flatnonzero(rows.live_generation).tolist():
        sent, length = int(rows.sent_len[row]), int(rows.num_pages[row])
        if rows.unsent[row]:
            if sent or rows.dirty[row]:
                yield f"row {row} was not sent in its lease, but counts {sent} entries as sent"
            continue
        if sent > length:
            yield f"row {row} counts {sent} entries as sent, it has {length}"
        if rows.changed_since_sent(row) and not rows.dirty[row]:
            yield f"row {row} changed below its sent length and is not marked dirty"
