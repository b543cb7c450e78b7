"""The fingerprint model: exact tokens through the mirror. Wrong reads are in test_fingerprint_violations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.executors.base import ModelExecutor
from runtime_service.executors.fingerprint import FingerprintExecutor
from runtime_service.ops import NO_TOKEN, RowStatus

Make = Callable[..., Any]
Definition = Callable[[Any, int], list[int]]


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
def test_check_values(make_runtime: Make, prompt: list[int], output: list[int], device: str) -> None:
    """The three published continuations, on any device."""
    runtime = make_runtime(device=device)
    assert runtime.greedy(2, [9, 4, 6], prompt, len(output)) == output
    assert runtime.violations == []
    assert runtime.status == [RowStatus.OK]


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 48, 128, 129])
def test_any_page_size(make_runtime: Make, definition: Definition, page_size: int) -> None:
    """Prefill over a page boundary and decode over another agree with the definition (B49)."""
    prompt = [(7 * i) % 997 for i in range(page_size + 1)]
    num_tokens = page_size + 2
    num_row_pages = -(-(len(prompt) + num_tokens) // page_size)
    runtime = make_runtime(page_size=page_size)
    assert runtime.greedy(1, list(range(1, num_row_pages + 1)), prompt, num_tokens) == definition(prompt, num_tokens)
    assert runtime.violations == []


def test_resume_on_a_cached_page_with_the_freed_page_as_tail(
    make_runtime: Make, row_step: Make, definition: Definition
) -> None:
    """The worked example, refreshed: row [3,2] gives 523 and row [3,2,1] 254, without a violation (B01)."""
    runtime = make_runtime()
    assert runtime.step(
        row_step(1, [1, 2], [1, 2, 3, 4, 5, 6, 7], lease="A"), row_step(2, [3, 4], [1, 2, 3, 4, 9], lease="B")
    ) == [168, definition([1, 2, 3, 4, 9], 1)[0]]
    assert runtime.step(row_step(1, [3, 2], [168], num_computed=7, lease="A"), released=(1, 2)) == [523]
    assert runtime.step(row_step(1, [3, 2, 1], num_computed=8, begin=2)) == [254]
    assert runtime.violations == []


def test_chunked_prefill_equals_one_chunk(make_runtime: Make, row_step: Make, definition: Definition) -> None:
    """Chunks of 3, 1 and 5 tokens sample only at the end and give what one chunk gives."""
    prompt = [11, 22, 33, 44, 55, 66, 77, 88, 99]
    runtime = make_runtime()
    assert runtime.step(row_step(1, [5], prompt[:3], lease="A", sample=False)) == [NO_TOKEN]
    assert runtime.step(row_step(1, [5], prompt[3:4], num_computed=3, sample=False)) == [NO_TOKEN]
    assert runtime.step(row_step(1, [5, 6, 7], prompt[4:], num_computed=4)) == definition(prompt, 1)
    assert runtime.violations == []


def test_cached_prefix_is_read_through_the_pages(make_runtime: Make, row_step: Make, definition: Definition) -> None:
    """A lease that starts on pages another request wrote computes the rest only, and equals a cold run."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1, 2], [1, 2, 3, 4, 5, 6, 7, 8], lease="A"))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert runtime.step(row_step(2, [1, 2, 3], [9], num_computed=8, lease="B")) == definition(prompt, 1)
    output = [*definition(prompt, 1), *runtime.step(row_step(2, [1, 2, 3], num_computed=9))]
    assert output == definition(prompt, 2)
    assert runtime.violations == []


def test_row_number_with_a_new_lease_forgets_the_old_chain(make_runtime: Make, row_step: Make) -> None:
    """The next tenant of a row, with or without a release, is held to its own tokens (B05)."""
    runtime = make_runtime()
    runtime.step(row_step(1, [4, 5, 6], [1] * 9, lease="X"))
    assert runtime.step(row_step(1, [2], [1, 2, 3], lease="Y"), released=(1,)) == [20]
    assert runtime.step(row_step(1, [2], num_computed=3, begin=1)) == [104]
    assert runtime.step(row_step(1, [2, 4], num_computed=4, begin=1)) == [629]
    assert runtime.step(row_step(1, [5], [4, 5, 6], lease="Z")) == [38]
    runtime.executor.reset()
    assert runtime.step(row_step(1, [5], [1, 2, 3], lease="W")) == [20]
    assert runtime.violations == []


def test_new_lease_on_a_cached_prefix_without_a_release(make_runtime: Make, row_step: Make, definition: Definition) -> None:
    """The chain of a row's last tenant is not held against the next one's cached prefix."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1, 2, 3], [1] * 9, lease="X"), row_step(2, [5], [9] * 4, lease="donor"))
    assert runtime.step(row_step(1, [5, 6], [7], num_computed=4, lease="Y")) == definition([9, 9, 9, 9, 7], 1)
    assert runtime.violations == []


def test_row_that_goes_on_from_more_tokens_than_it_computed(make_runtime: Make, row_step: Make, definition: Definition) -> None:
    """Tokens that a lease neither computed nor started with are read from its pages, onto the chain it has."""
    runtime = make_runtime()
    runtime.step(row_step(1, [1], [1, 2, 3], lease="A"), row_step(2, [2, 3], [1, 2, 3, 4, 5], lease="B"))
    assert runtime.step(row_step(1, [2, 3], [6], num_computed=5)) == definition([1, 2, 3, 4, 5, 6], 1)
    assert runtime.violations == []


def test_releasing_a_row_it_never_saw_is_nothing() -> None:
    """Releases of rows without state are accepted, before the first step as well."""
    executor = FingerprintExecutor(4, 4)
    executor.release_rows(np.array([1, 5000], dtype=np.int32))
    executor.reset()
    assert executor.violations == []


def test_zero_row_step(make_runtime: Make) -> None:
    """An op that only releases rows computes nothing."""
    assert make_runtime().step(released=(1,)) == []


def test_order_of_rows_changes_no_token(make_runtime: Make, row_step: Make) -> None:
    """Permuting a step's rows permutes its tokens (B08)."""
    rows = [
        row_step(1, [1], [1, 2, 3], lease="A"),
        row_step(2, [2, 3], [4, 5, 6, 7, 8], lease="B"),
        row_step(3, [4], [9], lease="C"),
    ]
    forward, backward = make_runtime(), make_runtime()
    assert forward.step(*rows) == backward.step(*rows[::-1])[::-1]


@given(data=st.data())
def test_random_batches_follow_the_definition(
    make_runtime: Make, row_step: Make, definition: Definition, data: st.DataObject
) -> None:
    """Rows of random pages, chunks and starts, batched at random, get the tokens each would get alone (I8)."""
    page_size = data.draw(st.sampled_from([1, 3, 4]))
    runtime = make_runtime(page_size=page_size, num_pages=64, width=10, max_rows=3)
    free = data.draw(st.permutations(range(1, 65)))
    tokens: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    pages: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        rows: list[Any] = []
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
            rows.append(row_step(row, [*pages[row]], inputs, computed[row], f"r{row}" if lease else "", begin_sent, sample))
            computed[row] += len(chunk)
        rows.sort(key=lambda step: step.tokens is None)
        if not rows:
            continue
        want = [definition(tokens[step.row], 1)[0] if step.sample else NO_TOKEN for step in rows]
        assert runtime.step(*rows) == want
        for step, token in zip(rows, want, strict=True):
            if step.sample:
                tokens[step.row].append(token)
    assert runtime.violations == []
