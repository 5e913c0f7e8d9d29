"""Serves :mod:`rrl.manager.reporting.metrics` over HTTP from threads of its own: a scrape waits for the manager's loop
never, and no client, however slow or eager, takes more than a few threads and descriptors of the manager's process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from ...core.run_dir import RunDir, write_atomically

_log = logging.getLogger("rrl.manager")

Collect = Callable[[], Iterable[Any]]
"""families of prometheus_client, as of now"""

MAX_CONNECTIONS = 8
"""connections; who comes beyond is hung up on"""
CONNECTION_TIMEOUT_S = 10.0
"""s for a connection, from its first byte to its last (Prometheus' scrape_timeout: 10 s by default)"""
PAGE_CACHE_S = 0.5
"""s for which a page is told again: who asks without a pause makes no work"""


class MetricsServer:
    """``address``: ``host:port``; port 0: any. What it came to is in the run directory's file ``metrics``."""

    def __init__(self, run: RunDir, address: str, collect: Collect) -> None:
        self._run, self._address, self._page = run, address, _Page(collect)
        self._server: _Server | None = None
        self._closed = False
        self._lock = threading.Lock()
        # opening asks the name service and imports a library: neither is waited for
        threading.Thread(target=self._open, name="metrics", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed, server = True, self._server
        if server is not None:
            server.shutdown()
            server.server_close()
            with contextlib.suppress(OSError):
                self._run.metrics.unlink(missing_ok=True)

    def _open(self) -> None:
        """Metrics that cannot be served are said, and cost the run nothing."""
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        try:
            family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            address = (address[0], int(port), *address[2:])
            with self._lock:
                if self._closed:
                    return
                self._server = server = _Server(family, address, self._page)
            threading.Thread(target=server.serve_forever, name="metrics-server", daemon=True).start()
            own_host = socket.gethostname() if host in ("0.0.0.0", "::") else host
            shown_host = f"[{own_host}]" if ":" in own_host else own_host
            write_atomically(self._run.metrics, f"{shown_host}:{server.server_address[1]}\n".encode())
        except (OSError, OverflowError, ValueError) as error:
            _log.warning("metrics are not served at %s: %s", self._address, error)


class _Page:
    """What is told: made at most once in ``PAGE_CACHE_S`` s, by one thread at a time."""

    def __init__(self, collect: Collect) -> None:
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(collect))
        self._lock = threading.Lock()
        self._text, self._expires_at = b"", 0.0

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        with self._lock:
            if time.monotonic() >= self._expires_at:
                self._text, self._expires_at = generate_latest(self._registry), time.monotonic() + PAGE_CACHE_S
            return self._text


class _Collector:
    """prometheus_client's idea of a collector."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Any]:
        return list(self._collect())


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, family: int, address: Any, page: _Page) -> None:
        self.address_family = family
        self.page = page
        self._free_slots = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._free_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # a timeout of the socket would begin anew with each byte
        timeout = threading.Timer(CONNECTION_TIMEOUT_S, _disconnect, (request,))
        timeout.daemon = True
        timeout.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timeout.cancel()
            self._free_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone, or was too slow, is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        text = self.server.page.text()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """The manager's output is not for that."""


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
