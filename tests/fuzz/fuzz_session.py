"""Front ends gone mad: sessions of mutated messages; each request and each stream held against the words of the .proto."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from fuzz_columns import ints, pack, tagged
from fuzz_fields import MAX_UINT32, ODD_TEXTS
from fuzz_generation import LENGTH, MAX_TEXT_LEN, WAIT_S, MadClients, continuation
from fuzz_model import FINGERPRINT_VOCABULARY
from google.protobuf.message import DecodeError
from grpc import StatusCode, aio

from pagemirror.v1 import generation_pb2

SUBMIT, ABORTS = 2, 3
NAMES = {code.value[0]: code.name for code in StatusCode}
BROKEN = frozenset({"INVALID_ARGUMENT"})


@dataclass
class Told:
    """What came of one request."""

    accepted: bool = False
    tokens: list[int] = field(default_factory=list)
    end: generation_pb2.SessionEnd | None = None


class Conversation:
    """One session: what was said, by the rules, and what was answered."""

    def __init__(self) -> None:
        self.requests: dict[int, generation_pb2.Submit] = {}
        self.told: dict[int, Told] = {}
        self.num_messages = 0
        self.sent: list[bytes] = []

    def say(self, data: bytes) -> bool:
        """Whether this message, the next one, is one that may come; what is in it from then on counts."""
        self.sent.append(data)
        self.num_messages += 1
        try:
            message = generation_pb2.SessionRequest.FromString(data)
        except DecodeError:
            return False
        aborts = ints(message.aborts)
        if message.HasField("hello") != (self.num_messages == 1) or aborts is None:
            return False
        for submit in message.submits:
            if submit.number != len(self.requests) + 1:
                return False
            self.requests[submit.number] = submit
        return True

    def hear(self, message: generation_pb2.SessionResponse) -> str:
        """What is wrong with an answer, or nothing."""
        numbers, tokens, accepted = ints(message.numbers), ints(message.tokens), ints(message.accepted)
        for number in (*accepted, *numbers, *(end.number for end in message.ended)):
            if number not in self.requests:
                return f"number {number} was never submitted"
            if self.told.setdefault(number, Told()).end is not None:
                return f"request {number} had ended"
        for number in accepted:
            if self.told[number].accepted:
                return f"request {number} was accepted twice"
            self.told[number].accepted = True
        for number, token in zip(numbers, tokens, strict=True):
            if not self.told[number].accepted:
                return f"request {number} has tokens before it was accepted"
            self.told[number].tokens.append(token)
        for end in message.ended:
            if self.told[end.number].end is not None or end.HasField("finished") != (end.status == 0):
                return f"the end of request {end.number} is {end}"
            self.told[end.number].end = end
        return ""


class MadSessions(MadClients):
    """Sessions with one scheduler that serves the fingerprint model."""

    async def fuzz_sessions(self, num_messages: int, num_clients: int = 8) -> None:
        """So many mutated messages in sessions side by side, and beside them one session whose requests are right."""
        self._session = self._channel.stream_stream("/pagemirror.v1.GenerationService/Session")
        self._last_name = 0

        async def client() -> None:
            while self.counts["mutated"] < num_messages:
                await self._mad_session()

        clients = [asyncio.ensure_future(client()) for _ in range(num_clients)]
        clean = asyncio.ensure_future(self._clean_session(clients))
        try:
            await asyncio.gather(*clients, clean)
        finally:
            for task in (*clients, clean):
                task.cancel()
            await asyncio.gather(*clients, clean, return_exceptions=True)

    async def _mad_session(self) -> None:
        rng, talk = self.rng, Conversation()
        call = self._session()
        hearing = asyncio.ensure_future(self._hear(call, talk))
        is_right = True
        try:
            for _ in range(rng.randint(1, 8)):
                is_right = talk.say(self._message(talk))
                self.counts["mutated"] += 1
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # what ended it is heard
                    await asyncio.wait_for(call.write(talk.sent[-1]), WAIT_S)
                if not is_right:
                    break
                if rng.random() < 0.1:
                    call.cancel()
                    self.counts["Session: left"] += 1
                    return
            else:
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await call.done_writing()
            fault = await hearing
            status, detail = (await call.code()).name, await call.details() or ""
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        self.counts[f"Session: {status}"] += 1
        right = {"OK"} if is_right else BROKEN
        if not fault and (status not in right or len(detail.encode()) > 1024):
            fault = f"{status} ({detail}) came, right are {right}"
        if fault := fault or self._requests_fault(talk, complete=is_right):
            shown = ", ".join(
                f"bytes.fromhex({data.hex()!r})" if len(data) < 5000 else f"{len(data)} bytes" for data in talk.sent
            )
            raise AssertionError(f"{fault[:2000]}\nseed {self.seed}; Session of {shown}")

    async def _hear(self, call: aio.StreamStreamCall[bytes, bytes], talk: Conversation) -> str:
        """Everything that is answered; what is wrong with it."""
        is_first = True
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(WAIT_S):
                while (data := await call.read()) is not aio.EOF:
                    message = generation_pb2.SessionResponse.FromString(data)
                    if message.HasField("welcome") != is_first:
                        return f"message {message} came, first: {is_first}"
                    is_first = False
                    if fault := talk.hear(message):
                        return fault
        return ""

    def _requests_fault(self, talk: Conversation, *, complete: bool) -> str:
        for number, submit in talk.requests.items():
            told, request = talk.told.get(number, Told()), submit.request
            if told.end is None:
                if complete:
                    return f"request {number} has no end: {request}"
                continue
            status = NAMES.get(told.end.status, "")
            right = self._right_submit(submit) | (set() if complete else {"CANCELLED"})
            self.counts[f"request: {status}"] += 1
            if status not in right:
                return f"request {number} ended with {status} ({told.end.detail}), right are {right}: {request}"
            if status != "OK":
                if told.accepted and status in {"INVALID_ARGUMENT", "ALREADY_EXISTS"}:
                    return f"request {number} was accepted, and ended with {status}"
                continue
            if fault := self._output_fault(request, told.tokens, told.end.finished.reason):
                return f"request {number}: {fault}"
        return ""

    def _right_submit(self, submit: generation_pb2.Submit) -> set[str]:
        name = submit.request.request_id
        right = self._right_statuses(submit.request)
        if not name or len(submit.traceparent) > MAX_TEXT_LEN:
            right = {"INVALID_ARGUMENT"}
        # Another session may have had a request of this name just then.
        return right if name.startswith("own-") else {*right, "ALREADY_EXISTS"}

    def _message(self, talk: Conversation) -> bytes:
        rng = self.rng
        message = generation_pb2.SessionRequest()
        if not talk.num_messages or rng.random() < 0.02:
            message.hello.SetInParent()
        number, submits = len(talk.requests), b""
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            number += 1
            submits += tagged(SUBMIT, self._submit(number))
        if rng.random() < 0.3:
            known = [rng.randint(1, number + 1) for _ in range(rng.randint(1, 3))]
            message.aborts = pack(rng.choice((known, known, [0, -1], [2**31 - 1] * 1000, [])))
            if rng.random() < 0.05:
                message.aborts += b"\0"
        data = message.SerializeToString() + submits
        if rng.random() < 0.12:
            data = self._bytes.mutate(data, submits)
        return data

    def _submit(self, number: int) -> bytes:
        rng = self.rng
        request = self._generate_bytes()
        while _cannot_be_read(request) and rng.random() < 0.9:  # one of them ends the whole session
            request = self._generate_bytes()
        if rng.random() < 0.7:  # a name of its own, where the field is read last
            self._last_name += 1
            request += tagged(1, f"own-{self._last_name}".encode())
        if rng.random() < 0.03:
            number = rng.choice((0, number - 1, number + 1, MAX_UINT32, 2**31))
        submit = generation_pb2.Submit(number=number, traceparent=rng.choice(("", "", "00-0-0-01", rng.choice(ODD_TEXTS))))
        return submit.SerializeToString() + tagged(2, request)

    async def _clean_session(self, clients: list[asyncio.Future[None]]) -> None:
        """One session throughout, a few requests at a time."""
        talk, call = Conversation(), self._session()
        hearing = asyncio.ensure_future(self._hear(call, talk))
        await call.write(self._said(talk, generation_pb2.SessionRequest(hello=generation_pb2.SessionHello())))
        while not all(client.done() for client in clients):
            message = generation_pb2.SessionRequest()
            for _ in range(3):
                number = len(talk.requests) + len(message.submits) + 1
                prompt = [self.rng.randrange(FINGERPRINT_VOCABULARY) for _ in range(self.rng.randint(1, 20))]
                request = generation_pb2.GenerateRequest(request_id=f"clean-{number}", prompt=pack(prompt), max_tokens=10)
                message.submits.add(number=number, request=request)
            await call.write(self._said(talk, message))
            async with asyncio.timeout(WAIT_S):
                while len(talk.told) < len(talk.requests) or any(told.end is None for told in talk.told.values()):
                    if hearing.done():
                        raise AssertionError(f"the clean session ended: {hearing.result()} {await call.details()}")
                    await asyncio.sleep(0.005)
        await call.done_writing()
        if fault := await hearing:
            raise AssertionError(f"the clean session: {fault}")
        for number, submit in talk.requests.items():
            told = talk.told[number]
            assert told.end is not None
            found = (told.end.status, told.tokens, told.end.finished.reason)
            if found != (0, continuation(ints(submit.request.prompt), 10), LENGTH):
                raise AssertionError(f"clean request {number} gave {found} {told.end.detail}")
        self.counts["clean requests"] += len(talk.requests)

    @staticmethod
    def _said(talk: Conversation, message: generation_pb2.SessionRequest) -> bytes:
        data = message.SerializeToString()
        assert talk.say(data)
        return data


def _cannot_be_read(request: bytes) -> bool:
    try:
        generation_pb2.GenerateRequest.FromString(request)
    except DecodeError:
        return True
    return False
