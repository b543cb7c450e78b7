"""The mirror in the forms of attention libraries, against what plain loops over the rows make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plain_digest import plain_digest
from runtime_service import (
    PageUpdate,
    ReqToPage,
    block_table,
    paged_kv,
    req_to_token,
    row_digests,
    slot_mapping,
)

ROWS = {1: [7, 9, 4], 2: [], 3: [5], 4: [6, 8, 10, 11, 12]}


@pytest.fixture(params=[1, 4, 7], ids=lambda size: f"page_size {size}")
def mirror(request: pytest.FixtureRequest) -> ReqToPage:
    mirror = ReqToPage(max_rows=5, max_pages_per_row=6, num_pages=16, page_size=request.param)
    lens = [len(pages) for pages in ROWS.values()]
    full, zeros = [True] * len(ROWS), [0] * len(ROWS)
    mirror.apply(PageUpdate(list(ROWS), lens, zeros, lens, full, sum(ROWS.values(), [])))
    return mirror


def test_block_table_of_any_rows(mirror: ReqToPage) -> None:
    """Rows in any order and repeated, padded with the dummy page; as wide as the longest, or as asked for."""
    assert block_table(mirror, [4, 1, 1]).tolist() == [[6, 8, 10, 11, 12], [7, 9, 4, 0, 0], [7, 9, 4, 0, 0]]
    assert block_table(mirror, torch.tensor([3, 2]), max_pages=2).tolist() == [[5, 0], [0, 0]]
    assert block_table(mirror, []).shape == (0, 1)


def test_block_table_of_consecutive_rows_is_the_mirror_itself(mirror: ReqToPage) -> None:
    """No copy: what is applied later is seen in it."""
    table = block_table(mirror, [2, 3, 4], max_pages=6)
    assert table.data_ptr() == mirror.table[2].data_ptr()
    mirror.apply(PageUpdate([2], [1], [0], [1], [True], [16]))
    assert table[0].tolist() == [16, 0, 0, 0, 0, 0]


def test_paged_kv_has_the_pages_of_the_tokens(mirror: ReqToPage) -> None:
    """Compressed rows hold exactly the pages that the sequence lengths need, and the last page's fill."""
    size = mirror.page_size
    lens = {4: 4 * size + 1, 2: 0, 1: 3 * size, 3: 1}
    indptr, indices, last = paged_kv(mirror, list(lens), list(lens.values()))
    assert indptr.tolist() == [0, 5, 5, 8, 9]
    assert indices.tolist() == [6, 8, 10, 11, 12, 7, 9, 4, 5]
    assert last.tolist() == [1, 0, size, 1]
    assert {column.dtype for column in (indptr, indices, last)} == {torch.int32}


