"""scheduler_service.wire: core ops to messages, and what a peer says to checked values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagemirror.v1 import forward_pb2, runtime_pb2
from scheduler_service.columns import BadColumnError, int32_from_bytes, int32_to_bytes
from scheduler_service.core.ops import GREEDY, ForwardOp, LeaseStart, SamplingParams
from scheduler_service.errors import ProtocolError, RuntimeMismatchError
from scheduler_service.wire import (
    RefusalCode,
    op_to_proto,
    refusal_from_proto,
    result_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from scheduler_service.wire_facts import RuntimeFacts, check_message_limit, facts_from_proto, mirror_rows_from_proto


def ints(*values: int) -> np.ndarray:
    """An int32 column."""
    return np.array(values, dtype=np.int32)


def an_op() -> ForwardOp:
    """Two rows: a chunk that samples nothing, refreshed, and a decode."""
    return ForwardOp(
        session_no=3,
        step=9,
        req_pool_indices=ints(2, 1),
        row_generations=ints(1, 4),
        row_lens=ints(2, 3),
        begins=ints(0, 2),
        sizes=ints(2, 1),
        full_refresh=np.array([True, False]),
        occupied_pages=ints(7, 8, 300),
        num_computed=ints(0, 8),
        num_extend_rows=1,
        input_lens=ints(5, 1),
        input_ids=ints(10, 11, 12, 13, 996),
        sample=np.array([False, True]),
        released_rows=ints(2),
        lease_starts=[LeaseStart(2, "a", SamplingParams(temperature=0.5, seed=2**64 - 1), prompt_len=8)],
    )


def test_columns_are_little_endian_bytes() -> None:
    """An int32 entry is four bytes, lowest first; a bool entry is one byte, 0 or 1; nothing is sign- or zero-compressed."""
    message = op_to_proto(an_op())
    assert message.occupied_pages == b"\x07\0\0\0\x08\0\0\0\x2c\x01\0\0"
    assert message.full_refresh == b"\x01\0"
    assert message.sample == b"\0\x01"
    assert (message.session_no, message.step, message.num_extend_rows) == (3, 9, 1)
    assert message.row_digests == message.verify_rows == message.verify_digests == b""


def test_greedy_lease_carries_no_sampling_parameters() -> None:
    """Unset means greedy; anything else is sent in full, the seed with all its 64 bits."""
    op = an_op()
    assert op_to_proto(op).lease_starts[0].sampling.seed == 2**64 - 1
    op.lease_starts = [LeaseStart(2, "a")]
    assert not op_to_proto(op).lease_starts[0].HasField("sampling")


def test_unset_sampling_fields_take_defaults_and_set_ones_are_kept() -> None:
    """Zero that is set is not the same as unset: it arrives as zero, for the core to refuse."""
    assert sampling_from_proto(forward_pb2.SamplingParams()) == GREEDY
    odd = sampling_from_proto(forward_pb2.SamplingParams(top_k=0, top_p=0.0, temperature=2.0))
    assert (odd.top_k, odd.top_p, odd.temperature) == (0, 0.0, 2.0)


def test_sampling_round_trip() -> None:
    """What is sent is what is read, at float32's precision."""
    sampling = SamplingParams(temperature=0.75, top_k=5, top_p=0.5, min_p=0.25, seed=2**63, min_new_tokens=3)
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling


def test_client_column_of_odd_length_is_the_clients_fault() -> None:
    """A prompt that is no whole number of int32 names its bytes."""
    with pytest.raises(BadColumnError, match="prompt has 7 bytes"):
        int32_from_bytes(b"1234567", "prompt")
    assert int32_from_bytes(int32_to_bytes([-1, 2**31 - 1]), "prompt").tolist() == [-1, 2**31 - 1]
    with pytest.raises(OverflowError):
        int32_to_bytes([2**31])


