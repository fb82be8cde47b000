"""A small asyncio driver for `Libp2pConnection`: enough to talk to js-libp2p, with back-pressure. Not the
product's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from atoll.wire.libp2p.connection import Libp2pConnection
from atoll.wire.libp2p.events import ConnectionReady, StreamData, StreamHalfClosed, StreamOpened, StreamReset


class Stream:
    """One stream, as a coroutine would like it."""

    def __init__(self, link: Link, name: int) -> None:
        self.link, self.name = link, name
        self._arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def read(self) -> bytes:
        """The next bytes, b"" at the end."""
        data = await self._arrived.get()
        if isinstance(data, Exception):
            raise data
        self.link.connection.consumed(self.name, len(data))
        await self.link.flush()
        return data

    async def write(self, data: bytes) -> None:
        while not self.link.connection.send(self.name, data):
            await self.link.moved()
        await self.link.flush()

    async def close(self) -> None:
        self.link.connection.close(self.name)
        await self.link.flush()


class Link:
    """One socket, one connection. `serve` is started for every stream that the remote opens."""

    def __init__(
        self,
        connection: Libp2pConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        serve: Callable[[Stream, str], Awaitable[None]],
    ) -> None:
        self.connection, self._reader, self._writer, self._serve = connection, reader, writer, serve
        self.ready: asyncio.Future[ConnectionReady] = asyncio.get_running_loop().create_future()
        self.streams: dict[int, Stream] = {}
        self._opening: dict[int, asyncio.Future[Stream]] = {}
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the remote hangs up, which ends all streams; a PeerFault ends it too."""
        await self.flush()
        while data := await self._reader.read(1 << 16):
            for event in self.connection.receive(data):
                self._on(event)
            await self.flush()
            self._moved.set()
            self._moved.clear()
        self._writer.close()
        gone = ConnectionError("the remote hung up")
        for opening in self._opening.values():
            if not opening.done():
                opening.set_exception(gone)
        for stream in self.streams.values():
            stream._arrived.put_nowait(gone)

    async def open(self, protocol: str) -> Stream:
        name = self.connection.open_stream(protocol)
        assert name is not None
        self._opening[name] = asyncio.get_running_loop().create_future()
        await self.flush()
        return await self._opening[name]

    async def flush(self) -> None:
        while pieces := self.connection.take_outgoing():
            self._writer.writelines(pieces)
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def moved(self) -> None:
        await self._moved.wait()

    def _on(self, event: object) -> None:
        match event:
            case ConnectionReady():
                self.ready.set_result(event)
            case StreamOpened(name, protocol, by_remote):
                self.streams[name] = stream = Stream(self, name)
                if by_remote:
                    task = asyncio.ensure_future(self._serve(stream, protocol))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                else:
                    self._opening[name].set_result(stream)
            case StreamData(name, data):
                self.streams[name]._arrived.put_nowait(data)
            case StreamHalfClosed(name):
                self.streams[name]._arrived.put_nowait(b"")
            case StreamReset(name, why):
                trouble = ConnectionError(why)
                if name in self.streams:
                    self.streams[name]._arrived.put_nowait(trouble)
                else:
                    self._opening[name].set_exception(trouble)
            case _:
                pass
