"""A TCP proxy between two processes under test, which can cut, delay and record their connections."""

from __future__ import annotations

import asyncio


class Proxy:
    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0
        self.from_client = bytearray()
        """Bytes that clients have sent so far."""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold(self) -> None:
        """Forward nothing from now on, and close no connection, as if a cable were cut."""
        self._flows.clear()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, far_writer}
        for source, sink, keep in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._pass(source, sink, keep))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: bool) -> None:
        try:
            while data := await source.read(65536):
                await self._flows.wait()
                if keep:
                    self.from_client += data
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
