"""Cases B47 to B52: overflow, views, odd sizes, page 0, masked lanes, and the width of page ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.batch_builder import BatchBuilder
from runtime_service.errors import Refusal, SettingsError
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.kernels.decode_attention import DecodeWorkspace, paged_decode_attention_naive
from runtime_service.kernels.decode_attention_triton import decode_attention_launches
from runtime_service.kernels.decode_inputs import decode_inputs_naive
from runtime_service.kernels.decode_inputs_triton import decode_inputs_launch
from runtime_service.kernels.mirror_apply import NUM_META_COLUMNS, mirror_apply
from runtime_service.kernels.mirror_apply_triton import mirror_apply_triton
from runtime_service.ops import NO_TOKEN, RefusalCode, RowStatus, StepResult
from runtime_service.req_to_page import ColumnTypeError, ReqToPage
from runtime_service.session import SessionState
from runtime_service.settings import load_settings
from runtime_service.step_runner import StepRunner
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.page_pool import PagePool
from scheduler_service.core.scheduler import Scheduler

CANARY = -123_456_789
GARBAGE = (0, -1, 1 << 30)


def staged_rows(rows: list[tuple[int, list[int]]], garbage: int, device: str) -> torch.Tensor:
    """What a launch is given for whole rows (row number, pages), at an odd place of a buffer full of garbage."""
    meta, pages = [], []
    for row, row_pages in rows:
        meta.append([row, len(pages), 0, len(row_pages), 0, len(row_pages)])
        pages += row_pages
    entries = np.array(meta, dtype=np.int32).reshape(len(rows), NUM_META_COLUMNS).T.reshape(-1).tolist() + pages
    buffer = torch.full((len(entries) + 1024,), garbage, dtype=torch.int32)
    buffer[3 : 3 + len(entries)] = torch.tensor(entries, dtype=torch.int32)
    return buffer.to(device)[3 : 3 + len(entries)]


def decode(pool: Any, query: torch.Tensor) -> torch.Tensor:
    """Decode attention by the kernel, its result and its workspace poisoned beforehand."""
    out = torch.full_like(query, float("nan"))
    splits = -(-int(pool.lengths.max()) // 16)
    workspace = DecodeWorkspace.empty(0 if splits == 1 else len(query) * query.shape[1] * splits, query.shape[2], query.device)
    arguments = (query, pool.cache, pool.table, pool.rows, pool.lengths, out, workspace, query.shape[2] ** -0.5, 1, splits)
    for launch in decode_attention_launches(*arguments, min_split=16):
        launch.run()
    return out


def query_of(num_rows: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Seeded queries of two heads."""
    return torch.randn((num_rows, 2, 8), generator=torch.Generator().manual_seed(5)).to(device, dtype)


def test_b47_overflow_is_not_clamped_into_the_last_page(kernels: Any, launches: Any) -> None:
    """The write of a token past the row's end is clamped into its last page (lightseekorg/tokenspeed#506)."""
    core = Scheduler(
        SchedulerConfig(page_size=4, num_pages=8, max_rows=2, max_pages_per_row=2, vocab_size=997, overlap_depth=1),
        session_no=1,
    )
    request = core.submit("A", np.arange(1, 9, dtype=np.int32), max_tokens=5)
    op = core.plan()
    assert op is not None
    assert core.plan() is None, "no step is planned past the last token that has a place"
    core.complete(StepResult(1, 1, kernels.i32([240]), np.zeros(1, dtype=np.uint8)))
    assert request.finish_reason is not None
    assert (request.finish_reason.value, core.take_outputs().tokens) == ("length", [240])

    # A scheduler that sent the look-ahead step all the same would write nowhere.
    row, prompt = kernels.Row, [1, 2, 3, 4, 5, 6, 7, 8]
    mirror = ReqToPage(2, 2, 8, 4, device=kernels.device)
    executor = FingerprintExecutor(num_pages=8, page_size=4, device=kernels.device)
    runner = StepRunner(SessionState(2, 2, 8, 4, 997), mirror, executor)
    runner.open(1, 1, 1)
    first = runner.run(kernels.op([row(1, [1, 2], ids=prompt, lease="A")]))
    assert isinstance(first, StepResult)
    assert first.tokens.tolist() == [240]
    before = executor._token_pages[1:].clone()
    second = runner.run(kernels.op([row(1, [1, 2, 3], 2, False, computed=8)], step=2))
    assert isinstance(second, StepResult)
    assert (second.tokens.tolist(), second.row_status.tolist()) == ([NO_TOKEN], [RowStatus.CLAMPED])
    assert torch.equal(executor._token_pages[1:], before)
    assert executor._token_pages[2].tolist() == [5, 6, 7, 8]
    again = runner.run(kernels.op([row(2, [1, 2], ids=[8], computed=7, lease="B")], step=3))
    assert isinstance(again, StepResult)
    assert again.tokens.tolist() == [240]
    assert executor.violations == []

    # The same by the kernel that works slots out on the device, and by its twin.
    table = torch.tensor([[0, 0], [5, 6]], dtype=torch.int32, device=kernels.device)
    rows, lengths = torch.ones(1, dtype=torch.int64, device=kernels.device), torch.tensor([0, 8], device=kernels.device)
    out = [torch.full((1,), -9, dtype=torch.int64, device=kernels.device) for _ in range(3)]
    decode_inputs_launch(table, rows, lengths, 4, 8, *out).run()
    for positions, seq_lens, slots in (out, decode_inputs_naive(table, rows, lengths, 4, 8)):
        assert (positions.tolist(), seq_lens.tolist()) == ([8], [8])
        assert 0 <= slots.item() < 4, "a slot of the dummy page"


