"""The quick way for ops of tail updates against the way that takes any op, and what a step costs the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_service.req_to_page import ReqToPage
from runtime_service.staging import StagingRing

MirrorOf = Callable[..., Any]
INT32 = [-(1 << 31), -1, 0, 1, 2, 3, 5, 1 << 30, (1 << 31) - 1]


def outcome(mirror: Any, op: Any) -> Any:
    """What `apply` made of the op, and the mirror after it."""
    try:
        answer: Any = mirror.apply(op).tolist()
    except (TypeError, ValueError) as error:
        answer = (type(error), str(error))
    return answer, mirror.contents().tolist(), mirror.row_lens.tolist(), mirror.valid_lens.tolist(), mirror.num_clamped


@given(data=st.data())
def test_quick_way_leaves_what_the_general_way_leaves(mirror_of: MirrorOf, ops: Any, data: st.DataObject) -> None:
    """Tail updates, some of them with a wrong entry, give the same mirror, the same answer and the same error both ways."""
    mirrors = [mirror_of(width=6), mirror_of(width=6)]
    mirrors[1]._apply_tails = lambda op: False
    lens = data.draw(st.lists(st.integers(0, 4), min_size=4, max_size=4))
    rows = [ops.full(row, list(range(10 * row, 10 * row + length))) for row, length in enumerate(lens, start=1)]
    assert outcome(mirrors[0], ops.make(rows)) == outcome(mirrors[1], ops.make(rows))
    for _ in range(2):
        tails = []
        for row in data.draw(st.permutations([1, 2, 3, 4]))[: data.draw(st.integers(1, 4))]:
            begin = lens[row - 1]
            lens[row - 1] += data.draw(st.integers(0, 2))
            tails.append(ops.tail(row, begin, list(range(10 * row, 10 * row + lens[row - 1]))))
        op = ops.make(tails)
        if data.draw(st.booleans()):
            column = data.draw(st.sampled_from(["req_pool_indices", "row_lens", "begins", "sizes", "occupied_pages"]))
            values = getattr(op, column).copy()
            if len(values):
                # A row number that comes twice is the session's to refuse.
                allowed = [-1, 0, 5] if column == "req_pool_indices" else INT32
                values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.sampled_from(allowed))
            op = replace(op, **{column: values})
        first, second = outcome(mirrors[0], op), outcome(mirrors[1], op)
        assert first == second
        if isinstance(first[0], tuple):
            return


@settings(max_examples=50)
@given(data=st.data())
def test_quick_way_of_mixed_ops_leaves_what_the_general_way_leaves(mirror_of: MirrorOf, ops: Any, data: st.DataObject) -> None:
    """Refreshes, also to fewer pages or to none, and releases among tails, some with a wrong entry, both ways."""
    options = {"width": 6, "zero_fill": data.draw(st.booleans())}
    mirrors = [mirror_of(**options), mirror_of(**options)]
    mirrors[1]._apply_tails = lambda op: False
    lens = [3, 0, 2, 1]
    rows = [ops.full(row, list(range(10 * row, 10 * row + length))) for row, length in enumerate(lens, start=1)]
    assert outcome(mirrors[0], ops.make(rows)) == outcome(mirrors[1], ops.make(rows))
    for _ in range(3):
        released = data.draw(st.lists(st.integers(1, 4), max_size=2))
        for row in released:
            lens[row - 1] = 0
        made = []
        for row in data.draw(st.permutations([1, 2, 3, 4]))[: data.draw(st.integers(0, 4))]:
            begin, full = lens[row - 1], data.draw(st.booleans())
            lens[row - 1] = data.draw(st.integers(0 if full else begin, max(begin, 7)))
            pages = list(range(10 * row, 10 * row + lens[row - 1]))
            made.append(ops.full(row, pages) if full else ops.tail(row, begin, pages))
        op = ops.make(made, released=released)
        if data.draw(st.integers(0, 3)) == 0:
            names = ["req_pool_indices", "row_lens", "begins", "sizes", "occupied_pages", "full_refresh", "released_rows"]
            column = data.draw(st.sampled_from(names))
            values = getattr(op, column).copy()
            if len(values):
                allowed: list[Any] = [-1, 0, 5] if column in {"req_pool_indices", "released_rows"} else INT32
                new = data.draw(st.booleans() if column == "full_refresh" else st.sampled_from(allowed))
                values[data.draw(st.integers(0, len(values) - 1))] = new
            op = replace(op, **{column: values})
        first, second = outcome(mirrors[0], op), outcome(mirrors[1], op)
        assert first == second
        if isinstance(first[0], tuple):
            return


def test_refreshes_and_releases_take_the_quick_way(mirror_of: MirrorOf, ops: Any) -> None:
    """Rows that are rewritten, released, or both, do not send the rows that go on the general way."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(2, [3, 4, 5]), ops.full(3, [6])]))
    assert mirror._apply_tails(ops.make([ops.tail(1, 2, [1, 2, 7]), ops.full(2, [8])]))
    assert mirror._apply_tails(ops.make([ops.tail(1, 3, [1, 2, 7])], released=[3]))
    assert mirror._apply_tails(ops.make([ops.tail(1, 3, [1, 2, 7, 9]), ops.full(2, [10, 11])], released=[2]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[1, 2, 7, 9], [10, 11], []]
    assert mirror.contents()[2][:4].tolist() == [10, 11, 0, 0]


def test_plain_tails_take_the_quick_way(mirror_of: MirrorOf, ops: Any) -> None:
    """Rows that go on, with and without new pages, never reach what only other ops need."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(2, [3]), ops.full(3, [])]))
    assert mirror._apply_tails(ops.make([ops.tail(3, 0, [7, 8]), ops.tail(1, 2, [1, 2, 9]), ops.tail(2, 1, [3])]))
    assert mirror._apply_tails(ops.make([ops.tail(2, 1, [3])]))
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[1, 2, 9], [3], [7, 8]]


@pytest.mark.parametrize("released", [[], [4]], ids=["", "with a release"])
def test_a_step_is_one_copy_and_one_launch(
    mirror_of: MirrorOf, ops: Any, launches: Any, monkeypatch: pytest.MonkeyPatch, released: list[int]
) -> None:
    """Refreshes, tails, clears and releases of any number of rows are one staged buffer, one upload of it and one launch."""
    counts = {"begin": 0, "upload": 0}

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(StagingRing, name)

        def call(ring: StagingRing, *args: Any) -> Any:
            counts[name] += 1
            return original(ring, *args)

        return call

    for name in counts:
        monkeypatch.setattr(StagingRing, name, counted(name))
    mirror: ReqToPage = mirror_of()
    steps = [
        ops.make([ops.full(1, [1, 2, 3]), ops.full(2, [4]), ops.full(4, [5, 6])]),
        ops.make([ops.tail(1, 3, [1, 2, 3, 7]), ops.tail(2, 1, [4, 8])], released=released),
        ops.make([ops.full(1, [9]), ops.tail(2, 2, [4, 8, 10, 11]), ops.full(3, [12, 13])], released=released),
    ]
    for number, op in enumerate(steps, start=1):
        mirror.apply(op)
        assert (counts["begin"], counts["upload"], launches.count) == (number, number, number)
    assert [row.tolist() for row in mirror.read_rows([1, 2, 3])] == [[9], [4, 8, 10, 11], [12, 13]]
    mirror.apply(ops.make([ops.tail(1, 1, [9])]))  # nothing new: nothing is copied either
    assert (counts["upload"], launches.count) == (3, 3)
    assert np.array_equal(mirror.row(4), [] if released else [5, 6])


@pytest.mark.parametrize(
    ("begins", "sizes", "num_pages"),
    [([2, 1], [-1, 2], 1), ([2, 1], [1, 0], 2), ([2, 1], [1, 2], 1)],
    ids=["a negative size hidden in the sum", "a page too many", "pages missing"],
)
def test_wrong_sizes_are_refused_before_anything_is_written(
    mirror_of: MirrorOf, ops: Any, begins: list[int], sizes: list[int], num_pages: int
) -> None:
    """Sizes that the pages or the lengths belie raise, and the mirror is what it was."""
    mirror = mirror_of()
    mirror.apply(ops.make([ops.full(1, [1, 2]), ops.full(2, [3])]))
    before = outcome(mirror, ops.make([]))[1:]
    op = ops.make([ops.tail(1, 2, [1, 2]), ops.tail(2, 1, [3])])
    columns = {"begins": begins, "sizes": sizes, "row_lens": np.add(begins, sizes), "occupied_pages": [7] * num_pages}
    with pytest.raises(ValueError, match="is outside its limit"):
        mirror.apply(replace(op, **{name: np.array(values, dtype=np.int32) for name, values in columns.items()}))
    assert outcome(mirror, ops.make([]))[1:] == before
