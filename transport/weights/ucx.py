"""The UCX transport, based on ucxx. It is fast with RDMA. Over TCP it is as fast as the plain TCP transport.

The settings and rules follow from measurements (docs/sources.md, UCX). Progress is made in a thread, with Python
futures, because every other mode spins a core. Endpoint error handling is always on, because without it a process hangs
when its peer dies. A transfer is aborted before its buffer is freed, because otherwise UCX continues to write into the
buffer. Every operation has a deadline of rrl, because UCX never notices a stopped peer.

UCX's own listener is not used: it binds 0.0.0.0, authenticates nothing, and permanently keeps a descriptor of each
connection that sends it garbage. Instead, a connection begins at a TCP port of rrl. Both ends prove there that they
know the run's secret, then exchange the addresses of their UCX workers, and each end makes an endpoint from the
received address. The TCP connection stays open beside the endpoint, and the endpoint is closed when the TCP connection
ends. UCX alone notices a killed peer only at its next keepalive (20 s, measured over shared memory and TCP).

The end that dials makes a worker for each connection. UCX pairs the endpoints of two workers by counting them on each
side. After an attempt that failed on one side only, the counts would differ permanently: an endpoint would receive the
data of another endpoint, perhaps into a buffer that has been freed. A worker costs 2 to 13 ms, two threads and five
descriptors.

If an end has no UCX, or its UCX cannot reach the other end, both continue over the TCP connection. So ``tcp`` and
``ucx`` are compatible, and nodes of one run may use different transports.

Each UCX worker also listens at its own TCP ports as long as it exists. These ports have no authentication, so UCX uses
TCP only on trusted networks (docs/sites.md). UCX drops garbage, but a connection that sends nothing keeps a descriptor
permanently; this module closes such connections.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

from ...core.run_spec import INTEROPERABLE_TRANSPORTS, WeightTransportName
from ..address import interfaces
from ..streams.connection import CONNECT_TIMEOUT_S, Connection, TransportError, authenticate, deadline
from ..tcp_inspection import accepted_connections, bytes_received, listening_addresses, shut_down
from .offers import TCP_ONLY, Offer, receive_choice, receive_offer, send_choice, send_offer
from .protocol import Acceptor, WeightClient, WeightServer
from .store import WeightStore
from .tcp import TcpConnection, dial, listen
from .ucx_settings import rdma_resources, resources, set_defaults, ucx_limits

MIN_HELLO_BYTES = 42
"""Minimum number of bytes that a real peer sends within milliseconds (magic number and connection request, UCX 1.21
over IPv4; measured)."""
SILENT_TIMEOUT_S = 5.0
"""Seconds after which a silent connection, which has sent fewer than MIN_HELLO_BYTES, is closed."""
MAX_SILENT_CONNECTIONS = 64
"""Maximum number of silent connections; the oldest are closed first."""
_SILENT_POLL_S = 1.0
"""Seconds between two searches for silent connections; a search costs 10 us for each descriptor of the process."""


async def close_silent_connections(ports: Callable[[], frozenset[int]]) -> None:
    """Close silent connections to UCX's ports (:data:`MIN_HELLO_BYTES`, :data:`SILENT_TIMEOUT_S`), until cancelled.

    Args:
        ports: Returns the ports at which UCX listens now.
    """
    silent_since: dict[tuple[int, int], float] = {}
    while True:
        now = asyncio.get_running_loop().time()
        silent = [connection for connection in accepted_connections(ports()).items() if _is_silent(connection[0])]
        # by descriptor and port: when the connection was first found silent
        silent_since = {connection: silent_since.get(connection, now) for connection in silent}
        oldest_first = sorted(silent_since, key=lambda connection: silent_since[connection])
        surplus = max(0, len(silent_since) - MAX_SILENT_CONNECTIONS)
        for index, connection in enumerate(oldest_first):
            if index < surplus or now - silent_since[connection] >= SILENT_TIMEOUT_S:
                shut_down(*connection)
        await asyncio.sleep(_SILENT_POLL_S)


def _is_silent(fd: int) -> bool:
    received = bytes_received(fd)
    return received is not None and received < MIN_HELLO_BYTES  # if unknown, the peer may belong to this run


_TAG_BYTES = 8
_ABORT_NS = 10**10
"""Maximum time (ns) for which an abort waits for UCX's progress thread; measured: 0 to 2 ms."""
_EPOLL_TIMEOUT_MS = 1
"""Maximum sleep (ms) of the progress thread. It is the default of ucxx."""

