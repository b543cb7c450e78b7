"""The fingerprint model: exact tokens through the mirror, and every wrong read reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.batch_builder import BatchBuilder
from runtime_service.executors.base import ModelExecutor
from runtime_service.executors.fingerprint import MAX_VIOLATIONS, FingerprintExecutor
from runtime_service.ops import NO_TOKEN, ForwardOp, LeaseStart, RowStatus
from runtime_service.req_to_page import ReqToPage


def column(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """An int32 column."""
    return np.asarray(values, dtype=np.int32)


def next_token(tokens: list[int]) -> int:
    """The definition."""
    return sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % 997


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy output of the definition."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class RowStep:
    """One row of a step: `tokens` is None for a decode row; `lease` starts one, with `num_computed` tokens cached."""

    row: int
    pages: list[int]
    tokens: list[int] | None = None
    num_computed: int = 0
    lease: str = ""
    begin: int | None = None  # entries below it are not sent; None: a full refresh
    sample: bool = True


@dataclass
class Runtime:
    """Mirror, batch builder and executor driven as the execution thread drives them."""

    page_size: int = 4
    num_pages: int = 32
    width: int = 8
    max_rows: int = 6
    device: str = "cpu"
    zero_fill: bool = True
    status: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mirror = ReqToPage(self.max_rows, self.width, self.num_pages, self.page_size, self.device, self.zero_fill)
        self.builder = BatchBuilder(self.mirror, self.device)
        self.executor = FingerprintExecutor(self.num_pages, self.page_size, self.device)
        self.last_tokens = torch.zeros(self.max_rows + 1, dtype=torch.int64, device=self.device)

    def step(self, *rows: RowStep, released: tuple[int, ...] = ()) -> list[int]:
        """Run one step, extend rows first; returns the tokens."""
        begins = [0 if row.begin is None else row.begin for row in rows]
        op = ForwardOp(
            session_no=1,
            step=1,
            req_pool_indices=column([row.row for row in rows]),
            row_generations=column([1] * len(rows)),
            row_lens=column([len(row.pages) for row in rows]),
            begins=column(begins),
            sizes=column([len(row.pages) - begin for row, begin in zip(rows, begins, strict=True)]),
            full_refresh=np.array([row.begin is None for row in rows], dtype=np.bool_),
            occupied_pages=column([page for row, begin in zip(rows, begins, strict=True) for page in row.pages[begin:]]),
            num_computed=column([row.num_computed for row in rows]),
            num_extend_rows=sum(row.tokens is not None for row in rows),
            input_lens=column([1 if row.tokens is None else len(row.tokens) for row in rows]),
            input_ids=column([token for row in rows for token in row.tokens or []]),
            sample=np.array([row.sample for row in rows], dtype=np.bool_),
            released_rows=column(released),
            lease_starts=[LeaseStart(row.row, row.lease) for row in rows if row.lease],
        )
        self.mirror.apply(op)
        self.executor.release_rows(op.released_rows)
        self.executor.start_leases(op.lease_starts)
        result = self.executor.execute(self.builder.build(op, self.last_tokens))
        assert result.tokens.dtype == np.int32
        assert result.row_status.dtype == np.uint8
        self.status = result.row_status.tolist()
        tokens: list[int] = result.tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            if token != NO_TOKEN:
                self.last_tokens[row.row] = token
        return tokens

    def greedy(self, row: int, pages: list[int], prompt: list[int], num_tokens: int) -> list[int]:
        """Prefill in one chunk, then decode, with all pages from the start."""
        output = self.step(RowStep(row, pages, prompt, lease=f"r{row}"))
        for i in range(num_tokens - 1):
            output += self.step(RowStep(row, pages, num_computed=len(prompt) + i, begin=len(pages)))
        return output

    @property
    def violations(self) -> list[str]:
        return self.executor.violations


def test_is_a_model_executor() -> None:
    """It has the interface of every executor and states what it is."""
    executor: ModelExecutor = FingerprintExecutor(8, 4, name="fp")
    executor.warm_up()
    info = executor.info
    assert (info.name, info.architecture, info.vocab_size, info.max_context) == ("fp", "fingerprint", 997, 0)
    assert (info.default_stop_ids, info.tokenizer_path, info.device, info.dtype) == ((), None, "cpu", "int32")


CHECK_VALUES = [
    ([1, 2, 3], [20, 104, 629, 421, 384, 473]),
    ([4, 5, 6], [38, 194, 172, 213, 714, 452]),
    ([1, 2, 3, 4, 5, 6, 7], [168, 523, 254]),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("prompt", "output"), CHECK_VALUES)
def test_check_values(prompt: list[int], output: list[int], device: str) -> None:
    """The three published continuations, on any device."""
    runtime = Runtime(device=device)
    assert runtime.greedy(2, [9, 4, 6], prompt, len(output)) == output
    assert runtime.violations == []
    assert runtime.status == [RowStatus.OK]


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 48, 128, 129])
def test_any_page_size(page_size: int) -> None:
    """Prefill over a page boundary and decode over another agree with the definition (B49)."""
    prompt = [(7 * i) % 997 for i in range(page_size + 1)]
    num_tokens = page_size + 2
    num_row_pages = -(-(len(prompt) + num_tokens) // page_size)
    runtime = Runtime(page_size=page_size)
    assert runtime.greedy(1, list(range(1, num_row_pages + 1)), prompt, num_tokens) == continuation(prompt, num_tokens)
    assert runtime.violations == []


def test_resume_on_a_cached_page_with_the_freed_page_as_tail() -> None:
    """The worked example, refreshed: row [3,2] gives 523 and row [3,2,1] 254, without a violation (B01)."""
    runtime = Runtime()
    assert runtime.step(
        RowStep(1, [1, 2], [1, 2, 3, 4, 5, 6, 7], lease="A"), RowStep(2, [3, 4], [1, 2, 3, 4, 9], lease="B")
    ) == [168, next_token([1, 2, 3, 4, 9])]
    assert runtime.step(RowStep(1, [3, 2], [168], num_computed=7, lease="A"), released=(1, 2)) == [523]
    assert runtime.step(RowStep(1, [3, 2, 1], num_computed=8, begin=2)) == [254]
    assert runtime.violations == []


def test_resume_with_a_stale_head_is_wrong_and_named() -> None:
    """The worked example told only its tail: the mirror reads [1,2,1], the token is 776, and page 1 is named (B01)."""
    runtime = Runtime(zero_fill=False)
    runtime.step(RowStep(1, [1, 2], [1, 2, 3, 4, 5, 6, 7], lease="A"), RowStep(2, [3, 4], [1, 2, 3, 4, 9], lease="B"))
    assert runtime.step(RowStep(1, [3, 2], [168], num_computed=7, lease="A", begin=2), released=(1, 2)) == [523]
    assert runtime.violations == []  # page 1 still holds the same four tokens
    assert runtime.step(RowStep(1, [3, 2, 1], num_computed=8, begin=2)) == [776]
    assert runtime.mirror.row(1).tolist() == [1, 2, 1]
    assert len(runtime.violations) == 1
    found = "request 'A' in row 1 reads position 0 from page 1: the cell was written for another position or prefix"
    assert runtime.violations[0] == f"{found} (1 wrong positions in this step)"


def test_chunked_prefill_equals_one_chunk() -> None:
    """Chunks of 3, 1 and 5 tokens sample only at the end and give what one chunk gives."""
    prompt = [11, 22, 33, 44, 55, 66, 77, 88, 99]
    runtime = Runtime()
    assert runtime.step(RowStep(1, [5], prompt[:3], lease="A", sample=False)) == [NO_TOKEN]
    assert runtime.step(RowStep(1, [5], prompt[3:4], num_computed=3, sample=False)) == [NO_TOKEN]
    assert runtime.step(RowStep(1, [5, 6, 7], prompt[4:], num_computed=4)) == [next_token(prompt)]
    assert runtime.violations == []


def test_cached_prefix_is_read_through_the_pages() -> None:
    """A lease that starts on pages another request wrote computes the rest only, and equals a cold run."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lease="A"))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert runtime.step(RowStep(2, [1, 2, 3], [9], num_computed=8, lease="B")) == [next_token(prompt)]
    output = [next_token(prompt), *runtime.step(RowStep(2, [1, 2, 3], num_computed=9))]
    assert output == continuation(prompt, 2)
    assert runtime.violations == []


