"""What a connection can carry that no gRPC client would send: HTTP/2 made by hand, and bytes that are none."""

from __future__ import annotations

import random
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str, **changes: str) -> bytes:
    """A header block of literals, none of them indexed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    } | {name.replace("__", ":").replace("_", "-"): value for name, value in changes.items()}
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def message(data: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its prefix; `flag` and `length` may lie."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def connections(path: str, first: bytes, second: bytes, seed: int) -> dict[str, bytes]:
    """What to write on one connection each; `first` and `second` are messages of the streaming method `path`."""
    rng = random.Random(seed)
    start = PREFACE + frame(SETTINGS)
    opened = start + frame(HEADERS, headers(path), END_HEADERS, 1)
    call = opened + frame(DATA, message(first), stream=1)
    return {
        "nothing": b"",
        "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "noise": rng.randbytes(2000),
        "noise after the preface": start + rng.randbytes(2000),
        "noise for headers": start + frame(HEADERS, rng.randbytes(300), END_HEADERS, 1),
        "noise for a message": opened + frame(DATA, rng.randbytes(300), END_STREAM, 1),
        "half a frame": opened + frame(DATA, message(first), stream=1)[:-2],
        "a message after the half-close": call + frame(DATA, b"", END_STREAM, 1) + frame(DATA, message(second), 0, 1),
        "headers after the half-close": call + frame(DATA, b"", END_STREAM, 1) + frame(HEADERS, headers(path), END_HEADERS, 1),
        "a message longer than it says": opened + frame(DATA, message(first, length=1), END_STREAM, 1),
        "a message shorter than it says": opened + frame(DATA, message(first, length=10_000), END_STREAM, 1),
        "a message of 4 GiB": opened + frame(DATA, message(first, length=2**32 - 1), stream=1),
        "a compressed message without an encoding": opened + frame(DATA, message(first, flag=1), END_STREAM, 1),
        "an unknown flag": opened + frame(DATA, message(first, flag=7), END_STREAM, 1),
        "gzip that is none": start
        + frame(HEADERS, headers(path, grpc_encoding="gzip"), END_HEADERS, 1)
        + frame(DATA, message(first, flag=1), END_STREAM, 1),
        "an unknown method": start + frame(HEADERS, headers("/pagemirror.v1.Nothing/At%00All"), END_HEADERS | END_STREAM, 1),
        "no path": start + frame(HEADERS, headers(""), END_HEADERS | END_STREAM, 1),
        "another content type": start + frame(HEADERS, headers(path, content_type="text/html"), END_HEADERS | END_STREAM, 1),
        "a deadline that is none": start + frame(HEADERS, headers(path, grpc_timeout="-1Z"), END_HEADERS | END_STREAM, 1),
        "a header of a megabyte": start + b"".join(_long_headers(path)),
        "an even stream": start + frame(HEADERS, headers(path), END_HEADERS, 2),
        "data on stream 0": start + frame(DATA, message(first)),
        "a window beyond its limit": start + frame(WINDOW_UPDATE, struct.pack(">I", 2**31 - 1)) * 2,
        "a flood of pings": start + frame(PING, bytes(8)) * 2000,
        "a flood of settings": start + frame(SETTINGS, struct.pack(">HI", 4, 65_535)) * 2000,
        "streams opened and reset": start
        + b"".join(
            frame(HEADERS, headers(path), END_HEADERS, number) + frame(RST_STREAM, struct.pack(">I", 8), 0, number)
            for number in range(1, 600, 2)
        ),
    }


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


def _long_headers(path: str) -> list[bytes]:
    field = b"\0" + _text("x-noise") + _text("x" * 100)
    block = headers(path) + field * 9000
    parts = [block[i : i + 16_000] for i in range(0, len(block), 16_000)]
    frames = [frame(HEADERS, parts[0], 0, 1)]
    return frames + [frame(CONTINUATION, part, END_HEADERS if part is parts[-1] else 0, 1) for part in parts[1:]]
