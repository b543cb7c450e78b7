"""RuntimeClient against a real runtime process: results, refusals, resets, and a runtime that is not there."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import grpc
import numpy as np
import pytest
import trustme

from runtime_service import ForwardOp, LeaseStart, Refusal, RefusalCode, RuntimeClient, RuntimeUnavailableError, SamplingParams
from runtime_service.client import op_to_proto, result_from_proto
from runtime_service.ops import StepResult
from runtime_service.wire import op_from_proto, result_to_proto


def _column(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def _op(session_no: int, step: int, **changes: Any) -> ForwardOp:
    """Row 3 begins with two pages and five tokens."""
    columns: dict[str, Any] = {
        "req_pool_indices": _column(3),
        "row_generations": _column(session_no),
        "row_lens": _column(2),
        "begins": _column(0),
        "sizes": _column(2),
        "full_refresh": np.array([True]),
        "occupied_pages": _column(7, 9),
        "num_computed": _column(0),
        "num_extend_rows": 1,
        "input_lens": _column(5),
        "input_ids": _column(1, 2, 3, 4, 5),
        "sample": np.array([True]),
        "released_rows": _column(),
        "lease_starts": [LeaseStart(3, "a", prompt_len=5)],
    }
    return ForwardOp(session_no, step, **(columns | changes))


def _decode(session_no: int, step: int, computed: int) -> ForwardOp:
    return _op(
        session_no,
        step,
        begins=_column(2),
        sizes=_column(0),
        full_refresh=np.array([False]),
        occupied_pages=_column(),
        num_computed=_column(computed),
        num_extend_rows=0,
        input_lens=_column(1),
        input_ids=_column(),
        lease_starts=[],
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = f"unix:{tmp_path_factory.mktemp('client')}/runtime.sock"
    with _runtime(target):
        yield target


@contextmanager
def _runtime(target: str, *options: str) -> Iterator[Any]:
    """A runtime process; the last of its `args` is where it listens."""
    command = [sys.executable, "-m", "runtime_service", "--page-size", "4", "--num-pages", "16", *options, "--listen", target]
    with Popen(command, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("pagemirror runtime ready on ")
            command[-1] = line.split()[4]
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


def test_steps_refusal_and_reset(address: str) -> None:
    """Tokens come back in order, also of steps that are on their way together; after a refusal a reset goes on."""
    with RuntimeClient(address, overlap_depth=1) as runtime:
        assert (runtime.info.model, runtime.info.page_size) == ("fingerprint", 4)
        for step, op in enumerate((_op(1, 1), _decode(1, 2, 5)), start=1):
            runtime.send(op)
            assert op.step == step
        first, second = runtime.receive(), runtime.receive()
        assert (first.step, first.tokens.tolist()) == (1, [70])
        assert (second.step, second.tokens.tolist()) == (2, [(70 + 6 * 71) % 997])
        assert {row: pages.tolist() for row, pages in runtime.read_rows().items()} == {3: [7, 9]}
        with pytest.raises(Refusal, match="num_computed 9 is not 6") as caught:
            runtime.run(_decode(1, 3, 9))
        assert (caught.value.code, caught.value.row, caught.value.request_id) == (RefusalCode.NOT_CONTIGUOUS, 3, "a")
        runtime.send(_decode(1, 4, 6))
        assert runtime.reset() == 2
        assert runtime.read_rows() == {}
        assert runtime.run(_op(2, 1)).tokens.tolist() == [70]


def test_absent_runtime_is_a_typed_error(tmp_path: Path) -> None:
    """Nobody listens: the target and the status are told."""
    with pytest.raises(RuntimeUnavailableError, match=r"the runtime at unix:.*: UNAVAILABLE") as caught:
        RuntimeClient(f"unix:{tmp_path}/none.sock")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_second_scheduler_is_refused_and_the_first_goes_on(address: str) -> None:
    """While one is served, the hello of another is answered with why not; the first notices nothing."""
    with RuntimeClient(address) as first:
        first.run(_op(1, 1))
        with pytest.raises(RuntimeUnavailableError, match=r"FAILED_PRECONDITION: the stream of .* is alive") as caught:
            RuntimeClient(address)
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert first.run(_decode(1, 2, 5)).step == 2
        with pytest.raises(RuntimeError, match="every op is answered"):
            first.receive()


def test_a_client_follows_another_at_once(address: str) -> None:
    """Once `close` returns the runtime is free for the next scheduler, also where answers were outstanding."""
    for _ in range(30):
        with RuntimeClient(address) as runtime:
            runtime.send(_op(1, 1))


def test_closed_client_says_so(address: str) -> None:
    """Whatever is asked of it afterwards is the same typed error at once, and closing it again is harmless."""
    with RuntimeClient(address) as runtime:
        runtime.send(_op(1, 1))
    runtime.close()
    for call in (runtime.receive, runtime.reset, runtime.read_rows, lambda: runtime.send(_op(1, 2))):
        with pytest.raises(RuntimeUnavailableError, match="CANCELLED: this client is closed"):
            call()


def test_a_runtime_that_hangs_or_dies_is_told(tmp_path: Path) -> None:
    """One that is stopped costs `timeout_s`, for op, rows and hello; one that is killed in a step is UNAVAILABLE."""
    target = f"unix:{tmp_path}/runtime.sock"
    with _runtime(target) as process:
        patient = RuntimeClient(target)
        patient.run(_op(1, 1))
        patient.close()
        with RuntimeClient(target, timeout_s=0.3) as runtime:
            process.send_signal(signal.SIGSTOP)
            for call in (runtime.read_rows, lambda: runtime.run(_op(1, 1)), lambda: RuntimeClient(target, timeout_s=0.3)):
                with pytest.raises(RuntimeUnavailableError) as caught:
                    call()
                assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        process.send_signal(signal.SIGCONT)
        patient = _reconnected(target)
        process.send_signal(signal.SIGSTOP)
        patient.send(_op(1, 1))
        process.kill()
        for _ in range(2):
            with pytest.raises(RuntimeUnavailableError, match="UNAVAILABLE") as caught:
                patient.receive()
        patient.close()


def _reconnected(target: str) -> RuntimeClient:
    """A client, once the streams before it are known to be over."""
    for _ in range(1000):
        try:
            return RuntimeClient(target)
        except RuntimeUnavailableError as error:
            assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    raise AssertionError("the runtime holds on to a stream that is over")


def test_mutual_tls(tmp_path: Path) -> None:
    """With credentials the runtime is served over TLS; without them nobody answers."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    (tmp_path / "cert.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (tmp_path / "key.pem").write_bytes(issued.private_key_pem.bytes())
    files = [part for name in ("cert", "key", "ca") for part in (f"--tls-{name}", str(tmp_path / f"{name}.pem"))]
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    )
    with _runtime("127.0.0.1:0", *files) as process:
        target = process.args[-1]
        with RuntimeClient(target, credentials=credentials) as runtime:
            assert runtime.run(_op(1, 1)).tokens.tolist() == [70]
        with pytest.raises(RuntimeUnavailableError, match="UNAVAILABLE"):
            RuntimeClient(target)