def test_pages_of_two_prefixes_put_together_are_found() -> None:
    """A cached row of page 0 of one prompt and page 1 of another is a violation at position 4."""
    runtime = Runtime()
    runtime.step(
        RowStep(1, [1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lease="A"), RowStep(2, [3, 4], [9, 9, 9, 9, 5, 6, 7, 8], lease="B")
    )
    runtime.step(RowStep(3, [1, 4, 5], [10], num_computed=8, lease="C"))
    assert len(runtime.violations) == 1
    assert "request 'C' in row 3 reads position 4 from page 4" in runtime.violations[0]
    assert "4 wrong positions" in runtime.violations[0]


def test_right_page_at_a_wrong_depth_is_found_where_the_sum_is_right() -> None:
    """Two pages of equal tokens, swapped, give the right token and still eight violations of one row."""
    prompt = [5] * 8
    runtime = Runtime()
    runtime.step(RowStep(1, [1, 2, 3], prompt, lease="A"))
    token = runtime.step(RowStep(1, [2, 1, 3], num_computed=8))
    assert token == [continuation(prompt, 2)[1]]
    assert len(runtime.violations) == 1
    assert "position 0 from page 2" in runtime.violations[0]
    assert "8 wrong positions" in runtime.violations[0]


def test_foreign_prefix_that_is_consistent_shows_in_the_output_only() -> None:
    """The stated limit: a lease started on another prompt's pages as a whole reads what those pages say."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1], [9, 9, 9, 9], lease="A"))
    assert runtime.step(RowStep(2, [1, 2], [5], num_computed=4, lease="B")) == [next_token([9, 9, 9, 9, 5])]
    assert runtime.violations == []


def test_overwritten_cells_are_found_by_their_owner() -> None:
    """A page granted to a second request while the first still names it is reported for the first."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1, 2], [1, 2, 3, 4, 5], lease="A"))
    runtime.step(RowStep(2, [1], [7, 7], lease="B"))
    assert runtime.violations == []
    runtime.step(RowStep(1, [1, 2], num_computed=5))
    assert len(runtime.violations) == 1
    assert "request 'A' in row 1 reads position 0 from page 1" in runtime.violations[0]


def test_two_rows_that_write_one_page_in_one_step_are_found_in_that_step() -> None:
    """All rows write before any row reads, so the loser of a shared page sees it at once."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1], [1, 2], lease="A"), RowStep(2, [1], [3, 4], lease="B"))
    assert len(runtime.violations) == 1


def test_poisoned_cells_are_never_read_as_valid() -> None:
    """After poisoning, old cells are violations for a running row and for a cached prefix, and new ones are not."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1], [0, 0, 0], lease="A"))
    runtime.executor.poison()
    runtime.step(RowStep(1, [1], num_computed=3))
    runtime.step(RowStep(2, [1, 2], [5], num_computed=4, lease="B"))
    assert runtime.step(RowStep(3, [3], [1, 2, 3], lease="C")) == [20]
    assert [text.partition(": ")[2] for text in runtime.violations] == [
        "the cell was never written (3 wrong positions in this step)",
        "the cell was never written (4 wrong positions in this step)",
    ]


def test_cells_never_written_and_entries_without_a_page_are_told_apart() -> None:
    """A cached prefix on a fresh page, and a row whose mirror lost its entry, are each named for what they are."""
    runtime = Runtime()
    runtime.step(RowStep(1, [5, 6], [1], num_computed=4, lease="A"))
    runtime.step(RowStep(2, [7, 8], [1, 2, 3, 4, 5], lease="B"))
    runtime.mirror.table[2, 1] = 0
    runtime.step(RowStep(2, [7, 8], num_computed=5, begin=2))
    assert len(runtime.violations) == 2
    assert "position 0 from page 5: the cell was never written" in runtime.violations[0]
    assert "position 4 from page 0: the mirror has no page there (2 wrong positions" in runtime.violations[1]


def test_overflowing_token_touches_no_live_cell() -> None:
    """Position 8 in a mirror of two pages of 4 is clamped, and the eight tokens before it still give 240 (B47)."""
    runtime = Runtime(width=2)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert runtime.step(RowStep(1, [1, 2], prompt, lease="A")) == [240]
    assert runtime.step(RowStep(1, [1, 2, 3], num_computed=8)) == [NO_TOKEN]
    assert runtime.status == [RowStatus.CLAMPED]
    assert runtime.step(RowStep(2, [4, 5, 6], [*prompt, 9], lease="B"), RowStep(3, [7], [1, 2, 3], lease="C")) == [NO_TOKEN, 20]
    assert runtime.status == [RowStatus.CLAMPED, RowStatus.OK]
    runtime.executor.release_rows(column([1]))
    assert runtime.step(RowStep(1, [1, 2], [8], num_computed=7, lease="D")) == [240]
    assert runtime.violations == []


def test_row_number_with_a_new_lease_forgets_the_old_chain() -> None:
    """The next tenant of a row, with or without a release, is held to its own tokens (B05)."""
    runtime = Runtime()
    runtime.step(RowStep(1, [4, 5, 6], [1] * 9, lease="X"))
    assert runtime.step(RowStep(1, [2], [1, 2, 3], lease="Y"), released=(1,)) == [20]
    assert runtime.step(RowStep(1, [2], num_computed=3, begin=1)) == [104]
    assert runtime.step(RowStep(1, [2, 4], num_computed=4, begin=1)) == [629]
    assert runtime.step(RowStep(1, [5], [4, 5, 6], lease="Z")) == [38]
    runtime.executor.reset()
    assert runtime.step(RowStep(1, [5], [1, 2, 3], lease="W")) == [20]
    assert runtime.violations == []


def test_new_lease_on_a_cached_prefix_without_a_release() -> None:
    """The chain of a row's last tenant is not held against the next one's cached prefix."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1, 2, 3], [1] * 9, lease="X"), RowStep(2, [5], [9] * 4, lease="donor"))
    assert runtime.step(RowStep(1, [5, 6], [7], num_computed=4, lease="Y")) == [next_token([9, 9, 9, 9, 7])]
    assert runtime.violations == []


def test_row_that_goes_on_from_more_tokens_than_it_computed() -> None:
    """Tokens that a lease neither computed nor started with are read from its pages, onto the chain it has."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1], [1, 2, 3], lease="A"), RowStep(2, [2, 3], [1, 2, 3, 4, 5], lease="B"))
    assert runtime.step(RowStep(1, [2, 3], [6], num_computed=5)) == [next_token([1, 2, 3, 4, 5, 6])]
    assert runtime.violations == []


def test_releasing_a_row_it_never_saw_is_nothing() -> None:
    """Releases of rows without state are accepted, before the first step as well."""
    executor = FingerprintExecutor(4, 4)
    executor.release_rows(column([1, 5000]))
    executor.reset()
    assert executor.violations == []


def test_zero_row_step() -> None:
    """An op that only releases rows computes nothing."""
    assert Runtime().step(released=(1,)) == []


def test_order_of_rows_changes_no_token() -> None:
    """Permuting a step's rows permutes its tokens (B08)."""
    rows = [
        RowStep(1, [1], [1, 2, 3], lease="A"),
        RowStep(2, [2, 3], [4, 5, 6, 7, 8], lease="B"),
        RowStep(3, [4], [9], lease="C"),
    ]
    forward, backward = Runtime(), Runtime()
    assert forward.step(*rows) == backward.step(*rows[::-1])[::-1]


def test_kept_violations_are_limited_and_all_are_counted() -> None:
    """A long run of wrong steps keeps the first texts and goes on counting."""
    runtime = Runtime()
    runtime.step(RowStep(1, [1], [1], lease="A"))
    runtime.executor.poison()
    for _ in range(MAX_VIOLATIONS + 5):
        runtime.step(RowStep(1, [1], num_computed=1))
    assert len(runtime.violations) == MAX_VIOLATIONS
    assert runtime.executor.num_violations == MAX_VIOLATIONS + 5


@given(data=st.data())
def test_random_batches_follow_the_definition(data: st.DataObject) -> None:
    """Rows of random pages, chunks and starts, batched at random, get the tokens each would get alone (I8)."""
    page_size = data.draw(st.sampled_from([1, 3, 4]))
    runtime = Runtime(page_size=page_size, num_pages=64, width=10, max_rows=3)
    free = data.draw(st.permutations(range(1, 65)))
    tokens: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    pages: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        rows: list[RowStep] = []
        for row in data.draw(st.lists(st.integers(1, 3), unique=True, min_size=1)):
            lease = row not in tokens
            if lease:
                tokens[row] = data.draw(st.lists(st.integers(0, 996), min_size=1, max_size=2 * page_size))
                computed[row], pages[row] = 0, []
            remaining = tokens[row][computed[row] :]
            chunk = remaining[: data.draw(st.integers(1, len(remaining)))]
            needed = -(-(computed[row] + len(chunk)) // page_size)
            if needed > 10:
                continue
            begin = len(pages[row])
            while len(pages[row]) < needed:
                pages[row].append(free.pop())
            is_decode = not lease and len(remaining) == 1 and int(runtime.last_tokens[row]) == remaining[0]
            inputs = None if is_decode else chunk
            whole = lease or data.draw(st.booleans())
            sample = len(chunk) == len(remaining)
            begin_sent = None if whole else begin
            rows.append(RowStep(row, [*pages[row]], inputs, computed[row], f"r{row}" if lease else "", begin_sent, sample))
            computed[row] += len(chunk)
        rows.sort(key=lambda step: step.tokens is None)
        if not rows:
            continue
        want = [next_token(tokens[step.row]) if step.sample else NO_TOKEN for step in rows]
        assert runtime.step(*rows) == want
        for step, token in zip(rows, want, strict=True):
            if step.sample:
                tokens[step.row].append(token)
    assert runtime.violations == []