def test_b48_mirror_and_pages_may_be_views(kernels: Any, launches: Any) -> None:
    """A kernel takes rows for contiguous that are a view (ROCm/aiter#2117, triton-lang/triton#10336)."""
    for apply in (mirror_apply_triton, mirror_apply):
        base = torch.full((8, 16), CANARY, dtype=torch.int32, device=kernels.device)
        for view in (base[:, 2:10], base[:, ::2], base.T):
            base.fill_(CANARY)
            apply(view, staged_rows([(3, [7, 1, 3])], 0, kernels.device), 1, 3)
            assert view[3, :3].tolist() == [7, 1, 3]
            assert int((base == CANARY).sum()) == base.numel() - 3
        base.fill_(CANARY)
        apply(base[:, 2:10], staged_rows([(3, [7, 1, 3])], 0, kernels.device), 1, 3)
        assert base[3].tolist() == [CANARY, CANARY, 7, 1, 3, *[CANARY] * 11]
    mirror = ReqToPage(3, 8, 100, 4, device=kernels.device)
    op = kernels.op([kernels.Row(1, [7, 1, 3])])
    op.occupied_pages = kernels.i32([7, 50, 1, 51, 3, 52])[::2]
    op.row_lens = np.frombuffer(kernels.i32([3]).tobytes(), dtype=np.int32)  # read-only, as received
    mirror.apply(op)
    assert mirror.row(1).tolist() == [7, 1, 3]
    # Layouts without an address for each entry, or with several, are refused and nothing is launched.
    staged = staged_rows([(1, [7, 1, 3])], 0, kernels.device)
    table = torch.zeros((1, 4), dtype=torch.int32, device=kernels.device)
    with pytest.raises(ValueError, match="overlap"):
        mirror_apply(table.expand(2, 4), staged, 1, 3)
    with pytest.raises(ValueError, match="contiguous"):
        mirror_apply(table, torch.cat([staged, staged])[::2], 1, 3)
    assert not table.any()


def test_b49_sizes_that_are_no_powers_of_two(kernels: Any, launches: Any) -> None:
    """A block range is as wide as the page size or the row, whatever that is (ROCm/aiter#2393, tenstorrent/tt-metal#12841)."""
    for width in (1, 3, 17, 100):
        lens = [0, 1, width - 1, width]
        mirror = ReqToPage(5, width, 10_000, 4, device=kernels.device)
        for turn in range(2):  # the second time over other rows, some of them longer
            rows = [[1000 * number + i for i in range(lens[(number + turn) % 4])] for number in range(1, 5)]
            mirror.apply(kernels.op([kernels.Row(number, pages) for number, pages in enumerate(rows, start=1)]))
            want = [[0] * width, *([*pages, *[0] * (width - len(pages))] for pages in rows), [0] * width]
            assert mirror.table.tolist() == want
        for page_size in (1, 2, 3, 5, 16, 48, 128, 129):
            lengths = [max(1, page_size * pages - page_size // 2) for pages in lens[1:]]
            pool = kernels.pool(lengths, page_size=page_size, width=width)
            query = query_of(3, kernels.device)
            want = pool.reference(query)
            arguments = (query, pool.cache, pool.table, pool.rows, pool.lengths)
            twin = paged_decode_attention_naive(*arguments, scale=8**-0.5)
            torch.testing.assert_close(twin.cpu().double(), want, atol=1e-5, rtol=0)
            if kernels.device == "cuda" or page_size * width <= 260:  # the interpreter takes seconds for more
                torch.testing.assert_close(decode(pool, query).cpu().double(), want, atol=1e-5, rtol=0)
    with pytest.raises(SettingsError, match="page-size"):
        load_settings(page_size=257)


def test_b50_page_0_is_no_page(kernels: Any, launches: Any) -> None:
    """0 is both the id of a page and the fill value (vllm-project/vllm#16078)."""
    pool = PagePool(6)
    granted = pool.take(6).tolist()
    assert sorted(granted) == [1, 2, 3, 4, 5, 6]

    row = kernels.Row
    shape = (4, 4, 6, 4)
    mirror = ReqToPage(*shape, device=kernels.device)
    executor = FingerprintExecutor(num_pages=6, page_size=4, device=kernels.device)
    runner = StepRunner(SessionState(*shape, 997), mirror, executor)
    runner.open(1, 1, 0)
    executor._token_pages[0] = 123  # what lies in the dummy page must not matter
    op = kernels.op([
        row(1, [1], ids=[1, 2, 3], lease="A"),
        row(2, [], ids=[4], lease="B"),
        row(3, [6, 5], ids=[5, 6, 7, 8, 9], lease="C"),
        row(4, [2, 6], ids=[5], lease="D"),
    ])  # fmt: skip
    refused = runner.run(op)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.row) == (RefusalCode.ROW_TOO_SHORT, 2), "a row without a page can hold no token"
    runner.reset(2)
    op = kernels.op([row(1, [1], ids=[1, 2, 3], lease="A"), row(3, [6, 1], ids=[9], computed=0, lease="C")])
    op.session_no = 2
    result = runner.run(op)
    assert isinstance(result, StepResult)
    assert result.tokens.tolist() == [20, 10]
    for session_no, bad in ((3, 0), (4, 7)):
        runner.reset(session_no)
        op = kernels.op([row(2, [bad], ids=[1], lease="B")])
        op.session_no = session_no
        refused = runner.run(op)
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.row) == (RefusalCode.PAGE_OUT_OF_RANGE, 2)

    mirror.apply(kernels.op([row(1, [1]), row(2, []), row(3, [6, 1]), row(4, [1, 6])]))
    assert mirror.table.tolist() == [[0] * 4, [1, 0, 0, 0], [0] * 4, [6, 1, 0, 0], [1, 6, 0, 0]]
    assert [entry.tolist() for entry in mirror.read_rows([1, 2, 3, 4])] == [[1], [], [6, 1], [1, 6]]
    batch = BatchBuilder(mirror, kernels.device).build(
        kernels.op([row(1, [1], 1, False, computed=1), row(3, [6, 1], 2, False, computed=5)]),
        torch.zeros(5, dtype=torch.int64, device=kernels.device),
    )
    assert batch.out_cache_loc.tolist() == [1 * 4 + 1, 1 * 4 + 1], "both rows find page 1, at logical 0 and at logical 1"


