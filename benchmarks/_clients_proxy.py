"""A TCP proxy before an endpoint, which cuts one connection behind an event, and a recorder of streams."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which a closed connection is reset: the other side reads an error, and no end."""


class CuttingProxy:
    """Forwards all connections; resets one of them once the endpoint has sent ``cut_after`` events over all of them.

    Args:
        base_url: The endpoint's base URL.
        cut_after: Number of events; None to cut nothing.
    """

    def __init__(self, base_url: str, cut_after: int | None = None) -> None:
        there = urlsplit(base_url)
        assert there.hostname is not None
        assert there.port is not None
        self._there, self._cut_after = (there.hostname, there.port), cut_after
        self._lock = threading.Lock()
        self.events = 0
        """Number of events that the endpoint has sent."""
        self.cut = False
        """Whether a connection was cut."""
        self.received: list[bytearray] = []
        """What the client got over each connection, without the answer that was cut."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}{there.path}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                for source, sink, counts in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        last, received = b"", bytearray()
        if counts:
            self.received.append(received)
        with suppress(OSError):
            while data := source.recv(65536):
                kept, cut = self._count(last, data) if counts else (len(data), False)
                sink.sendall(data[:kept])
                received += data[:kept]
                if cut:
                    del received[received.rfind(b"HTTP/1.1 ") :]
                    for each in (source, sink):  # else the other thread would end the endpoint's side in an orderly way
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        each.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
                        each.close()
                    return
                last = data[-1:]
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _count(self, last: bytes, data: bytes) -> tuple[int, bool]:
        """Count the events that end in ``data``; return the number of bytes to forward, and whether to cut then.

        ``last`` is the byte before ``data``.
        """
        with self._lock:
            place, joined = 0, last + data
            while (place := joined.find(b"\n\n", place) + 2) > 1:
                self.events += 1
                if self.events == self._cut_after:
                    self.cut = True
                    return place - len(last), True
        return len(data), False


class Stream(Struct, frozen=True):
    """A stream of events that the endpoint has sent completely."""

    path: str
    events: bytes


class Recorder:
    """An application that records the streams, and counts the calls, of the application in it.

    Args:
        application: The endpoint's application.
    """

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self.streams: list[Stream] = []
        self.calls = 0
        """Number of POST requests, without those that only count tokens."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_stream, parts = False, []
        if scope.get("method") == "POST" and not scope["path"].endswith("count_tokens"):
            self.calls += 1

        async def record(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            elif is_stream:
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    self.streams.append(Stream(scope["path"], b"".join(parts)))
            await send(message)

        await self._application(scope, receive, record)