def test_slots_are_those_of_each_token(mirror: ReqToPage) -> None:
    """Each token's slot is page · page_size + offset; past a row's pages it is one of the dummy page."""
    size = mirror.page_size
    begins, lens = [2 * size, 0, 5 * size - 1], [size, 2, 3]
    expected = []
    for row, begin, length in zip((1, 3, 4), begins, lens, strict=True):
        for position in range(begin, begin + length):
            pages = ROWS[row] + [0] * 6
            expected.append(pages[position // size] * size + position % size)
    slots = slot_mapping(mirror, [1, 3, 4], begins, lens)
    assert slots.tolist() == expected
    assert slots.dtype == torch.int64


def test_slots_past_the_mirror_are_of_the_dummy_page(mirror: ReqToPage) -> None:
    """A position beyond the mirror's width never gets a slot of a live page."""
    slots = slot_mapping(mirror, [4], [6 * mirror.page_size], [2 * mirror.page_size])
    assert slots.max() < mirror.page_size


def test_token_table_names_every_token(mirror: ReqToPage) -> None:
    """The token-level table agrees with the slots, for all rows and for some."""
    size = mirror.page_size
    table = req_to_token(mirror)
    assert table.shape == (6, 6 * size)
    for row in ROWS:
        assert table[row].tolist() == slot_mapping(mirror, [row], [0], [6 * size]).tolist()
    assert torch.equal(req_to_token(mirror, [4, 1]), table[[4, 1]])


def test_digests_are_those_of_the_protocol(mirror: ReqToPage) -> None:
    """Row by row the plain definition, over rows that are empty, too."""
    expected = [plain_digest(pages) for pages in ROWS.values()]
    assert row_digests(mirror, list(ROWS)).tolist() == expected


def test_wrong_arguments_name_value_and_limit(mirror: ReqToPage) -> None:
    """A row number out of range, a row too short for its tokens, lengths that do not fit."""
    with pytest.raises(IndexError, match=r"\[6\] are not all within \[0, 5\]"):
        block_table(mirror, [6])
    with pytest.raises(ValueError, match="max_pages is 7, the mirror has 6"):
        block_table(mirror, [1], max_pages=7)
    with pytest.raises(ValueError, match=f"row 3 has 1 pages of {mirror.page_size} tokens, its sequence length is"):
        paged_kv(mirror, [1, 3], [1, mirror.page_size + 1])
    with pytest.raises(ValueError, match="1 sequence lengths for 2 rows"):
        paged_kv(mirror, [1, 3], [1])
    with pytest.raises(ValueError, match="one entry a row"):
        slot_mapping(mirror, [1], [0], [-1])
    with pytest.raises(ValueError, match="at most 2147483647, the last token position"):
        slot_mapping(mirror, [1], [2**63 - 2], [4])
    with pytest.raises(ValueError, match=r"rows must have one dimension, not shape \(\)"):
        block_table(mirror, 1)
    with pytest.raises(TypeError, match="rows must be whole numbers, not float64"):
        block_table(mirror, [1.5])
    with pytest.raises(TypeError, match="seq_lens must be whole numbers, not float64"):
        paged_kv(mirror, [1], [1.5])


def test_no_rows_are_no_entries(mirror: ReqToPage) -> None:
    """An empty batch has empty views of the right kinds."""
    indptr, indices, last = paged_kv(mirror, [], [])
    assert (indptr.tolist(), len(indices), len(last)) == ([0], 0, 0)
    assert len(slot_mapping(mirror, [], [], [])) == len(row_digests(mirror, [])) == 0
    assert req_to_token(mirror, []).shape == (0, 6 * mirror.page_size)


def test_slots_beyond_32_bits_are_refused_where_they_do_not_fit() -> None:
    """A pool of 2^32 slots: the 64-bit slots are right, the 32-bit table is refused; with half of them it is right."""
    wide = ReqToPage(max_rows=1, max_pages_per_row=1, num_pages=2**24, page_size=256)
    wide.apply(PageUpdate([1], [1], [0], [1], [True], [2**24]))
    assert slot_mapping(wide, [1], [255], [1]).tolist() == [2**32 + 255]
    with pytest.raises(ValueError, match="slots of 16777216 pages of 256 tokens do not fit into int32"):
        req_to_token(wide)
    half = ReqToPage(max_rows=1, max_pages_per_row=1, num_pages=2**23 - 1, page_size=256)
    half.apply(PageUpdate([1], [1], [0], [1], [True], [2**23 - 1]))
    assert int(req_to_token(half)[1].max()) == 2**31 - 1


def test_views_agree_with_each_other_at_random() -> None:
    """For random rows: block table, compressed pages and slots say the same of every token."""
    rng = np.random.default_rng(5)
    mirror = ReqToPage(max_rows=12, max_pages_per_row=9, num_pages=200, page_size=4)
    lens = rng.integers(0, 10, 12)
    pages = np.concatenate([rng.choice(np.arange(1, 201), n, replace=False) for n in lens])
    mirror.apply(PageUpdate(np.arange(1, 13), lens, np.zeros(12, int), lens, np.ones(12, bool), pages))
    rows = rng.permutation(12)[:8] + 1
    seq_lens = np.array([rng.integers(0, lens[row - 1] * 4 + 1) for row in rows])
    table = block_table(mirror, rows, max_pages=9)
    indptr, indices, _ = paged_kv(mirror, rows, seq_lens)
    slots = slot_mapping(mirror, rows, np.zeros(8, int), seq_lens).split(seq_lens.tolist())
    for i, length in enumerate(seq_lens.tolist()):
        count = -(-length // 4)
        assert indices[indptr[i] : indptr[i + 1]].tolist() == table[i, :count].tolist()
        assert slots[i].tolist() == [int(table[i, t // 4]) * 4 + t % 4 for t in range(length)]
