"""The UCX transport, on ucxx: the fast one where UCX has RDMA; over TCP it equals the plain TCP transport.

Settings and rules were measured (docs/sources.md, UCX): thread progress with Python futures (everything else spins a
core); endpoint error handling always on (without it a dead peer hangs its survivor); an abort before a buffer is given
up (else UCX goes on writing into freed memory); deadlines of our own everywhere (UCX never notices a stopped peer).

UCX's own listener is not used: it binds 0.0.0.0, authenticates nobody, and keeps a descriptor for good of each
connection that sends it garbage. A connection begins at a TCP port of ours instead. Both ends prove there that they
know the run's secret, then exchange the addresses of their UCX workers, and each makes an endpoint from what it
received. The TCP connection stays open beside the endpoint: when it ends, the endpoint is closed. UCX alone notices a
killed peer only at its next keepalive (20 s, measured over shared memory and TCP).

The end that dials makes a worker for each connection. UCX pairs the endpoints of two workers by counting them on each
side; after an attempt that failed on one side only, the counts differ for good, and an endpoint would receive what was
sent to another one, whose buffer may have been freed. A worker costs 2 to 13 ms, two threads and five descriptors.

An end that has no UCX, or whose UCX does not reach the other one, continues over the TCP connection. So ``tcp`` and
``ucx`` understand each other, and nodes of one run may differ.

Each UCX worker also listens at TCP ports of its own for as long as it exists. Nothing authenticates there: that is why
UCX uses TCP on trusted networks only (docs/sites.md). UCX drops garbage; a connection that sends nothing keeps a
descriptor for good, and such connections are closed here.
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

from ..address import interfaces
from ..tcp_inspection import accepted_connections, bytes_received, listening_addresses, shut_down
from .base import CONNECT_TIMEOUT_S, Connection, TransportError, authenticate, deadline
from .offers import TCP_ONLY, Offer, receive_choice, receive_offer, send_choice, send_offer
from .protocol import Acceptor, WeightClient, WeightServer
from .store import WeightStore
from .tcp import TcpConnection, dial, listen
from .ucx_settings import rdma_resources, resources, set_defaults, ucx_limits

MIN_HELLO_BYTES = 42
"""what a peer says first (magic number and connection request, UCX 1.21 over IPv4; measured), within milliseconds"""
SILENT_TIMEOUT_S = 5.0
"""s that a connection may have said less than that"""
MAX_SILENT_CONNECTIONS = 64
"""such connections at once, at most; the oldest go first"""
_SILENT_POLL_S = 1.0
"""s between two looks; one costs 10 us for each descriptor of the process"""


async def close_silent_connections(ports: Callable[[], frozenset[int]]) -> None:
    """Until cancelled. ``ports``: those at which UCX listens now."""
    silent_since: dict[tuple[int, int], float] = {}
    while True:
        now = asyncio.get_running_loop().time()
        silent = [each for each in accepted_connections(ports()).items() if _is_silent(each[0])]
        silent_since = {
            each: silent_since.get(each, now) for each in silent
        }  # (a descriptor, whose port it is at) → since when
        oldest_first = sorted(silent_since, key=lambda each: silent_since[each])
        surplus = max(0, len(silent_since) - MAX_SILENT_CONNECTIONS)
        for number, each in enumerate(oldest_first):
            if number < surplus or now - silent_since[each] >= SILENT_TIMEOUT_S:
                shut_down(*each)
        await asyncio.sleep(_SILENT_POLL_S)


def _is_silent(fd: int) -> bool:
    said = bytes_received(fd)
    return said is not None and said < MIN_HELLO_BYTES  # of whom nobody can tell: it may be a member, and is left alone


_TAG_BYTES = 8
_ABORT_NS = 10**10
"""how long an abort may wait for UCX's progress thread; measured 0 to 2 ms"""
_EPOLL_TIMEOUT_MS = 1
"""ucxx's own value: how long the progress thread sleeps at most"""

_log = logging.getLogger("rrl.weights")


