"""Ops with one thing changed that a field of their message says, or a few."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz_columns import ints, longs, pack, pack_longs
from fuzz_model import RuntimeModel
from fuzz_rules import BOOL_COLUMNS, INT32_COLUMNS, ROW_COLUMNS, UINT64_COLUMNS

from pagemirror.v1 import forward_pb2

MAX_INT32, MAX_UINT32, MAX_UINT64 = 2**31 - 1, 2**32 - 1, 2**64 - 1
ODD_FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 100.0, 101.0, 1e-40, 1e38, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS = ("", "x", "x" * 256, "x" * 257, "x" * 70_000, "\0", "\u202e\u00e9\U0001f600" * 90, "%s{}\r\n", "request-0")
HUGE = 100_000
"""Entries of a huge column or of many lease starts; what a full message does has tests of its own."""


class FieldMutator:
    """Changes ops at random; a change may happen to leave the op a right one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._kinds: list[tuple[int, Callable[[forward_pb2.ForwardOp, RuntimeModel], None]]] = [
            (12, self._change_value),
            (6, self._change_length),
            (3, self._change_bytes),
            (3, self._change_order),
            (2, self._change_whole_column),
            (5, self._change_scalar),
            (6, self._change_lease_starts),
            (4, self._change_sampling),
            (4, self._change_row),
            (3, self._change_pages),
            (3, self._change_tail),
            (3, self._change_digests),
        ]

    def mutate(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        """Change `op`, which comes next in the model's session, in one place, now and then in several."""
        weights = [weight for weight, _ in self._kinds]
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 3))):
            for _, change in self.rng.choices(self._kinds, weights):
                change(op, model)

    # -- columns

    def _change_value(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        name = self._column(op, INT32_COLUMNS)
        values = ints(getattr(op, name)) or [0]
        i = self.rng.randrange(len(values))
        values[i] = self._value(values[i], model)
        setattr(op, name, pack(values))

    def _change_length(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        rng = self.rng
        name = self._column(op, INT32_COLUMNS)
        values = ints(getattr(op, name)) or []
        i = rng.randint(0, len(values))
        kind = rng.randrange(5)
        if kind == 0:
            values[i : i + 1] = []
        elif kind == 1:
            values.insert(i, self._value(0, model))
        elif kind == 2 and values:
            values.insert(i, rng.choice(values))
        elif kind == 3:
            values = []
        elif rng.random() < 0.02:
            values = (values or [1]) * (HUGE // max(len(values), 1))
        setattr(op, name, pack(values))

    def _change_bytes(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        """Columns of another width, cut in the middle of an entry, bools that are none."""
        rng = self.rng
        if rng.random() < 0.4:
            name = rng.choice(BOOL_COLUMNS)
            data = bytearray(getattr(op, name) or b"\0")
            data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 255))
            setattr(op, name, bytes(data) + bytes(rng.choice((0, 0, 0, 1))))
            return
        name = rng.choice(INT32_COLUMNS + UINT64_COLUMNS)
        data = getattr(op, name)
        widened = b"".join(data[i : i + 4] + bytes(4) for i in range(0, len(data), 4))
        narrowed = b"".join(data[i : i + 2] for i in range(0, len(data), 4))
        swapped = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
        setattr(op, name, rng.choice((widened, narrowed, swapped, data[:-1], data[1:], data + b"\0", data[:-3])))

    def _change_order(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        name = self._column(op, INT32_COLUMNS)
        values = ints(getattr(op, name)) or []
        if self.rng.random() < 0.3:
            values.reverse()
        elif len(values) > 1:
            i, j = self.rng.sample(range(len(values)), 2)
            values[i], values[j] = values[j], values[i]
        setattr(op, name, pack(values))

    def _change_whole_column(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        source, target = self.rng.choice(INT32_COLUMNS), self.rng.choice(INT32_COLUMNS)
        setattr(op, target, getattr(op, source) if self.rng.random() < 0.7 else b"")

    # -- scalars

    def _change_scalar(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        rng = self.rng
        kind = rng.randrange(3)
        if kind == 0:
            op.session_no = rng.choice((0, 1, max(op.session_no - 1, 0), min(op.session_no + 1, MAX_UINT64), MAX_UINT64))
        elif kind == 1:
            last = model.last_step
            op.step = rng.choice((0, 1, last, max(last - 1, 0), max(last - 2, 0), max(last - 3, 0), last + 2, MAX_UINT64))
        else:
            num = op.num_extend_rows
            near = (min(num + 1, MAX_UINT32), max(num - 1, 0), len(op.sample), len(op.sample) + 1)
            op.num_extend_rows = rng.choice((0, *near, MAX_UINT32))

    # -- lease starts

    def _change_lease_starts(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        rng, starts = self.rng, op.lease_starts
        if not starts or rng.random() < 0.25:
            start = starts.add()
            if rng.random() < 0.5 and len(starts) > 1:
                start.CopyFrom(starts[0])
            start.req_pool_index = self._row_number(op, model)
            if rng.random() < 0.01:
                starts.extend([start] * HUGE)
            return
        i = rng.randrange(len(starts))
        start = starts[i]
        kind = rng.randrange(7)
        if kind == 0:
            del starts[i]
        elif kind == 1:
            start.req_pool_index = self._row_number(op, model)
        elif kind == 2:
            start.request_id = rng.choice(ODD_TEXTS)
        elif kind == 3:
            start.traceparent = rng.choice(ODD_TEXTS)
        elif kind == 4:
            ids = rng.choice(([-1], [model.shape.vocab_size], [0] * 4096, [0] * 4097, [5, 5]))
            start.stop_ids = pack(ids)[rng.choice((0, 0, 0, 1)) :]
        elif kind == 5:
            start.history = rng.choice((b"\1\2\3", start.history[4:], start.history + bytes(4), pack([-1, MAX_INT32])))
        else:
            start.prompt_len = rng.choice((0, 1, MAX_UINT32))

    def _change_sampling(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        if not op.lease_starts:
            return
        sampling = self.rng.choice(op.lease_starts).sampling
        odd_sampling(self.rng, sampling, model.shape.vocab_size)

    # -- what belongs together

    def _change_row(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        """Drop a row, name it twice, exchange two, in all columns at once; or begin its lease anew."""
        rng, num_rows = self.rng, len(op.sample)
        if not num_rows:
            return
        i = rng.randrange(num_rows)
        kind = rng.randrange(4)
        if kind == 3:
            generations = ints(op.row_generations) or [0]
            generations[i % len(generations)] += rng.choice((1, 1, -1, 1000))
            op.row_generations = pack(generations)
            full = bytearray(op.full_refresh)
            full[i % max(len(full), 1) : i % max(len(full), 1) + 1] = b"\1"
            op.full_refresh = bytes(full)
            return
        j = rng.randrange(num_rows)
        for name in ("req_pool_indices", *ROW_COLUMNS, *BOOL_COLUMNS, *UINT64_COLUMNS[:1]):
            data = getattr(op, name)
            size = max(len(data) // num_rows, 1)
            entries = [data[at : at + size] for at in range(0, len(data), size)]
            if max(i, j) < len(entries):
                if kind == 0:
                    del entries[i]
                elif kind == 1:
                    entries.insert(i, entries[i])
                else:
                    entries[i], entries[j] = entries[j], entries[i]
            setattr(op, name, b"".join(entries))

    def _change_pages(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        """Give a row pages that it has, that another row has, or that nobody has."""
        pages = ints(op.occupied_pages) or []
        if not pages:
            return
        theirs = [page for lease in model.leases.values() for page in lease.pages]
        i = self.rng.randrange(len(pages))
        pages[i] = self.rng.choice((self.rng.choice(pages), self.rng.choice(theirs or [1]), model.shape.num_pages))
        op.occupied_pages = pack(pages)

    def _change_tail(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        """Move the begin of one update, with the pages and lengths that belong to it, as if another were lost or repeated."""
        begins, sizes, row_lens = ints(op.begins), ints(op.sizes), ints(op.row_lens)
        pages, rows = ints(op.occupied_pages), ints(op.req_pool_indices)
        if None in (begins, sizes, row_lens, pages) or not len(begins) == len(sizes) == len(row_lens) == len(op.full_refresh):
            return
        tails = [i for i in range(len(begins)) if not op.full_refresh[i]]
        if not tails or len(rows or ()) != len(begins):
            return
        i = self.rng.choice(tails)
        at = sum(row_lens[j] if op.full_refresh[j] else sizes[j] for j in range(i))
        free = sorted(set(range(1, model.shape.num_pages + 1)) - {p for lease in model.leases.values() for p in lease.pages})
        if self.rng.random() < 0.5 and sizes[i] > 0:
            begins[i], sizes[i] = begins[i] + 1, sizes[i] - 1
            del pages[at : at + 1]
        elif begins[i] > 0 and free:
            begins[i], sizes[i] = begins[i] - 1, sizes[i] + 1
            pages.insert(at, free[-1])
        op.begins, op.sizes, op.occupied_pages = pack(begins), pack(sizes), pack(pages)

    def _change_digests(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> None:
        rng = self.rng
        name = rng.choice(UINT64_COLUMNS)
        digests = longs(getattr(op, name)) or []
        kind = rng.randrange(4)
        if kind == 0:
            op.verify_rows = pack([*(ints(op.verify_rows) or []), rng.choice((0, 1, 2, model.shape.max_rows + 1))])
            digests.append(rng.getrandbits(64))
        elif kind == 1 or not digests:
            digests.append(0)
        elif kind == 2:
            del digests[rng.randrange(len(digests))]
        else:
            digests[rng.randrange(len(digests))] = rng.choice((0, MAX_UINT64, rng.getrandbits(64)))
        setattr(op, name, pack_longs(digests))

    # -- values

    def _row_number(self, op: forward_pb2.ForwardOp, model: RuntimeModel) -> int:
        """Of the op or not; a negative one as it reads without its sign."""
        rows = ints(op.req_pool_indices) or []
        return self.rng.choice((0, 1, model.shape.max_rows, model.shape.max_rows + 1, MAX_UINT32, *rows, *rows)) % 2**32

    def _column(self, op: forward_pb2.ForwardOp, names: tuple[str, ...]) -> str:
        """Mostly one that holds something."""
        filled = [name for name in names if getattr(op, name)]
        return self.rng.choice(filled) if filled and self.rng.random() < 0.85 else self.rng.choice(names)

    def _value(self, value: int, model: RuntimeModel) -> int:
        shape = model.shape
        limits = (shape.max_rows, shape.num_pages, shape.width, shape.vocab_size, shape.width * shape.page_size)
        near = [value - 1, value + 1, value + shape.page_size, value * 2]
        odd = [0, 1, 2, -1, MAX_INT32, -MAX_INT32 - 1, 2**30, *limits, *(limit + 1 for limit in limits)]
        return self.rng.choice(near + odd)


def odd_sampling(rng: random.Random, sampling: forward_pb2.SamplingParams, vocab_size: int) -> None:
    """Set one parameter to a value at, or beyond, an end of its range."""
    name = rng.choice([field.name for field in sampling.DESCRIPTOR.fields])
    if name == "logit_bias":
        for _ in range(rng.choice((1, 2, 1025))):
            token = rng.choice((0, 1, vocab_size - 1, vocab_size, MAX_UINT32))
            sampling.logit_bias.add(token=token, bias=rng.choice(ODD_FLOATS))
    elif name == "seed":
        sampling.seed = rng.choice((0, MAX_UINT64))
    elif name in {"top_k", "min_new_tokens", "num_logprobs"}:
        setattr(sampling, name, rng.choice((0, 1, 20, 21, 2**31, MAX_UINT32)))
    elif rng.random() < 0.2:
        sampling.ClearField(name)
    else:
        setattr(sampling, name, rng.choice(ODD_FLOATS))
