"""A line between two processes that can be cut, stalled and left half open.

Bytes are passed on as they come. The peers keep their ends through everything but a cut, so what they notice is what they would
notice of a network: a reset, a silence, or bytes that nobody ever reads.
"""

from __future__ import annotations

import asyncio
from typing import cast


class Line:
    """One address to connect to, and the address where those connections are to end.

    While the gate is closed, connections are accepted and wait: so the process behind the line can be started, and looked at
    while nobody uses it.
    """

    def __init__(self, target: str) -> None:
        """`target` is the path of a unix socket."""
        self.target = target
        self.num_bytes = 0
        """Passed on so far, both ways."""
        self.gate = asyncio.Event()
        self._passing = asyncio.Event()
        self._passing.set()
        self._swallowing = False
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._bytes_to_cut: int | None = None

    async def listen_on_port(self) -> int:
        """Listen on any free port of the loopback address; the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Near(self), "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_on_path(self, path: str) -> None:
        """Listen on a unix socket."""
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Near(self), path)

    def close(self) -> None:
        """Stop listening and cut whatever there is."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> int:
        """Cut every connection, what is on the way being lost; how many there were."""
        self._bytes_to_cut = None
        count = len(self._connections)
        for connection in list(self._connections):
            connection.abort()
        return count

    def cut_after(self, num_bytes: int) -> None:
        """Cut when so many more bytes were passed on: in the middle of a message, as a rule."""
        self._bytes_to_cut = num_bytes

    async def stall(self, seconds: float) -> None:
        """Pass nothing on for a while, then everything: late, but whole and in order."""
        self._passing.clear()
        for connection in self._connections:
            connection.hold(True)
        await asyncio.sleep(seconds)
        self._passing.set()
        for connection in self._connections:
            connection.hold(False)

    async def leave_half_open(self, seconds: float) -> None:
        """Lose all bytes for a while, telling nobody, then cut: there is no whole stream any more."""
        self._swallowing = True
        await asyncio.sleep(seconds)
        self._swallowing = False
        self.cut()

    # --- for the connections ----------------------------------------------------------------------------------------------

    def passes(self, data: bytes) -> bytes:
        """What of these bytes goes on."""
        if self._swallowing:
            return b""
        if self._bytes_to_cut is not None:
            data = data[: self._bytes_to_cut]
            self._bytes_to_cut -= len(data)
        self.num_bytes += len(data)
        return data

    @property
    def is_due(self) -> bool:
        return self._bytes_to_cut == 0

    @property
    def is_held(self) -> bool:
        return not self._passing.is_set()

    def add(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def remove(self, connection: _Connection) -> None:
        self._connections.discard(connection)


class _Connection:
    """Two ends. Either's loss is the other's."""

    def __init__(self, line: Line, near: _Near) -> None:
        self.line = line
        self._ends: list[asyncio.Transport] = [near.transport]
        line.add(self)
        self._opening = asyncio.create_task(self._open(near))

    async def _open(self, near: _Near) -> None:
        try:
            await self.line.gate.wait()
            transport, far = await asyncio.get_running_loop().create_unix_connection(lambda: _End(self), self.line.target)
            self._ends.append(transport)
            near.peer, far.peer = far.transport, near.transport
        except OSError:
            self.abort()
            return
        self.hold(self.line.is_held)

    def hold(self, held: bool) -> None:
        for end in self._ends:
            if not end.is_closing() and len(self._ends) == 2:
                end.pause_reading() if held else end.resume_reading()

    def abort(self) -> None:
        self.line.remove(self)
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        for end in self._ends:
            end.abort()


class _End(asyncio.Protocol):
    """What is read at one end is written at the other."""

    transport: asyncio.Transport
    peer: asyncio.Transport | None = None

    def __init__(self, connection: _Connection | None = None) -> None:
        self.connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self.connection is not None
        line = self.connection.line
        if self.peer is not None:
            self.peer.write(line.passes(data))
        if line.is_due:
            # After what was written has left.
            asyncio.get_running_loop().call_soon(line.cut)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is not None:
            self.connection.abort()


class _Near(_End):
    """The end of whoever connected; read from only once there is another end."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self.connection = _Connection(self._line, self)