class _Worker:
    """A UCX worker with ucxx's two threads: one makes progress, the other completes the futures of the running loop.

    ucxx's ApplicationContext does the same, but leaves a reference to its worker in the loop: it is never freed.
    """

    def __init__(self, context: Any) -> None:
        from ucxx._lib.libucxx import UCXAddress, UCXWorker
        from ucxx._lib_async.continuous_ucx_progress import _create_context
        from ucxx._lib_async.notifier_thread import _notifierThread

        before = listening_addresses()
        self.core: Any = UCXWorker(context, enable_delayed_submission=True, enable_python_future=True)
        self.address: bytes = UCXAddress.create_from_worker(self.core).tobytes()
        self.ports = frozenset(at for at in listening_addresses() - before if at[1].to_bytes(2, "big") in self.address)
        """(address, port) that this worker listens at. Others may have opened some meanwhile: its own it names"""
        self._notifier_queue: Queue[str] = Queue()
        orders = (asyncio.get_running_loop(), self.core, self._notifier_queue)
        self._notifier = threading.Thread(target=_notifierThread, args=orders, name="UCX notifier")
        self._notifier.start()
        self.core.set_progress_thread_start_callback(_create_context)
        self.core.start_progress_thread(polling_mode=False, epoll_timeout=_EPOLL_TIMEOUT_MS)

    def connect(self, address: bytes) -> Any:
        """An endpoint to the worker of that address. Raises PipeError where UCX does not reach it."""
        from ucxx._lib.libucxx import UCXAddress, UCXEndpoint

        try:
            return UCXEndpoint.create_from_worker_address(self.core, UCXAddress.create_from_buffer(address), True)
        except Exception as error:  # ucxx raises a family of its own, RuntimeError and MemoryError
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Blocks until both threads have ended, which the notifier does only while the loop runs; measured 0.5 ms."""
        self._notifier_queue.put("shutdown")
        self.core.stop_request_notifier_thread()
        self._notifier.join()
        self.core.stop_progress_thread()
        self.core = None
        self.ports = frozenset()


class _UcxConnection:
    """An endpoint, and the TCP connection that it began with. Tag messages keep their boundaries: each receive matches
    one send of the same length.

    ``dispose`` is called once the line has been aborted and no operation is under way: the worker that it ends is what
    completes their futures."""

    def __init__(
        self, endpoint: Any, tcp: TcpConnection, own_tag: int, peer_tag: int, dispose: Callable[[], None] = lambda: None
    ) -> None:
        self._endpoint = endpoint
        self._tcp = tcp
        self._own_tag, self._peer_tag = own_tag, peer_tag
        self._dispose = dispose
        self._aborted = False
        self._under_way = 0
        self._tcp_watch = asyncio.get_running_loop().create_task(self._until_tcp_ends())

    async def open(self) -> None:
        """Nothing is left to agree on."""

    async def send(self, data: bytes | memoryview) -> None:
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if len(data):
            await self._run(lambda: self._endpoint.tag_send(Array(data), Tag(self._peer_tag)))

    async def receive(self, into: memoryview) -> None:
        from ucxx._lib.arr import Array
        from ucxx.types import Tag

        if into.nbytes:
            await self._run(lambda: self._endpoint.tag_recv(Array(into), Tag(self._own_tag)))

    async def _run(self, start: Callable[[], Any]) -> None:
        """One operation. However it fails, the endpoint is closed before anybody can let go of the buffer."""
        if self._aborted:
            raise TransportError("the connection was aborted")
        self._under_way += 1
        try:
            self._endpoint.raise_on_error()
            request = start()
            await request.wait()
        except Exception as error:  # ucxx raises a family of its own, RuntimeError and MemoryError
            self.abort()
            # ucxx never lets go of a failed request's future: through it, every frame passed would keep its buffers
            error.__traceback__ = None
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error
        except BaseException:  # cancelled
            self.abort()
            raise
        finally:
            self._under_way -= 1
            self._dispose_once_idle()
        if self._aborted:
            raise TransportError("the connection was aborted")

    def _dispose_once_idle(self) -> None:
        if self._aborted and not self._under_way:
            self._dispose()

    async def _until_tcp_ends(self) -> None:
        try:
            await self._tcp.receive(memoryview(bytearray(1)))
        except TransportError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._endpoint.close_blocking(period=_ABORT_NS, max_attempts=1)
            self._endpoint.remove_close_callback()
            self._endpoint = None
            self._tcp.abort()
            self._dispose_once_idle()

    @property
    def broken(self) -> bool:
        return self._aborted or not self._endpoint.alive


class UcxTransport:
    """See :class:`rrl.transport.weights.base.Pipe`. Addresses are ``ucx://host:port``.

    ``trusted_host``: the address at which UCX's TCP transport may listen; None: UCX may not use TCP, and must have a
    transport for one of ``rdma_ports`` unless there are none.
    To be made in the loop that uses it, and to be closed: else ucxx's notifier threads keep the process from ending,
    unless that loop runs in a daemon thread. Raises ImportError when ucxx is not installed, and PipeError when UCX
    finds nothing that it may use, or listens anywhere else than it was told to.
    """

    kind = "ucx"

    def __init__(self, secret: bytes, trusted_host: str | None, rdma_ports: tuple[str, ...] = ()) -> None:
        self._secret = secret
        self._trusted_host = trusted_host
        self._context = _open_context(trusted_host, rdma_ports)
        self._client = client = WeightClient(self._dial, secret)
        self.manifest, self.fetch, self.disconnect = client.manifest, client.fetch, client.disconnect
        self._workers: set[_Worker] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._listening_worker: _Worker | None = self._new_worker()
        """the worker of all connections that others dialled"""
        self._served: list[tuple[_UcxListener, WeightServer]] = []
        self._closed = False
        self._guard = asyncio.get_running_loop().create_task(close_silent_connections(self.ports))

    def ports(self) -> frozenset[int]:
        """TCP ports that UCX listens at. Nobody has to prove anything there."""
        return frozenset(port for worker in self._workers for _, port in worker.ports)

    async def serve(self, store: WeightStore, host: str) -> str:
        assert self._listening_worker is not None
        weight_server = WeightServer(store, self._secret)
        listener = _UcxListener(self._secret, self._listening_worker, weight_server)
        self._served.append((listener, weight_server))
        return f"ucx://{host}:{await listener.open(host)}"

    async def close(self) -> None:
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
        gc.collect()  # ucxx's objects hang in reference cycles

    def _new_worker(self) -> _Worker:
        """Raises PipeError."""
        try:
            worker = _Worker(self._context)
        except Exception as error:  # no descriptor, no memory that may be locked ...
            raise TransportError(f"ucx: {type(error).__name__}: {error}") from error
        self._workers.add(worker)
        if astray := sorted(at for at in worker.ports if at[0] != self._trusted_host):
            self._close_worker(worker)
            where = ", ".join(f"{address}:{port}" for address, port in astray)
            raise TransportError(f"UCX listens at {where}; it may only at {self._trusted_host or 'no port'}")
        return worker

    def _close_worker(self, worker: _Worker) -> None:
        """Once; without waiting for its threads."""
        if worker in self._workers:
            self._workers.remove(worker)
            ending = asyncio.get_running_loop().create_task(asyncio.to_thread(worker.close))
            self._closing.add(ending)
            ending.add_done_callback(self._closing.discard)

    async def _dial(self, address: str) -> Connection:
        tcp = await dial(address, ("ucx", "tcp"))
        if address.startswith("tcp:"):
            return tcp
        await authenticate(tcp, self._secret, dialled=True)
        if self._closed:
            tcp.abort()
            raise TransportError("the pipe is closed")
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
        """None where one end does not reach the other by UCX."""
        own_tag = _new_tag()
        with deadline(tcp, CONNECT_TIMEOUT_S):
            await send_offer(tcp, Offer(own_tag, worker.address))
            peer_offer = await receive_offer(tcp)
            endpoint = None
            if peer_offer != TCP_ONLY:
                try:
                    endpoint = worker.connect(peer_offer.address)
                except TransportError as error:
                    _log.warning("UCX does not reach %s, weights from there come over TCP: %s", address, error)
                await send_choice(tcp, endpoint is not None)
            if endpoint is None:
                return None
            return _UcxConnection(endpoint, tcp, own_tag, peer_offer.tag, lambda: self._close_worker(worker))


class _UcxListener:
    """The TCP port where connections begin: who proves itself there is served, over UCX where both ends can."""

    def __init__(self, secret: bytes, worker: _Worker, weight_server: WeightServer) -> None:
        self._worker = worker
        self._weight_server = weight_server
        self._acceptor = Acceptor(secret, self._serve)
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """Returns the port."""
        self._server, port = await listen(self._acceptor.accept, host)
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._acceptor.close()

    async def _serve(self, tcp: Connection) -> None:
        assert isinstance(tcp, TcpConnection)
        with deadline(tcp, CONNECT_TIMEOUT_S):
            connection = await self._connect_ucx(tcp)
        await self._weight_server.accept(connection or tcp)

    async def _connect_ucx(self, tcp: TcpConnection) -> _UcxConnection | None:
        """None where one end does not reach the other by UCX, or has none."""
        peer_offer = await receive_offer(tcp)
        if peer_offer == TCP_ONLY:
            return None
        try:
            endpoint = self._worker.connect(peer_offer.address)
        except TransportError as error:
            _log.warning("UCX does not reach a peer, weights go there over TCP: %s", error)
            await send_offer(tcp, TCP_ONLY)
            return None
        own_tag, joined = _new_tag(), False
        try:
            await send_offer(tcp, Offer(own_tag, self._worker.address))
            joined = await receive_choice(tcp)
        finally:
            if not joined:
                endpoint.close_blocking(period=_ABORT_NS, max_attempts=1)
        return _UcxConnection(endpoint, tcp, own_tag, peer_offer.tag) if joined else None


def _open_context(trusted_host: str | None, rdma_ports: tuple[str, ...]) -> Any:
    """ucxx's context, kept to what it may use. Raises ImportError and PipeError."""
    set_defaults()
    try:
        from ucxx._lib.libucxx import UCXContext
    except ImportError as error:
        raise ImportError("the ucx pipe needs ucxx: pip install '.[ucx]' in rrl's clone") from error
    try:
        settings = ucx_limits(os.environ, rdma_ports, interfaces(), trusted_host)
        context = UCXContext({name.removeprefix("UCX_"): value for name, value in settings.items()})
    except Exception as error:  # ValueError, and UCX finds no device, no memory that it may lock ...
        raise TransportError(f"UCX does not start: {type(error).__name__}: {error}") from error
    available = resources(context.info)
    if trusted_host is None and any(one.transport == "tcp" for one in available):
        raise TransportError("UCX keeps its TCP transport although it was told not to")
    if trusted_host is None and rdma_ports and not rdma_resources(available, rdma_ports):
        raise TransportError(f"this UCX has no transport for {', '.join(rdma_ports)} (docs/rdma.md, routes 1 and 2)")
    return context


def _new_tag() -> int:
    return int.from_bytes(os.urandom(_TAG_BYTES), "little")
