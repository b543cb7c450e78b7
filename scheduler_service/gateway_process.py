"""The gateway smg as a child of `pagemirror up`: what it is told, when it serves, what it says, and its restarts.

smg answers OpenAI's HTTP endpoints and drives one worker, the gateway port of our scheduler or front end. It is started when
that port serves, and again whenever it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import ssl
import sys

from scheduler_service.channels import hold
from scheduler_service.children import RestartPolicy, cancel, end, kill, say_again, spawn, terminate
from scheduler_service.http_settings import HttpSettings

_OK = b"200"
_PROBE_EVERY_S = 0.1
_COMPLAIN_AFTER_S = 10.0
_PROBE_TIMEOUT_S = 2.0
_HAND_OVER_S = 1.0  # for what the scheduler said last to reach the clients
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BANNER = re.compile(r"^\s*$|[\u2800-\u28ff]")
_READ_BYTES = 65_536
_LONGEST_LINE = 65_536
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_LEVELS = {"debug": "info", "info": "warn", "warning": "warn", "error": "error"}


class GatewayProcess:
    """One smg after another. Made before anything starts: what is wrong with its port is told at once, and others cannot take
    it until smg does.

    Raises:
        StartError: the address cannot be had, or the token file cannot be used.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._keys = settings.tokens()
        self._held = contextlib.ExitStack()
        address = self._held.enter_context(hold(settings.http))
        self.settings = settings.model_copy(update={"http": address})
        self._metrics = self._held.enter_context(hold("127.0.0.1:0"))
        # Nobody else may register workers, or empty caches, through it.
        self._admin_key = secrets.token_hex(16)
        self._process: asyncio.subprocess.Process | None = None
        self._draining = False
        self.serves = asyncio.Event()
        """An HTTP request was or would have been served."""

    def arguments(self, worker: str) -> list[str]:
        """Of `smg launch`, for a worker at HOST:PORT."""
        settings = self.settings
        host, _, port = settings.http.rpartition(":")
        metrics_host, _, metrics_port = self._metrics.rpartition(":")
        arguments = [
            *("--host", host.strip("[]"), "--port", port),
            *("--prometheus-host", metrics_host, "--prometheus-port", metrics_port),
            *("--worker-urls", f"grpc://{_from_here(worker)}", "--worker-startup-check-interval", "1"),
            # There is one worker: left out of routing for its failures or its load, it would only be missed. While it has no
            # runtime its requests wait; what it thinks of itself it tells by their statuses.
            *("--policy", "round_robin", "--disable-circuit-breaker", "--disable-worker-overload-protection"),
            "--disable-retries",  # a full queue is told at once: it is no emptier elsewhere
            "--disable-health-check",
            *("--shutdown-grace-period-secs", str(max(1, round(settings.grace)))),
            *("--log-level", _LEVELS[settings.log_level.lower()]),
            f"--control-plane-api-keys=up:pagemirror:admin:{self._admin_key}",
        ]
        if settings.tls_cert is not None:
            arguments += ["--tls-cert-path", str(settings.tls_cert), "--tls-key-path", str(settings.tls_key)]
        if settings.log_json:
            arguments.append("--log-json")
        return [*arguments, *(f"--tenant-api-key=token{n}:{key}" for n, key in enumerate(self._keys))]

    async def keep(self, worker: str, model: str) -> int:
        """Start it for a worker at HOST:PORT that serves a model of this name, and again when it has ended; the last one's
        status when it is not to be started again.
        """
        policy = RestartPolicy()
        while True:
            status = await self._run(worker, model, policy)
            if self._draining:
                return status
            pause = policy.next_pause(status, asyncio.get_running_loop().time())
            say_again("the gateway ended", status, pause)
            if pause is None:
                return status
            await asyncio.sleep(pause)

    def drain(self) -> None:
        """Have it end when its requests have ended. It is not started again from now on."""
        self._draining = True
        terminate(self._process)

    def kill(self) -> None:
        """End it now. It is not started again from now on."""
        self._draining = True
        kill(self._process)
        self.release()

    async def end(self) -> None:
        """End it soon: nothing is behind it any more."""
        self._draining = True
        await end(self._process, _HAND_OVER_S)

    def release(self) -> None:
        """Let others have its ports."""
        self._held.close()

    async def _run(self, worker: str, model: str, policy: RestartPolicy) -> int:
        """One life of it; its exit status, negative where a signal ended it."""
        self.release()
        pipe, same = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = self._process = await spawn(
            ["scheduler_service.smg_main", str(os.getpid())], stdin=pipe, stdout=pipe, stderr=same
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.arguments(worker)).encode())
        process.stdin.close()
        tasks = [asyncio.create_task(self._pass_on(process)), asyncio.create_task(self._await_service(model, policy))]
        try:
            status = await process.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.shield(tasks[0])
            return status
        finally:
            await cancel(*tasks)

    async def _await_service(self, model: str, policy: RestartPolicy) -> None:
        loop = asyncio.get_running_loop()
        while await self._status("GET", "/readiness") != _OK:  # noqa: ASYNC110  (another process's state)
            await asyncio.sleep(_PROBE_EVERY_S)
        # It has its worker, and reads the tokenizer now, without which it refuses requests.
        complain_at = loop.time() + _COMPLAIN_AFTER_S
        while await self._status("POST", "/v1/tokenize", {"model": model, "prompt": "a"}) != _OK:
            await asyncio.sleep(_PROBE_EVERY_S)
            if loop.time() > complain_at:
                complain_at = float("inf")
                sys.stderr.write(
                    f"pagemirror up: the gateway has no tokenizer for {model}; --gateway-tokenizer names a folder\n"
                )
                sys.stderr.flush()
        policy.note_ready()
        self.serves.set()

    async def _status(self, method: str, path: str, body: object = None) -> bytes:
        """Status of its answer to a request; empty where it does not answer."""
        host, _, port = _from_here(self.settings.http).rpartition(":")
        host = host.strip("[]")
        trust = None
        if self.settings.tls_cert is not None:
            trust = ssl.create_default_context()
            trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # our own child, on this machine
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(data)}"]
        lines += ["Content-Type: application/json", *(f"Authorization: Bearer {key}" for key in self._keys[:1]), "", ""]
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=trust)
                try:
                    writer.write("\r\n".join(lines).encode() + data)
                    return b"".join((await reader.readline()).split()[1:2])
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Its output, which is its log, to our stderr; without the picture with which it begins."""
        assert process.stdout is not None
        coloured, begun = sys.stderr.isatty(), b""
        while data := await process.stdout.read(_READ_BYTES):
            *lines, begun = (begun + data).split(b"\n")
            if len(begun) > _LONGEST_LINE:
                lines, begun = [*lines, begun], b""
            texts = [line.decode(errors="replace") for line in lines]
            texts = [text if coloured else _COLOURS.sub("", text) for text in texts if not _BANNER.search(text)]
            sys.stderr.write("".join(f"{text}\n" for text in texts))
            sys.stderr.flush()


def _from_here(address: str) -> str:
    """How this machine reaches a server of its own that listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = _EVERYWHERE.get(host, host)
    return f"{host}:{port}"