_log = logging.getLogger("rrl.weights")


class _Worker:
    """A UCX worker with ucxx's two threads: one makes progress, the other completes the futures of the running loop.

    ucxx's ApplicationContext does the same, but leaves a reference to its worker in the event loop, so that the worker
    is never freed.
    """

    def __init__(self, context: Any) -> None:
        from ucxx._lib.libucxx import UCXAddress, UCXWorker
        from ucxx._lib_async.continuous_ucx_progress import _create_context
        from ucxx._lib_async.notifier_thread import _notifierThread

        before = listening_addresses()
        self.core: Any = UCXWorker(context, enable_delayed_submission=True, enable_python_future=True)
        self.address: bytes = UCXAddress.create_from_worker(self.core).tobytes()
        opened = listening_addresses() - before
        self.ports = frozenset((host, port) for host, port in opened if port.to_bytes(2, "big") in self.address)
        """(address, port) pairs at which this worker listens. Ports that the worker's address does not contain are left
        out, because other threads may have opened them."""
        self._notifier_queue: Queue[str] = Queue()
        arguments = (asyncio.get_running_loop(), self.core, self._notifier_queue)
        self._notifier = threading.Thread(target=_notifierThread, args=arguments, name="UCX notifier")
        self._notifier.start()
        self.core.set_progress_thread_start_callback(_create_context)
        self.core.start_progress_thread(polling_mode=False, epoll_timeout=_EPOLL_TIMEOUT_MS)

    def connect(self, address: bytes) -> Any:
        """Return an endpoint to the worker with that address. Raises TransportError if UCX cannot reach it."""
        from ucxx._lib.libucxx import UCXAddress, UCXEndpoint

        try:
            return UCXEndpoint.create_from_worker_address(self.core, UCXAddress.create_from_buffer(address), True)
        except Exception as error:  # ucxx raises its own exceptions, RuntimeError and MemoryError
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End both threads, and block until they have ended (measured 0.5 ms).

        Must not be called in the event loop's thread, since the thread that completes futures ends only while the
        loop runs.
        """
        self._notifier_queue.put("shutdown")
        self.core.stop_request_notifier_thread()
        self._notifier.join()
        self.core.stop_progress_thread()
        self.core = None
        self.ports = frozenset()


class _UcxConnection:
    """A UCX endpoint, and the TCP connection on which both ends agreed to use UCX.

    Tag messages keep their boundaries: each receive matches one send of the same length. ``dispose`` closes the worker.
    Since the worker completes the futures of the operations, ``dispose`` is called only once the connection has been
    aborted and no operation is pending.
    """

    def __init__(
        self, endpoint: Any, tcp: TcpConnection, own_tag: int, peer_tag: int, dispose: Callable[[], None] = lambda: None
    ) -> None:
        self._endpoint = endpoint
        self._tcp = tcp
        self._own_tag, self._peer_tag = own_tag, peer_tag
        self._dispose = dispose
        self._aborted = False
        self._pending_operations = 0
        self._tcp_watch = asyncio.get_running_loop().create_task(self._until_tcp_ends())

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if len(data):
            await self._run(lambda: self._endpoint.tag_send(Array(data), Tag(self._peer_tag)))

    async def receive(self, into: memoryview) -> None:
        """Receive bytes until ``into`` is full."""
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if into.nbytes:
            await self._run(lambda: self._endpoint.tag_recv(Array(into), Tag(self._own_tag)))

    async def _run(self, start: Callable[[], Any]) -> None:
        """Run one operation. On any failure the endpoint is closed before the caller can free the buffer."""
        if self._aborted:
            raise TransportError("the connection was aborted")
        self._pending_operations += 1
        try:
            self._endpoint.raise_on_error()
            request = start()
            await request.wait()
        except Exception as error:  # ucxx raises its own exceptions, RuntimeError and MemoryError
            self.abort()
            # ucxx never frees a failed request's future: its traceback would keep the buffers of every frame
            error.__traceback__ = None
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error
        except BaseException:  # cancelled
            self.abort()
            raise
        finally:
            self._pending_operations -= 1
            self._dispose_once_idle()
        if self._aborted:
            raise TransportError("the connection was aborted")

    def _dispose_once_idle(self) -> None:
        if self._aborted and not self._pending_operations:
            self._dispose()

    async def _until_tcp_ends(self) -> None:
        try:
            await self._tcp.receive(memoryview(bytearray(1)))
        except TransportError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the endpoint and the TCP connection at once."""
        if not self._aborted:
            self._aborted = True
            self._endpoint.close_blocking(period=_ABORT_NS, max_attempts=1)
            self._endpoint.remove_close_callback()
            self._endpoint = None
            self._tcp.abort()
            self._dispose_once_idle()

    @property
    def broken(self) -> bool:
        """Return whether the connection was aborted or has failed."""
        return self._aborted or not self._endpoint.alive


