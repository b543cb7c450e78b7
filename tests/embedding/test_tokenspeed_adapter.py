"""The adapter for TokenSpeed's forward ops: what it derives, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service import (
    ColumnTypeError,
    ColumnValueError,
    ForwardOp,
    MissingAttributeError,
    PageFeed,
    Refusal,
    RefusalCode,
    ReqToPage,
    SamplingParams,
    TokenSpeedAdapter,
    UnsupportedPlanError,
)


def _batch(rows: list[tuple[str, int, list[int], int]], *, extends: dict[str, tuple[int, list[int], int]] | None = None) -> Any:
    """Rows are (request, row, pages, begin); `extends` has per request (prefix, ids, whole prompt); those rows come first."""
    extends = extends or {}
    return SimpleNamespace(
        request_ids=[name for name, *_ in rows],
        request_pool_indices=[row for _, row, *_ in rows],
        occupied_pages=[pages for _, _, pages, _ in rows],
        begins=[begin for *_, begin in rows],
        sizes=[len(pages) - begin for *_, pages, begin in rows],
        input_lengths=[len(extends[name][1]) if name in extends else 1 for name, *_ in rows],
        num_extends=lambda: len(extends),
        extend_prefix_lens=[extends[name][0] for name, *_ in rows if name in extends],
        prefill_lengths=[extends[name][2] if name in extends else 0 for name, *_ in rows],
        input_ids=sum((extends[name][1] for name, *_ in rows if name in extends), []),
    )


def _begun() -> TokenSpeedAdapter:
    adapter = TokenSpeedAdapter(4)
    adapter.forward_op(_batch([("a", 1, [7, 9], 0)], extends={"a": (0, [1, 2, 3, 4, 5], 5)}))
    return adapter


def _columns(op: ForwardOp) -> tuple[Any, ...]:
    columns = (op.row_generations, op.begins, op.sizes, op.full_refresh, op.occupied_pages, op.num_computed)
    return tuple(column.tolist() for column in columns)


def test_bit_is_derived_where_the_head_changed() -> None:
    """The scheduler says size 0, and means that the first page is another one now: the row is sent whole."""
    adapter = _begun()
    assert _columns(adapter.forward_op(_batch([("a", 1, [7, 9], 2)]))) == ([1], [2], [0], [False], [], [5])
    assert _columns(adapter.forward_op(_batch([("a", 1, [3, 9], 2)]))) == ([1], [2], [0], [True], [3, 9], [6])
    assert _columns(adapter.forward_op(_batch([("a", 1, [3, 9, 7], 2)]))) == ([1], [2], [1], [False], [7], [7])


def test_bit_of_the_producer_is_taken_as_it_is() -> None:
    """A build that has `full_refresh` knows: its 1 rewrites a row that looks the same."""
    adapter, batch = _begun(), _batch([("a", 1, [7, 9], 2)])
    batch.full_refresh = [True]
    assert _columns(adapter.forward_op(batch))[3:5] == ([True], [7, 9])
    batch.full_refresh = [0]
    assert _columns(adapter.forward_op(batch))[3:5] == ([False], [])


def test_computing_anew_is_a_new_lease() -> None:
    """A request that was retracted and resumes in the same row has a higher generation and begins at its cached prefix."""
    adapter = _begun()
    op = adapter.forward_op(_batch([("a", 1, [7, 3], 0)], extends={"a": (4, [5, 6], 6)}))
    assert _columns(op) == ([2], [0], [2], [True], [7, 3], [4])
    assert [start.request_id for start in op.lease_starts] == ["a"]


def test_row_of_another_request_and_finish() -> None:
    """A row number that goes to another request begins a lease; a finished request's row is released with the next op."""
    adapter = _begun()
    adapter.finish("a")
    adapter.finish("a")
    op = adapter.forward_op(_batch([("b", 2, [5], 0)], extends={"b": (0, [1, 2], 4)}))
    assert op.released_rows.tolist() == [1]
    assert op.sample.tolist() == [False]  # two of four prompt tokens
    again = adapter.forward_op(_batch([("c", 2, [6], 0)], extends={"c": (0, [9], 1)}))
    assert again.row_generations.tolist() == [2]