def test_every_column_of_an_op_survives_the_wire() -> None:
    """What the client writes is what the runtime reads, sampling parameters and digests included."""
    sampling = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**63,
        min_new_tokens=2,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((5, -1.5),),
        num_logprobs=2,
    )
    start = LeaseStart(3, "a", sampling, (7, 9), 5, "00-ab-cd-01", _column(1, 2).tobytes())
    digests = np.array([2**64 - 1], dtype=np.uint64)
    op = _op(
        4,
        9,
        lease_starts=[start],
        released_rows=_column(2),
        row_digests=digests,
        verify_rows=_column(5),
        verify_digests=digests,
    )
    back = op_from_proto(type(op_to_proto(op)).FromString(op_to_proto(op).SerializeToString()))
    for name in ForwardOp.__dataclass_fields__:
        sent, read = getattr(op, name), getattr(back, name)
        assert sent.tolist() == read.tolist() if isinstance(sent, np.ndarray) else sent == read, name


def test_every_column_of_a_result_survives_the_wire() -> None:
    """What the runtime answers is what the client reads, log probabilities and digests included."""
    result = StepResult(
        4,
        9,
        _column(5, -1),
        np.array([0, 2], dtype=np.uint8),
        np.array([-0.5, np.nan], dtype=np.float32),
        np.array([[5, 6], [-1, -1]], dtype=np.int32),
        np.array([[-0.5, -1.5], [np.nan, np.nan]], dtype=np.float32),
        np.array([7, 2**64 - 1], dtype=np.uint64),
    )
    back = result_from_proto(result_to_proto(result).result)
    for name in ("session_no", "step"):
        assert getattr(back, name) == getattr(result, name)
    for name in ("tokens", "row_status", "logprobs", "top_tokens", "top_logprobs", "digests"):
        np.testing.assert_array_equal(getattr(back, name), getattr(result, name), err_msg=name)