def test_result_has_one_entry_a_row() -> None:
    """A good result is taken as it is, an absent status column means that every row is fine."""
    message = forward_pb2.StepResult(session_no=1, step=2, tokens=int32_to_bytes([5, -1]), row_status=b"\0\1")
    result = result_from_proto(message, 2)
    assert result.tokens.tolist() == [5, -1]
    assert result.row_status is not None
    assert result.row_status.tolist() == [0, 1]
    assert result_from_proto(forward_pb2.StepResult(tokens=int32_to_bytes([5])), 1).row_status is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": b"\0\0\0\0"}, "1 tokens for 2 rows"),
        ({"tokens": b"\0\0\0"}, "no column of int32"),
        ({"tokens": bytes(8), "row_status": b"\0"}, "1 row states for 2 rows"),
        ({"tokens": bytes(8), "row_status": b"\0\7"}, "row state 7 is unknown"),
        ({"tokens": bytes(8), "num_tokens": b"\2\0\0\0\0\0\0\0"}, "other than 1"),
    ],
)
def test_result_that_does_not_fit_its_op_is_refused(fields: dict[str, bytes], words: str) -> None:
    """Columns of another length than the op's rows, and states nobody knows, are errors of the runtime."""
    with pytest.raises(ProtocolError, match=words):
        result_from_proto(forward_pb2.StepResult(step=4, **fields), 2)


def test_refusal_names_its_code_and_row() -> None:
    """A refusal reads well in a log, and a code of a later protocol does not break this scheduler."""
    message = runtime_pb2.Refusal(session_no=1, step=5, code=runtime_pb2.REFUSAL_CODE_GAP, row=3, request_id="a", detail="why")
    refusal = refusal_from_proto(message)
    assert refusal.code is RefusalCode.GAP
    assert str(refusal) == "step 5 of session 1: GAP (row 3, request 'a'): why"
    unknown = refusal_from_proto(runtime_pb2.Refusal(code=99, detail="new"))  # type: ignore[arg-type]
    assert unknown.code is RefusalCode.UNSPECIFIED
    assert "99" in unknown.detail


def test_refusal_codes_are_those_of_the_wire() -> None:
    """The enum here has the numbers of the proto, no more and no fewer."""
    names = {name.removeprefix("REFUSAL_CODE_"): number for name, number in runtime_pb2.RefusalCode.items()}
    assert {code.name: code.value for code in RefusalCode} == names


def some_facts(**changes: int) -> RuntimeFacts:
    """Facts of a small runtime."""
    facts = facts_from_proto(
        runtime_pb2.RuntimeInfo(
            protocol_version=1,
            runtime_epoch=2**64 - 1,
            page_size=16,
            num_pages=100,
            max_rows=8,
            max_pages_per_row=10,
            vocab_size=997,
            default_stop_ids=int32_to_bytes([2, 0]),
            model="m",
        )
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def test_hello_becomes_facts() -> None:
    """Every field of a hello arrives, the column of stop ids as a tuple."""
    facts = some_facts()
    assert (facts.runtime_epoch, facts.page_size, facts.default_stop_ids, facts.model) == (2**64 - 1, 16, (2, 0), "m")


def test_hello_of_another_version_is_refused() -> None:
    """Both versions are in the message."""
    with pytest.raises(RuntimeMismatchError, match="scheduler says 1, the runtime says 3"):
        facts_from_proto(runtime_pb2.RuntimeInfo(protocol_version=3))


def test_message_limit_is_exact() -> None:
    """max_rows * (4 * max_pages_per_row + 64) + 4 * token_budget may be 64 MiB and no byte more."""
    limit = 64 * 1024 * 1024
    facts = some_facts(max_rows=1024, max_pages_per_row=16000)
    budget = (limit - 1024 * (4 * 16000 + 64)) // 4
    check_message_limit(facts, budget)
    with pytest.raises(RuntimeMismatchError, match="67,108,868 bytes"):
        check_message_limit(facts, budget + 1)


def test_mirror_rows_are_split_by_their_valid_length() -> None:
    """Concatenated pages come apart by valid_lens, a row of none included."""
    message = runtime_pb2.ReadRowsResponse(
        session_no=2,
        last_step=7,
        rows=int32_to_bytes([1, 4, 6]),
        row_lens=int32_to_bytes([2, 0, 9]),
        valid_lens=int32_to_bytes([2, 0, 1]),
        pages=int32_to_bytes([5, 6, 7]),
    )
    rows = mirror_rows_from_proto(message)
    assert {row: pages.tolist() for row, pages in rows.pages.items()} == {1: [5, 6], 4: [], 6: [7]}
    assert rows.row_lens == {1: 2, 4: 0, 6: 9}
    assert mirror_rows_from_proto(runtime_pb2.ReadRowsResponse()).pages == {}
    message.pages = int32_to_bytes([5, 6])
    with pytest.raises(ProtocolError, match="do not fit together"):
        mirror_rows_from_proto(message)