def test_tables_of_a_newer_scheduler_keep_holes() -> None:
    """Full tables: padding of -1 is dropped, holes of a sliding window are passed on as the dummy page."""
    adapter, feed = TokenSpeedAdapter(4, group="window"), PageFeed(ReqToPage(4, 8, 16, 4), allow_holes=True)
    batch = _batch([("a", 1, [], 0)], extends={"a": (0, [1] * 9, 9)})
    batch.block_tables_arrays = lambda: {"window": np.array([[4, 5, 6, -1]]), "full": np.array([[1, 2, 3, -1]])}
    feed.apply(adapter.forward_op(batch))
    batch = _batch([("a", 1, [], 0)])
    batch.block_tables_arrays = lambda: {"window": np.array([[0, 5, 6, 7]]), "full": np.array([[1, 2, 3, 8]])}
    op = adapter.forward_op(batch)
    feed.apply(op)
    assert op.full_refresh.tolist() == [True]
    assert feed.mirror.row(1).tolist() == [0, 5, 6, 7]
    with pytest.raises(UnsupportedPlanError, match=r"cache group None is not one of \['full', 'window'\]; pass `group=`"):
        TokenSpeedAdapter(4).forward_op(batch)


ATTRIBUTES = (
    "request_ids",
    "request_pool_indices",
    "input_lengths",
    "num_extends",
    "extend_prefix_lens",
    "prefill_lengths",
    "input_ids",
    "occupied_pages",
    "begins",
    "sizes",
)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_missing_attribute_is_named(attribute: str) -> None:
    """An object that is no forward op: the attribute and the producer are told."""
    batch = _batch([("a", 1, [7, 9], 2)])
    delattr(batch, attribute)
    with pytest.raises(
        MissingAttributeError, match=f"no attribute '{attribute}'; expected a forward op of tokenspeed-scheduler"
    ):
        _begun().forward_op(batch)