def test_b51_masked_lanes_do_not_matter(kernels: Any) -> None:
    """Lanes outside the mask of a load are undefined and are used (sgl-project/sglang#27074)."""
    lens = [1, 3, 7, 8]
    rows = [(number, [7 + number] * length) for number, length in enumerate(lens)]
    tables, outputs = [], []
    for garbage in GARBAGE:
        table = torch.full((4, 8), CANARY, dtype=torch.int32, device=kernels.device)
        mirror_apply_triton(table, staged_rows(rows, garbage, kernels.device), 4, 8)
        tables.append(table.tolist())
        poison = {0: 0.0, -1: float("nan"), 1 << 30: float("inf")}[garbage]
        pool = kernels.pool([1, 3 * 4, 7 * 4 - 1, 8 * 4], page_size=4, width=8, garbage=garbage, poison=poison)
        outputs.append(decode(pool, query_of(4, kernels.device)))
    assert tables == [[[7 + number] * length + [CANARY] * (8 - length) for number, length in enumerate(lens)]] * 3
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(
        outputs[0].cpu().double(), pool.reference(query_of(4, kernels.device)), atol=1e-5, rtol=0, equal_nan=False
    )


def test_b52_width_of_page_ids(kernels: Any, launches: Any) -> None:
    """A row of 64-bit ids is read as 32-bit ones, each followed by 0 (vllm-project/vllm-ascend#16597)."""
    columns = ("req_pool_indices", "row_lens", "begins", "sizes", "occupied_pages", "released_rows")
    dtypes: list[Any] = [np.int64, np.uint32, np.int32, np.int16, ">i4"]
    for dtype in dtypes:
        mirror = ReqToPage(3, 8, 100, 4, device=kernels.device)
        op = kernels.op([kernels.Row(1, [7, 1, 3])])
        for column in columns:
            setattr(op, column, getattr(op, column).astype(dtype))
        mirror.apply(op)
        assert mirror.row(1).tolist() == [7, 1, 3], dtype
    for wrong in (np.array([7.0, 1.0, 3.0]), np.array([7, 1, 1 << 31])):
        op = kernels.op([kernels.Row(1, [7, 1, 3])])
        op.occupied_pages = wrong
        with pytest.raises(ColumnTypeError, match="occupied_pages"):
            mirror.apply(op)
    assert mirror.row(1).tolist() == [7, 1, 3]
    table = torch.zeros((2, 4), dtype=torch.int32, device=kernels.device)
    staged = staged_rows([(1, [7, 1, 3])], 0, kernels.device)
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: mirror_apply(table, staged.long(), 1, 3), "staged must be int32"),
        (lambda: mirror_apply(table.long(), staged, 1, 3), "mirror must be int32"),
    ]
    for call, message in refused:
        with pytest.raises(TypeError, match=message):
            call()
    assert not table.any()
