"""Serve the metrics of :mod:`rrl.manager.reporting.metrics` over HTTP, from separate threads.

A scrape never waits for the manager's loop, and slow or frequent clients take only a few threads and descriptors of the
manager's process.
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
from ...transport.address import resolve

_log = logging.getLogger("rrl.manager")

Collect = Callable[[], Iterable[Any]]
"""A function that returns the current metric families of prometheus_client."""

MAX_CONNECTIONS = 8
"""Maximum number of connections; further connections are closed at once."""
CONNECTION_TIMEOUT_S = 10.0
"""Maximum duration (s) of a connection (Prometheus' scrape_timeout is 10 s by default)."""
PAGE_CACHE_S = 0.5
"""Seconds for which the text of the metrics is cached, so that frequent scrapes cause no extra work."""


class MetricsServer:
    """Serves metrics at ``address`` (``host:port``; port 0 selects a free port).

    The actual address is published in the run directory's file ``metrics``. If the metrics cannot be served, the reason
    is published in the file ``metrics.failed``, whose content ``rrl status`` shows.
    """

    def __init__(self, run: RunDir, address: str, collect: Collect) -> None:
        self._run, self._address, self._page = run, address, _Page(collect)
        self._server: _Server | None = None
        self._closed = False
        self._lock = threading.Lock()
        # Opening the server resolves a name and imports a library; the manager waits for neither.
        threading.Thread(target=self._open, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Close the server and remove its published address."""
        with self._lock:
            self._closed, server = True, self._server
        if server is not None:
            server.shutdown()
            server.server_close()
            with contextlib.suppress(OSError):
                self._run.metrics.unlink(missing_ok=True)

    def _open(self) -> None:
        """Open the server and publish its address. On failure publish the reason; the run continues without metrics."""
        with contextlib.suppress(OSError):
            self._run.metrics_failure.unlink(missing_ok=True)  # left by an earlier manager
        try:
            listen = resolve(self._address)
            with self._lock:
                if self._closed:
                    return
                self._server = server = _Server(listen.family, listen.socket_address, self._page)
            threading.Thread(target=server.serve_forever, name="metrics-server", daemon=True).start()
            own_host = socket.gethostname() if listen.host in ("0.0.0.0", "::") else listen.host
            shown_host = f"[{own_host}]" if ":" in own_host else own_host
            write_atomically(self._run.metrics, f"{shown_host}:{server.server_address[1]}\n".encode())
        except (OSError, OverflowError, ValueError) as error:
            reason = f"not served at {self._address}: {getattr(error, 'strerror', None) or error}"
            _log.warning("metrics are %s", reason)
            with contextlib.suppress(OSError):
                write_atomically(self._run.metrics_failure, f"{reason}\n".encode())


class _Page:
    """The metrics as text for Prometheus, generated at most once in ``PAGE_CACHE_S`` s, by one thread at a time."""

    def __init__(self, collect: Collect) -> None:
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(collect))
        self._lock = threading.Lock()
        self._text, self._expires_at = b"", 0.0

    def text(self) -> bytes:
        """Return the text, generating it if the cached text has expired."""
        from prometheus_client import generate_latest

        with self._lock:
            if time.monotonic() >= self._expires_at:
                self._text, self._expires_at = generate_latest(self._registry), time.monotonic() + PAGE_CACHE_S
            return self._text


class _Collector:
    """Adapts a function to prometheus_client's collector protocol."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Any]:
        return list(self._collect())


class _Server(ThreadingTCPServer):
    """The HTTP server that returns the metrics. It limits the number and the duration of connections."""

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
        except BaseException:  # no thread could be started
            self._free_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A timer is needed, because the socket's own timeout would start again with every byte.
        timeout = threading.Timer(CONNECTION_TIMEOUT_S, _disconnect, (request,))
        timeout.daemon = True
        timeout.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timeout.cancel()
            self._free_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnected or were too slow."""


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
        """Log nothing: requests do not belong in the manager's log."""


def _disconnect(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