def _changed(batch: Any, **columns: Any) -> Any:
    for name, value in columns.items():
        setattr(batch, name, value)
    return batch


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "gap": (_batch([("a", 1, [7, 9, 3, 4], 3)]), Refusal, "begin 3 leaves a gap after the 2 pages"),
    "overlap": (_batch([("a", 1, [7, 9, 3], 1)]), Refusal, "begin 1 overlaps the 2 pages"),
    "gap of a new one": (
        _batch([("b", 2, [7, 9], 1)], extends={"b": (0, [1], 1)}),
        Refusal,
        "row 2 of request 'b': begin 1 leaves a gap after the 0 pages",
    ),
    "sum": (_changed(_batch([("a", 1, [7, 9], 2)]), sizes=[1]), Refusal, "begin 2 \\+ size 1 is not the row's 2 pages"),
    "row": (_batch([("a", 5, [7, 9], 0)], extends={"a": (0, [1], 1)}), Refusal, r"row 5 .* row numbers are in \[1, 4\]"),
    "row twice": (
        _batch([("a", 1, [7, 9], 0), ("b", 1, [3], 0)], extends={"a": (5, [1], 6), "b": (0, [1], 1)}),
        Refusal,
        "row 1 of request 'b': the plan names this row twice",
    ),
    "columns": (
        _changed(_batch([("a", 1, [7, 9], 2)]), input_lengths=[]),
        Refusal,
        "input_lengths has 0 entries for 1 request",
    ),
    "tokens": (
        _changed(_batch([("a", 1, [7, 9], 0)], extends={"a": (5, [1, 2], 7)}), input_ids=[1]),
        Refusal,
        "input_ids has 1 entries, the extend rows ask for 2",
    ),
    "first step": (_batch([("z", 3, [4], 0)]), Refusal, "row 3 of request 'z': its first step is a decode step"),
    "drafts": (_changed(_batch([("a", 1, [7, 9], 2)]), input_lengths=[3]), UnsupportedPlanError, "computes 3 tokens, not 1"),
    "no tokens": (
        _batch([("a", 1, [7, 9], 2)], extends={"a": (5, [], 6)}),
        Refusal,
        "row 1 of request 'a': it computes 0 tokens from token 5 on",
    ),
    "extends": (_changed(_batch([("a", 1, [7, 9], 2)]), num_extends=2), Refusal, "2 extend rows of 1"),
    "fractions": (_changed(_batch([("a", 1, [7, 9], 2)]), begins=[2.5]), ColumnTypeError, "begins is float64"),
    "page of a fraction": (
        _changed(_batch([("a", 1, [7, 9], 2)]), occupied_pages=[[7.5, 9]]),
        ColumnTypeError,
        "occupied_pages is float64",
    ),
    "page beyond 32 bits": (
        _changed(_batch([("a", 1, [7, 9], 2)]), occupied_pages=[np.array([7, 2**32 + 9])]),
        ColumnTypeError,
        "occupied_pages is int64: a value does not fit",
    ),
    "nothing": (_changed(_batch([("a", 1, [7, 9], 2)]), sizes=None), ColumnTypeError, "sizes is object: .* not NoneType"),
    "a number": (_changed(_batch([("a", 1, [7, 9], 2)]), sizes=0), ColumnValueError, "sizes: 0 is outside its limit"),
    "bits": (_changed(_batch([("a", 1, [7, 9], 2)]), full_refresh=[]), Refusal, "1 rows of occupied_pages, 0 of full_refresh"),
    "bits of 2": (_changed(_batch([("a", 1, [7, 9], 2)]), full_refresh=[2]), ColumnTypeError, "full_refresh is int.*bool"),
    "tables": (
        _changed(_batch([("a", 1, [], 0)]), block_tables_arrays=lambda: [np.array([[7, 9]])]),
        UnsupportedPlanError,
        "gives list, not a table",
    ),
    "flat table": (
        _changed(_batch([("a", 1, [], 0)]), block_tables_arrays=lambda: {"full": np.array([7, 9])}),
        Refusal,
        r"group 'full' has shape \(2,\)",
    ),
    "padding": (
        _changed(_batch([("a", 1, [], 0)]), block_tables_arrays=lambda: {"full": np.array([[7, -1, 9]])}),
        Refusal,
        "padding inside of a block table row",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_op_changes_nothing(name: str) -> None:
    """What contradicts itself or what was passed on is a typed error; the next op is taken as if nothing had come."""
    batch, kind, text = BAD[name]
    adapter = _begun()
    with pytest.raises(kind, match=text):
        adapter.forward_op(batch)
    op = adapter.forward_op(_batch([("a", 1, [7, 9, 4], 2)]))
    assert op.step == 2
    assert _columns(op) == ([1], [2], [1], [False], [4], [5])


def test_reset_tells_every_row_whole_again() -> None:
    """After a failed step the next op is step 1 of the next session, and a lease of it has a new generation."""
    adapter = _begun()
    adapter.reset()
    op = adapter.forward_op(_batch([("a", 1, [7, 9], 0)], extends={"a": (0, [1, 2, 3, 4, 5], 5)}))
    assert (op.session_no, op.step, op.row_generations.tolist(), op.full_refresh.tolist()) == (2, 1, [2], [True])


def test_refusals_have_the_codes_of_the_wire() -> None:
    """Gap and length faults of an adapter are told as the runtime tells its own."""
    codes = {}
    for name in ("gap", "overlap", "sum", "row", "row twice"):
        with pytest.raises(Refusal) as caught:
            _begun().forward_op(BAD[name][0])
        codes[name] = caught.value.code
    assert codes == {
        "gap": RefusalCode.GAP,
        "overlap": RefusalCode.GAP,
        "sum": RefusalCode.LENGTH_MISMATCH,
        "row": RefusalCode.ROW_OUT_OF_RANGE,
        "row twice": RefusalCode.ROW_REPEATED,
    }


def test_decode_step_before_the_prompt_is_computed_is_refused() -> None:
    """Nothing was sampled that it could compute; the next chunk is taken as if nothing had come."""
    adapter = TokenSpeedAdapter(4)
    adapter.forward_op(_batch([("a", 1, [7], 0)], extends={"a": (0, [1, 2], 5)}))
    with pytest.raises(Refusal, match="row 1 of request 'a': a decode step before its prompt is computed") as caught:
        adapter.forward_op(_batch([("a", 1, [7], 1)]))
    assert caught.value.code is RefusalCode.NEVER_SAMPLED
    op = adapter.forward_op(_batch([("a", 1, [7, 9], 1)], extends={"a": (2, [3, 4, 5], 5)}))
    assert (op.step, op.sample.tolist(), op.full_refresh.tolist()) == (2, [True], [False])


def test_requests_that_change_places_keep_their_rows() -> None:
    """Two requests in each other's rows in one op: both begin leases there, go on from there, and are released at their end."""
    adapter = TokenSpeedAdapter(4)
    both = {"a": (0, [1, 2], 2), "b": (0, [3, 4], 2)}
    adapter.forward_op(_batch([("a", 1, [7], 0), ("b", 2, [9], 0)], extends=both))
    moved = adapter.forward_op(_batch([("a", 2, [5], 0), ("b", 1, [6], 0)], extends=both))
    assert (moved.row_generations.tolist(), moved.full_refresh.tolist()) == ([2, 2], [True, True])
    op = adapter.forward_op(_batch([("a", 2, [5, 8], 1), ("b", 1, [6], 1)]))
    assert _columns(op) == ([2, 2], [1, 1], [1, 0], [False, False], [8], [2, 2])
    adapter.finish("a")
    adapter.finish("b")
    assert adapter.forward_op(_batch([])).released_rows.tolist() == [1, 2]


def test_array_that_the_producer_goes_on_writing_to_is_not_kept() -> None:
    """The head changes in the very array that was passed before: the change is seen."""
    adapter, pages = TokenSpeedAdapter(4), np.array([7, 9], dtype=np.int32)
    batch = _batch([("a", 1, [7, 9], 0)], extends={"a": (0, [1, 2, 3, 4, 5], 5)})
    adapter.forward_op(_changed(batch, occupied_pages=[pages]))
    pages[0] = 3
    op = adapter.forward_op(_changed(_batch([("a", 1, [7, 9], 2)]), occupied_pages=[pages]))
    assert (op.full_refresh.tolist(), op.occupied_pages.tolist()) == ([True], [3, 9])


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
@pytest.mark.parametrize("small", [np.uint8, np.int64])
def test_columns_of_any_kind_mean_the_same(kind: Any, small: Any) -> None:
    """Tuples, arrays and tensors, of methods or properties, of small or large integers: the op is that of lists."""
    batch = _batch([("a", 1, [200, 100], 0)], extends={"a": (0, [1, 2, 3, 4, 5], 5)})
    expected = TokenSpeedAdapter(4).forward_op(batch)
    for name, column in list(vars(batch).items()):
        if name in {"request_ids", "num_extends"}:
            continue
        values = [kind(row) for row in column] if name == "occupied_pages" else kind(np.array(column).astype(small).tolist())
        setattr(batch, name, (lambda values=values: values) if name == "begins" else values)
    batch.num_extends = np.int64(batch.num_extends())
    op = TokenSpeedAdapter(4).forward_op(batch)
    for name in ForwardOp.__dataclass_fields__:
        mine, other = getattr(op, name), getattr(expected, name)
        assert mine.tolist() == other.tolist() if isinstance(mine, np.ndarray) else mine == other, name


def test_sampling_parameters_that_cannot_be_had_change_nothing() -> None:
    """Whoever knows the parameters raises: the op can be made again, and is the first."""
    known: dict[str, SamplingParams] = {}
    adapter = TokenSpeedAdapter(4, sampling=known.__getitem__)
    batch = _batch([("a", 1, [7, 9], 0)], extends={"a": (0, [1, 2, 3, 4, 5], 5)})
    with pytest.raises(KeyError):
        adapter.forward_op(batch)
    known["a"] = SamplingParams(temperature=0.5)
    op = adapter.forward_op(batch)
    assert (op.step, op.row_generations.tolist(), op.lease_starts[0].sampling.temperature) == (1, [1], 0.5)
