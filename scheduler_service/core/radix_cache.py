"""The prefix cache: a radix tree over whole pages of tokens.

A node holds a run of tokens, a multiple of page_size long, and the physical pages with their KV. A child is found by the tokens
of its first page themselves and a run is compared token by token, so two prompts can never be taken for one by a hash
collision. Nodes are split at page boundaries only. The structure follows the radix tree of Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs" (2024), section 3, at the granularity of pages.

*Locks.* A request that uses pages of the tree holds the deepest node of its prefix; every node from there to the root counts
one lock. A split leaves the lower half in place, so a holder's node still ends where its prefix ends. Pages of nodes without
a lock are evictable: a locked node's ancestors are locked as well, so evicting leaves first reaches all of them.

*Order of eviction.* Least recently used leaf first, by a logical clock that ticks once per match or insert. Leaves wait in a
heap with one entry a node at most; an entry that comes up is dropped if its node is no evictable leaf, and put back if the
node was used since, so evicting costs O(log n) amortised and the heap is never longer than the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from scheduler_service.core.errors import PageAccountingError
from scheduler_service.core.journal import Journal, Restore
from scheduler_service.core.ops import Int32Array
from scheduler_service.core.page_records import Cleared, Evicted, Record
from scheduler_service.core.radix_node import NO_PAGES, Insertion, Match, Node, joined


class RadixCache:
    """Prefix tree with locks and LRU eviction. It owns pages but no pool: callers move pages between the two."""

    def __init__(self, page_size: int, journal: Journal | None = None) -> None:
        self._journal = journal or Journal()
        self._journal.watch(self._snapshot)
        self.page_size = page_size
        self._serial = 0
        self.clock = 0  # never set back: a time is not lived twice
        self._roots: dict[str, Node] = {}
        self.root()
        self._leaves: list[tuple[int, int, Node]] = []
        self.num_pages = 0
        self.num_locked = 0
        self.records: list[Record] | None = None
        """What has happened since somebody last emptied the list; None: nobody wants to know."""

    def reset(self) -> Int32Array:
        """Forget every page, none of which is locked; returns them in no particular order.

        Raises:
            PageAccountingError: a page is locked; nothing was changed.
        """
        if self.num_locked:
            raise PageAccountingError(f"the tree is to be emptied, but {self.num_locked} of its pages are locked")
        self.clock += 1
        held = [node.pages for node in self.nodes()]
        self._leaves.clear()
        self.num_pages = 0
        # A request that uses no cached page yet still holds its root.
        for namespace, root in list(self._roots.items()):
            if namespace and not root.locks:
                self._journal.put(self._roots, namespace, None)
            for key in list(root.children):
                self._journal.put(root.children, key, None)
        if self.records is not None:
            self.records.append(Cleared())
        return np.concatenate(held) if held else NO_PAGES

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def root(self, namespace: str = "") -> Node:
        """The root of one namespace. Namespaces share no pages."""
        root = self._find_root(namespace)
        self._journal.put(self._roots, namespace, root)
        return root

    def match_prefix(self, tokens: Int32Array, namespace: str = "") -> Match:
        """The longest cached prefix of `tokens`, in whole pages. May split a node; locks nothing and refreshes no age."""
        node, parts, evictable = self._find_root(namespace), [], 0
        position = 0
        while node.children and (child := node.children.get(key := self.key(tokens, position))) is not None:
            shared = child.shared_pages(tokens, position, self.page_size)
            if shared < len(child.pages):
                child = self._split(child, shared, key)
            parts.append(child.pages)
            evictable += 0 if child.locks else shared
            position += shared * self.page_size
            node = child
        return Match(node, joined(parts), evictable)

    def count_locked(self, node: Node, tokens: Int32Array) -> int:
        """How many pages below `node` hold a prefix of `tokens` and are locked; changes nothing.

        Publishing those tokens would make just so many more pages available: each duplicate is freed, and a canonical page that
        was evictable is evictable no longer.
        """
        count, position = 0, 0
        while (child := node.children.get(self.key(tokens, position))) is not None:
            shared = child.shared_pages(tokens, position, self.page_size)
            count += shared if child.locks else 0
            position += shared * self.page_size
            if shared < len(child.pages):
                break
            node = child
        return count

    def insert_prefix(self, node: Node, tokens: Int32Array, pages: Int32Array) -> Insertion:
        """Publish `pages`, which hold `tokens`, below `node`.

        Where the tree has a page of the same prefix already, that page is canonical and the caller's is a duplicate, to be
        released by the caller; the others become the tree's. Locks nothing.

        Args:
            node: where the run begins: the node the caller has locked, or a root.
            tokens: int32 [n * page_size]
            pages: int32 [n], none of them in the tree

        Raises:
            PageAccountingError: `tokens` is not page_size tokens for each page; nothing was changed.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise PageAccountingError(f"{len(pages)} pages of {self.page_size} tokens are published with {len(tokens)} tokens")
        self.clock += 1
        position, index, canonical = 0, 0, []
        while index < len(pages) and (child := node.children.get(key := self.key(tokens, position))) is not None:
            shared = child.shared_pages(tokens, position, self.page_size)
            if shared < len(child.pages):
                child = self._split(child, shared, key)
            canonical.append(child.pages)
            position += shared * self.page_size
            index += shared
            node = child
            self._touch(node)
        rest = pages[index:].copy()
        if len(rest):
            child = Node(node, tokens[position:].copy(), rest, node.depth + len(rest), self._next_serial())
            self._journal.put(node.children, self.key(tokens, position), child)
            self.num_pages += len(rest)
            if self.records is not None:
                self.records.append(child.stored())
            canonical.append(rest)
            node = child
            self._touch(node)
        return Insertion(node, joined(canonical), rest, pages[:index])

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction until `unlock`, and mark them as used now."""
        self.clock += 1
        current: Node | None = node
        while current is not None:
            self._journal.keep(current)
            if current.locks == 0:
                self.num_locked += len(current.pages)
            current.locks += 1
            current.last_use = self.clock
            if current.parent is None and current.namespace not in self._roots:
                self._journal.put(self._roots, current.namespace, current)
            current = current.parent

    def deepen_lock(self, node: Node, deeper: Node) -> None:
        """`lock(deeper)` and `unlock(node)`, which is on the way from `deeper` to the root: one walk for both."""
        self.clock += 1
        current: Node | None = deeper
        while current is not None and current is not node:
            self._journal.keep(current)
            if current.locks == 0:
                self.num_locked += len(current.pages)
            current.locks += 1
            current.last_use = self.clock
            current = current.parent
        self.clock += 1
        while current is not None:
            self._journal.keep(current)
            current.last_use = self.clock
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`.

        Raises:
            PageAccountingError: the node has no lock; nothing was changed.
        """
        if node.locks < 1:
            raise PageAccountingError("a node of the prefix tree is unlocked more often than it was locked")
        self.clock += 1
        current: Node | None = node
        while current is not None:
            self._journal.keep(current)
            current.locks -= 1
            current.last_use = self.clock
            if current.locks == 0:
                self.num_locked -= len(current.pages)
                self._enqueue(current)
            if current.parent is None:
                self._drop_root_if_empty(current)
            current = current.parent

    def evict(self, count: int) -> Int32Array:
        """Take exactly `count` pages out of the tree, least recently used leaf first, a leaf's last page first.

        Raises:
            PageAccountingError: fewer than `count` pages are evictable; nothing was changed.
        """
        if count > self.num_evictable:
            raise PageAccountingError(f"{count} pages are to be evicted, {self.num_evictable} can be")
        taken: list[Int32Array] = []
        missing = count
        while missing:
            last_use, _, leaf = heapq.heappop(self._leaves)
            leaf.queued = False
            if leaf.locks or leaf.children or last_use != leaf.last_use:
                self._enqueue(leaf)
                continue
            self._journal.keep(leaf)
            cut = min(missing, len(leaf.pages))
            keep = len(leaf.pages) - cut
            taken.append(leaf.pages[keep:][::-1])
            missing -= cut
            self.num_pages -= cut
            if keep:
                leaf.pages, leaf.tokens = leaf.pages[:keep], leaf.tokens[: keep * self.page_size]
                leaf.depth -= cut
                self._enqueue(leaf)
            else:
                self._remove(leaf)
        evicted = joined(taken)
        if taken and self.records is not None:
            self.records.append(Evicted(evicted))
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Every node that holds pages; what its pages follow comes before it."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def roots(self) -> dict[str, Node]:
        """The root of every namespace seen; for audits."""
        return self._roots

    def path_pages(self, node: Node) -> Int32Array:
        """All pages from the root to the end of `node`; for audits."""
        return node.path_pages()

    def _find_root(self, namespace: str) -> Node:
        """The root of a namespace; a new one is not kept before something holds on to it, since clients choose the names."""
        root = self._roots.get(namespace)
        return root if root is not None else Node(None, NO_PAGES, NO_PAGES, 0, self._next_serial(), namespace)

    def key(self, tokens: Int32Array, position: int) -> bytes:
        """How the child that goes on with `tokens[position:]` is found: one page of tokens; nothing where that is cut short."""
        page = tokens[position : position + self.page_size]
        return page.tobytes() if len(page) == self.page_size else b""

    def _split(self, node: Node, count: int, key: bytes) -> Node:
        """Put the first `count` pages of `node`, found by `key`, into a node of their own above it; returns that one."""
        cut = count * self.page_size
        parent = node.parent
        assert parent is not None  # a root holds no pages
        upper = Node(parent, node.tokens[:cut], node.pages[:count], parent.depth + count, self._next_serial())
        upper.locks, upper.last_use = node.locks, node.last_use
        self._journal.keep(node)
        self._journal.put(parent.children, key, upper)
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[count:], upper
        upper.children[self.key(node.tokens, 0)] = node
        return upper

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self._journal.put(parent.children, self.key(leaf.tokens, 0), None)
        if parent.parent is None:
            self._drop_root_if_empty(parent)
        else:
            self._enqueue(parent)

    def _drop_root_if_empty(self, root: Node) -> None:
        if root.namespace and not root.children and not root.locks:
            self._journal.put(self._roots, root.namespace, None)

    def _touch(self, node: Node) -> None:
        self._journal.keep(node)
        node.last_use = self.clock
        self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        """Offer `node` for eviction if it is a leaf that nobody has locked and is not offered already."""
        if node.locks or node.children or node.parent is None or node.queued:
            return
        node.queued = True
        heapq.heappush(self._leaves, (node.last_use, node.serial, node))

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _snapshot(self) -> Restore:
        num_pages, num_locked = self.num_pages, self.num_locked
        num_records = len(self.records or ())

        def restore() -> None:
            self.num_pages, self.num_locked = num_pages, num_locked
            if self.records is not None:
                del self.records[num_records:]
            # What the heap has lost or won is not known: offer every leaf anew.
            self._leaves.clear()
            for node in self.nodes():
                node.queued = False
                self._enqueue(node)

        return restore
