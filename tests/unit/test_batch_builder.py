"""From op to batch: positions, slots through the mirror, input tokens, and rows wider than the mirror."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.batch_builder import BatchBuilder
from runtime_service.forward_batch import ForwardBatch
from runtime_service.ops import ForwardOp
from runtime_service.req_to_page import ReqToPage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One row of a step: (row, whole row of pages, num_computed, input ids; None for a decode row).
Row = tuple[int, list[int], int, list[int] | None]


def column(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """A read-only int32 column, as the wire gives it."""
    return np.frombuffer(np.asarray(values, dtype=np.int32).tobytes(), dtype=np.int32)


def make_op(rows: list[Row], sample: list[bool] | None = None) -> ForwardOp:
    """An op of whole rows, extend rows first."""
    input_lens = [1 if ids is None else len(ids) for *_, ids in rows]
    return ForwardOp(
        session_no=1,
        step=1,
        req_pool_indices=column([row for row, *_ in rows]),
        row_generations=column([1] * len(rows)),
        row_lens=column([len(pages) for _, pages, *_ in rows]),
        begins=column([0] * len(rows)),
        sizes=column([len(pages) for _, pages, *_ in rows]),
        full_refresh=np.ones(len(rows), dtype=np.bool_),
        occupied_pages=column([page for _, pages, *_ in rows for page in pages]),
        num_computed=column([num_computed for _, _, num_computed, _ in rows]),
        num_extend_rows=sum(ids is not None for *_, ids in rows),
        input_lens=column(input_lens),
        input_ids=column([token for *_, ids in rows if ids is not None for token in ids]),
        sample=np.array(sample if sample is not None else [True] * len(rows), dtype=np.bool_),
        released_rows=column([]),
    )


def build(
    rows: list[Row], page_size: int = 4, width: int = 8, max_rows: int = 6, masked: list[bool] | None = None, **options: Any
) -> ForwardBatch:
    """Apply and build one op; the last token of row r is 100 + r, that of row 0 is 0."""
    mirror = ReqToPage(max_rows, width, 1 << 30, page_size, device=DEVICE)
    op = make_op(rows)
    mirror.apply(op)
    last_tokens = torch.arange(100, 101 + max_rows, dtype=torch.int64, device=DEVICE)
    last_tokens[0] = 0
    mask = None if masked is None else torch.tensor(masked, device=DEVICE)
    return BatchBuilder(mirror, DEVICE, **options).build(op, last_tokens, mask)


def test_mixed_batch_in_full() -> None:
    """A first chunk, a continuation over a page boundary and two decode rows give exactly these columns."""
    batch = build([(3, [7], 0, [1, 2, 3]), (1, [5, 9], 3, [11, 12]), (6, [2, 8], 4, None), (2, [4], 2, None)])
    assert batch.rows.tolist() == [3, 1, 6, 2]
    assert batch.num_computed.tolist() == [0, 3, 4, 2]
    assert batch.input_lens.tolist() == [3, 2, 1, 1]
    assert batch.seq_lens.tolist() == [3, 5, 5, 3]
    assert batch.query_indptr.tolist() == [0, 3, 5, 6, 7]
    assert batch.input_ids.tolist() == [1, 2, 3, 11, 12, 106, 102]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 4, 2]
    assert batch.token_rows.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert batch.out_cache_loc.tolist() == [28, 29, 30, 23, 36, 32, 18]
    assert batch.num_extend_rows == 2
    assert batch.num_rows == 4
    assert batch.host_rows.tolist() == [3, 1, 6, 2]
    assert batch.host_num_computed.tolist() == [0, 3, 4, 2]
    assert batch.host_input_lens.tolist() == [3, 2, 1, 1]
    assert batch.clamped.tolist() == [False] * 4
    assert batch.page_size == 4


def test_index_tensors_are_int64() -> None:
    """Every index tensor has 64 bits and lies on the device."""
    batch = build([(1, [5], 0, [1])])
    names = ["rows", "num_computed", "input_lens", "seq_lens", "query_indptr", "input_ids", "positions", "token_rows"]
    for tensor in [*(getattr(batch, name) for name in names), batch.out_cache_loc]:
        assert tensor.dtype == torch.int64
        assert tensor.device.type == DEVICE
    assert batch.req_to_page.dtype == torch.int32


def test_slot_of_a_large_pool_keeps_64_bits() -> None:
    """Page 2^28 of 16 tokens has slot 2^32, which 32 bits would read as 0 (B42)."""
    batch = build([(1, [1 << 28], 0, [1, 2])], page_size=16)
    assert batch.out_cache_loc.tolist() == [1 << 32, (1 << 32) + 1]


def test_empty_op_gives_an_empty_batch() -> None:
    """An op that only releases rows has no token."""
    batch = build([])
    assert batch.num_rows == 0
    assert batch.query_indptr.tolist() == [0]
    assert batch.input_ids.tolist() == []
    assert batch.out_cache_loc.tolist() == []


@pytest.mark.parametrize(
    ("num_computed", "input_ids", "slots", "seq_len", "clamped"),
    [
        (6, [1, 2], [22, 23], 8, False),
        (6, [1, 2, 3, 4], [22, 23, 0, 1], 8, True),
        (8, None, [0], 8, True),
        (13, None, [1], 8, True),
    ],
)
def test_tokens_past_the_mirror_go_to_the_dummy_page(
    num_computed: int, input_ids: list[int] | None, slots: list[int], seq_len: int, clamped: bool
) -> None:
    """In a mirror of 2 pages of 4 tokens, positions from 8 on never hit the last page, and mark their row only (B47)."""
    row: Row = (2, [9, 5, 6, 7], num_computed, input_ids)
    rows = [row, (1, [3], 1, None)] if input_ids is None else [(1, [3], 1, [50]), row]
    batch = build(rows, width=2)
    i = rows.index(row)
    indptr = batch.query_indptr.tolist()
    assert batch.out_cache_loc.tolist()[indptr[i] : indptr[i + 1]] == slots
    assert batch.seq_lens.tolist()[i] == seq_len
    assert batch.clamped.tolist() == [clamped if j == i else False for j in range(2)]
    assert batch.out_cache_loc.tolist()[indptr[1 - i]] == 13


def test_wider_row_whose_tokens_fit_is_not_clamped() -> None:
    """A row may hold more pages than the mirror as long as its tokens lie within: only tokens decide."""
    assert build([(2, [9, 5, 6], 7, None)], width=2).clamped.tolist() == [False]


def test_sample_flags_are_those_of_the_op() -> None:
    """A chunk that leaves prompt tokens uncomputed does not sample."""
    mirror = ReqToPage(2, 4, 99, 4, device=DEVICE)
    op = make_op([(1, [5], 0, [1, 2]), (2, [6], 0, [3])], sample=[False, True])
    mirror.apply(op)
    batch = BatchBuilder(mirror, DEVICE).build(op, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert batch.sample.tolist() == [False, True]


def test_an_earlier_batch_keeps_its_numbers() -> None:
    """Building later steps, and new last tokens, change nothing of a batch that is still in use."""
    mirror = ReqToPage(2, 4, 99, 4, device=DEVICE)
    builder = BatchBuilder(mirror, DEVICE)
    last_tokens = torch.tensor([0, 41, 42], device=DEVICE)
    op = make_op([(1, [5], 1, None), (2, [6], 2, None)])
    mirror.apply(op)
    first = builder.build(op, last_tokens)
    last_tokens += 7
    for step in range(8):
        builder.build(make_op([(1, [5], step % 4, None)]), last_tokens)
    assert first.input_ids.tolist() == [41, 42]
    assert first.positions.tolist() == [1, 2]
    assert first.out_cache_loc.tolist() == [21, 26]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [("input_ids", [1], "1 input ids for 2 tokens of 1 extend rows"), ("input_lens", [2, 3], "1 decode rows compute 3 tokens")],
)
def test_inputs_that_do_not_fit_the_rows_are_refused(name: str, values: list[int], message: str) -> None:
    """Missing input ids, or a decode row of several tokens, would shift the tokens of every later row."""
    mirror = ReqToPage(2, 4, 99, 4)
    op = make_op([(1, [5], 0, [1, 2]), (2, [6], 0, None)])
    mirror.apply(op)
    setattr(op, name, column(values))
    with pytest.raises(ValueError, match=message):
        BatchBuilder(mirror, "cpu").build(op, torch.zeros(3, dtype=torch.int64))


@given(data=st.data())
def test_random_batches_match_a_loop_over_tokens(data: st.DataObject) -> None:
    """Every token of any batch has the row, position, id and slot that one plain loop gives it (B49)."""
    page_size = data.draw(st.sampled_from([1, 2, 3, 5, 16, 129]))
    width = data.draw(st.sampled_from([1, 3, 8]))
    numbers = data.draw(st.lists(st.integers(1, 6), unique=True, min_size=1))
    num_extend_rows = data.draw(st.integers(0, len(numbers)))
    rows: list[Row] = []
    for i, number in enumerate(numbers):
        num_computed = data.draw(st.integers(0, page_size * (width + 1)))
        ids = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=2 * page_size)) if i < num_extend_rows else None
        num_pages = -(-(num_computed + len(ids or [0])) // page_size)
        rows.append((number, [1000 * number + j for j in range(num_pages)], num_computed, ids))
    batch = build(rows, page_size, width)
    tokens = []
    for i, (number, pages, num_computed, ids) in enumerate(rows):
        for j, token in enumerate([100 + number] if ids is None else ids):
            position = num_computed + j
            page = pages[position // page_size] if position < width * page_size else 0
            tokens.append((i, position, token, page * page_size + position % page_size))
    columns = (batch.token_rows, batch.positions, batch.input_ids, batch.out_cache_loc)
    assert list(zip(*(tensor.tolist() for tensor in columns), strict=True)) == tokens
    ends = [num_computed + len(ids or [0]) for _, _, num_computed, ids in rows]
    assert batch.seq_lens.tolist() == [min(end, width * page_size) for end in ends]
    assert batch.clamped.tolist() == [end > width * page_size for end in ends]


@given(
    lens=st.lists(st.integers(0, 14), min_size=1, max_size=6),
    page_size=st.integers(1, 5),
    width=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_decode_step_is_the_same_by_kernel(lens: list[int], page_size: int, width: int, seed: int) -> None:
    """Positions, lengths and slots worked out on the device are those of the general path, clamped rows included."""
    generator = np.random.default_rng(seed)
    rows = generator.permutation(np.arange(1, 7))[: len(lens)].tolist()
    pages = generator.permutation(np.arange(1, 200)).tolist()
    op_rows: list[Row] = [
        (row, [pages.pop() for _ in range(length // page_size + 1)], length, None)
        for row, length in zip(rows, lens, strict=True)
    ]
    op = make_op(op_rows)
    mirror = ReqToPage(6, width, 1 << 20, page_size, device=DEVICE)
    mirror.apply(op)
    last_tokens = torch.arange(100, 107, dtype=torch.int64, device=DEVICE)
    general = BatchBuilder(mirror, DEVICE, decode_kernel=False).build(op, last_tokens)
    builder = BatchBuilder(mirror, DEVICE, decode_kernel=True)
    for _ in range(2):  # what an earlier step left in the builder changes nothing
        by_kernel = builder.build(op, last_tokens)
        for name in ("rows", "num_computed", "input_lens", "seq_lens", "query_indptr", "input_ids", "positions", "token_rows"):
            assert getattr(by_kernel, name).tolist() == getattr(general, name).tolist(), name
        assert by_kernel.clamped.tolist() == general.clamped.tolist()
        inside = torch.from_numpy(~general.clamped).to(DEVICE)
        assert by_kernel.out_cache_loc[inside].tolist() == general.out_cache_loc[inside].tolist()
        assert (by_kernel.out_cache_loc[~inside] < page_size).all()


@pytest.mark.parametrize("decode_kernel", [False, True])
def test_masked_decode_rows_become_padding(decode_kernel: bool) -> None:
    """A masked row is looked up in row 0, gets row 0's token and a slot of the dummy page; its neighbours are as without."""
    rows: list[Row] = [(3, [7, 9], 5, None), (1, [5], 3, None), (2, [8, 6], 4, None)]
    plain = build(rows, decode_kernel=decode_kernel)
    assert plain.masked is None
    none = build(rows, masked=[False] * 3, decode_kernel=decode_kernel)
    some = build(rows, masked=[False, True, False], decode_kernel=decode_kernel)
    for name in ("rows", "seq_lens", "input_ids", "positions", "out_cache_loc"):
        columns = [getattr(batch, name).tolist() for batch in (plain, none, some)]
        assert columns[0] == columns[1], name
        assert [columns[0][i] == columns[2][i] for i in (0, 2)] == [True, True], name
    assert (some.rows.tolist(), some.input_ids.tolist()) == ([3, 0, 2], [103, 0, 102])
    assert some.out_cache_loc[1] == 0
    assert some.host_rows.tolist() == [3, 1, 2]
    assert some.masked is not None
    assert some.masked.tolist() == [False, True, False]