class UcxTransport:
    """A :class:`rrl.transport.weights.base.WeightTransport` with addresses ``ucx://host:port``.

    Create the transport in the event loop that uses it, and close it. Otherwise ucxx's notifier threads keep the
    process from ending, unless that loop runs in a daemon thread.

    Args:
        secret: HMAC secret of the run.
        trusted_host: Address at which UCX's TCP transport may listen. If it is None, UCX may not use TCP, and must have
            a transport for one of ``rdma_ports`` if there are any.
        rdma_ports: Active RDMA ports of this machine.

    Raises:
        ImportError: ucxx is not installed.
        TransportError: UCX finds no transport that it may use, or listens at another address.
    """

    kind: WeightTransportName = "ucx"

    def __init__(self, secret: bytes, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        self._secret = secret
        self._trusted_host = trusted_host
        self._context = _open_context(trusted_host, rdma_ports)
        self._client = client = WeightClient(self._dial, secret)
        self.manifest, self.fetch, self.disconnect = client.manifest, client.fetch, client.disconnect
        self._workers: set[_Worker] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._listening_worker: _Worker | None = self._new_worker()
        """Worker that serves all connections that other processes dialled; None once the transport is closed."""
        self._served: list[tuple[_UcxListener, WeightServer]] = []
        self._closed = False
        self._guard = asyncio.get_running_loop().create_task(close_silent_connections(self.ports))

    def ports(self) -> frozenset[int]:
        """Return the TCP ports at which UCX listens without authentication."""
        return frozenset(port for worker in self._workers for _, port in worker.ports)

    async def serve(self, store: WeightStore, host: str) -> str:
        """Serve ``store`` over UCX: see ``WeightTransport.serve``."""
        assert self._listening_worker is not None
        weight_server = WeightServer(store, self._secret)
        listener = _UcxListener(self._secret, self._listening_worker, weight_server)
        self._served.append((listener, weight_server))
        return f"ucx://{host}:{await listener.open(host)}"

    async def close(self) -> None:
        """Stop serving, drop every connection and end UCX; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._guard.cancel()
        await self._client.close()
        for listener, weight_server in self._served:
            await listener.close()
            await weight_server.close()
        self._served.clear()
        self._listening_worker = None
        for worker in list(self._workers):
            self._close_worker(worker)
        await asyncio.gather(*self._closing)
        self._context = None
        gc.collect()  # ucxx's objects are in reference cycles

    def _new_worker(self) -> _Worker:
        """Return a new worker. Raises TransportError."""
        try:
            worker = _Worker(self._context)
        except Exception as error:  # for example no free descriptor, or no lockable memory
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error
        self._workers.add(worker)
        if forbidden := sorted(pair for pair in worker.ports if pair[0] != self._trusted_host):
            self._close_worker(worker)
            listening = ", ".join(f"{address}:{port}" for address, port in forbidden)
            allowed = f"only {self._trusted_host} is allowed" if self._trusted_host else "it must not listen at all"
            raise TransportError(f"UCX listens at {listening}, but {allowed}")
        return worker

    def _close_worker(self, worker: _Worker) -> None:
        """Start to close a worker, without waiting for its threads. A second call for a worker does nothing."""
        if worker in self._workers:
            self._workers.remove(worker)
            ending = asyncio.get_running_loop().create_task(asyncio.to_thread(worker.close))
            self._closing.add(ending)
            ending.add_done_callback(self._closing.discard)

    async def _dial(self, address: str) -> Connection:
        tcp = await dial(address, sorted(INTEROPERABLE_TRANSPORTS))
        if address.startswith("tcp:"):
            return tcp
        await authenticate(tcp, self._secret, dialled=True)
        if self._closed:
            tcp.abort()
            raise TransportError("the weight transport is closed")
        worker = self._new_worker()
        try:
            connection = await self._connect_ucx(address, tcp, worker)
        except BaseException:
            tcp.abort()
            self._close_worker(worker)
            raise
        if connection is None:
            self._close_worker(worker)
        return connection or tcp

    async def _connect_ucx(self, address: str, tcp: TcpConnection, worker: _Worker) -> _UcxConnection | None:
        """Return a UCX connection; None if one end cannot reach the other by UCX."""
        own_tag = _new_tag()
        with deadline(tcp, CONNECT_TIMEOUT_S):
            await send_offer(tcp, Offer(own_tag, worker.address))
            peer_offer = await receive_offer(tcp)
            endpoint = None
            if peer_offer != TCP_ONLY:
                try:
                    endpoint = worker.connect(peer_offer.address)
                except TransportError as error:
                    _log.warning("UCX cannot reach %s; weights from it use TCP: %s", address, error)
                await send_choice(tcp, endpoint is not None)
            if endpoint is None:
                return None
            return _UcxConnection(endpoint, tcp, own_tag, peer_offer.tag, lambda: self._close_worker(worker))


class _UcxListener:
    """The TCP port where connections begin; an authenticated peer is served over UCX if both ends can use it."""

    def __init__(self, secret: bytes, worker: _Worker, weight_server: WeightServer) -> None:
        self._worker = worker
        self._weight_server = weight_server
        self._acceptor = Acceptor(secret, self._serve)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """Listen on a free port, and return it."""
        self._server, port = await listen(self._acceptor.accept, host)
        return port

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        await self._acceptor.close()

    async def _serve(self, tcp: Connection) -> None:
        assert isinstance(tcp, TcpConnection)
        with deadline(tcp, CONNECT_TIMEOUT_S):
            connection = await self._connect_ucx(tcp)
        await self._weight_server.accept(connection or tcp)

    async def _connect_ucx(self, tcp: TcpConnection) -> _UcxConnection | None:
        """Return a UCX connection; None if the peer has no UCX, or one end cannot reach the other by UCX."""
        peer_offer = await receive_offer(tcp)
        if peer_offer == TCP_ONLY:
            return None
        try:
            endpoint = self._worker.connect(peer_offer.address)
        except TransportError as error:
            _log.warning("UCX cannot reach a peer; weights to it use TCP: %s", error)
            await send_offer(tcp, TCP_ONLY)
            return None
        own_tag, reached = _new_tag(), False
        try:
            await send_offer(tcp, Offer(own_tag, self._worker.address))
            reached = await receive_choice(tcp)
        finally:
            if not reached:
                endpoint.close_blocking(period=_ABORT_NS, max_attempts=1)
        return _UcxConnection(endpoint, tcp, own_tag, peer_offer.tag) if reached else None


def _open_context(trusted_host: str | None, rdma_ports: tuple[str, ...]) -> Any:
    """Return ucxx's context, restricted to permitted devices. Raises ImportError and TransportError."""
    set_defaults()
    try:
        from ucxx._lib.libucxx import UCXContext
    except ImportError as error:
        raise ImportError("the ucx transport needs ucxx: run pip install '.[ucx]' in rrl's clone") from error
    try:
        settings = ucx_limits(os.environ, rdma_ports, interfaces(), trusted_host)
        context = UCXContext({name.removeprefix("UCX_"): value for name, value in settings.items()})
    except Exception as error:  # for example UCX finds no device or no lockable memory
        raise TransportError(f"UCX does not start: {type(error).__name__}: {error}") from error
    available = resources(context.info)
    if trusted_host is None and any(resource.transport == "tcp" for resource in available):
        raise TransportError("UCX enables its TCP transport although UCX_TLS excludes it")
    if trusted_host is None and rdma_ports and not rdma_resources(available, rdma_ports):
        ports = ", ".join(rdma_ports)
        raise TransportError(f"the UCX in use has no RDMA modules for {ports} (docs/rdma.md, routes 1 and 2)")
    return context


def _new_tag() -> int:
    return int.from_bytes(os.urandom(_TAG_BYTES), "little")