def test_masked_chunks_write_to_the_dummy_page() -> None:
    """Every token of a masked chunk has a slot of page 0, in a step with other chunks and a decode row."""
    rows: list[Row] = [(3, [7], 0, [1, 2, 3]), (1, [5, 9], 3, [11, 12]), (6, [2, 8], 4, None)]
    batch = build(rows, masked=[False, True, False])
    assert batch.rows.tolist() == [3, 0, 6]
    assert batch.input_ids.tolist() == [1, 2, 3, 11, 12, 106]
    assert batch.out_cache_loc.tolist() == [28, 29, 30, 0, 0, 32]
    both = build(rows, masked=[True, False, True])
    assert both.out_cache_loc.tolist() == [0, 0, 0, 23, 36, 0]


@given(data=st.data())
def test_selected_rows_are_the_batch_of_these_rows(data: st.DataObject) -> None:
    """Leaving rows out of a batch gives the batch that an op without them would have had."""
    lens = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    num_extend_rows = data.draw(st.integers(0, len(lens)))
    rows: list[Row] = []
    for i, length in enumerate(lens):
        num_computed = data.draw(st.integers(0, 6))
        ids = list(range(length)) if i < num_extend_rows else None
        num_pages = -(-(num_computed + len(ids or [0])) // 4)
        rows.append((i + 1, [10 * i + j + 1 for j in range(num_pages)], num_computed, ids))
    kept = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    selected = build(rows).select(np.array(kept))
    alone = build([rows[i] for i in kept])
    names = ("rows", "num_computed", "input_lens", "seq_lens", "query_indptr", "input_ids", "positions", "token_rows")
    host = ("host_rows", "host_num_computed", "host_input_lens", "sample", "clamped")
    for name in (*names, "out_cache_loc", *host):
        assert getattr(selected, name).tolist() == getattr(alone, name).tolist(), name
    assert (selected.num_rows, selected.num_extend_rows) == (alone.num_rows, alone.num_extend_rows)


@pytest.mark.skipif(DEVICE != "cpu", reason="only a CPU has a short way of its own")
@given(data=st.data())
def test_short_way_of_a_cpu_builds_the_same_batch(data: st.DataObject) -> None:
    """Chunks and decode rows, some of them past the mirror's width, become what is staged elsewhere."""
    num_rows = data.draw(st.integers(1, 6))
    num_extend_rows = data.draw(st.integers(0, num_rows))
    rows: list[Row] = []
    for i, row in enumerate(data.draw(st.permutations(range(1, 7)))[:num_rows]):
        ids = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6)) if i < num_extend_rows else None
        num_computed = data.draw(st.integers(0, 34))
        rows.append((row, [10 * row + place for place in range(9)], num_computed, ids))
    short, general = build(rows), build(rows, decode_kernel=False)
    names = ("rows", "num_computed", "input_lens", "seq_lens", "query_indptr", "input_ids", "positions", "token_rows")
    for name in (*names, "out_cache_loc"):
        assert getattr(short, name).dtype == getattr(general, name).dtype, name
        assert getattr(short, name).tolist() == getattr(general, name).tolist(), name
    assert short.clamped.tolist() == general.clamped.tolist()
    assert (short.num_rows, short.num_extend_rows) == (general.num_rows, general.num_extend_rows)
