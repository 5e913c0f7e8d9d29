"""The rendezvous of torch.distributed among the ranks of one incarnation, prepared as torchrun prepares it.

Rank 0 opens a key-value store of torch and reports its address through the manager; the other ranks wait for this
address. Afterwards each rank has the variables from which ``torch.distributed.init_process_group()`` and accelerate
read where they meet. torch is imported for this only if a replica has several ranks (and torch is installed).

Neither torch's store nor gloo authenticates its peers. Both listen only at the run's own address: rrl binds the store's
socket, since torch would bind every interface. Rank 0's ``init_process_group()`` would then host a second store at the
same port, but torch shares the server of a ``multi_tenant`` store among all stores of a process with its port.
TORCHELASTIC_USE_AGENT_STORE, by which torchrun makes rank 0 a client, is not set: it would also apply to every other
store that the program or a child of it opens (an engine of vLLM), and nobody would serve that one.

Each incarnation has a store, and so a port, of its own. Its members have this port from the manager, and the store ends
with rank 0, so a rank of an earlier incarnation does not reach the members of the newer one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from ...core.role_environment import RENDEZVOUS_VARIABLES
from ...transport.address import NoAddress, interfaces
from ...transport.messages import Peers
from .connection import ManagerConnection, Stopping

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

_TORCHRUN_ENV = "TORCHELASTIC_RUN_ID"
"""Variable of the processes that torchrun has started, which meet at a store of torchrun."""
_LOOPBACK = "127.0.0.1"
_STOP_POLL_S = 0.2
"""Seconds between two checks whether the manager has requested a stop."""

T = TypeVar("T")


def prepare(connection: ManagerConnection, built_in: bool) -> TCPStore | None:
    """Set the variables of torch.distributed for this rank, and return the store if this process has to keep it open.

    Nothing is set for processes that torchrun has started, for programs without torch, and for single processes that
    have not imported torch yet or are rrl's own (``built_in``).

    Raises:
        Stopping: A stop was requested while this rank waited for rank 0.
        NoAddress: No interface has the run's address.
    """
    single = connection.world == 1
    if _TORCHRUN_ENV in os.environ or (single and built_in):
        return None
    if "torch" not in sys.modules and (single or find_spec("torch") is None):
        return None
    bind_to_address(connection.host)
    store, host = None, _LOOPBACK if single else connection.host
    if connection.rank == 0:
        store, port = open_store(host, connection.world)
        if not single:
            connection.announce_rendezvous(f"tcp://{host}:{port}")
    else:
        host, port = _await_rank0(connection)
    local_rank, local_world = 0, 1  # a rank sees no GPUs but its own
    values = connection.rank, connection.world, local_rank, local_world, host, port
    os.environ.update(zip(RENDEZVOUS_VARIABLES, map(str, values), strict=True))
    return store


def bind_to_address(address: str) -> None:
    """Make gloo and NCCL listen at the run's own address, by setting their interface variables.

    Variables that the job's environment sets are not changed.

    Raises:
        NoAddress: No interface has the address, so that gloo would choose an interface by itself.
    """
    name = next((interface.name for interface in interfaces() if interface.address == address), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        raise NoAddress(f"no interface of this node has the address {address}, at which the ranks must meet")


def open_store(host: str, world: int) -> tuple[TCPStore, int]:
    """Open torch's store on a bound socket of this process, and return it with its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # programs without torch never come here

    with socket.create_server((host, 0), backlog=max(128, world)) as listening:
        port = int(listening.getsockname()[1])
        fd = os.dup(listening.fileno())
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    return store, port


def await_peers(
    on_peers: Callable[[Callable[[Peers], None]], None], stopping: threading.Event, find: Callable[[Peers], T | None]
) -> T:
    """Wait until ``find`` returns something for the newest peer directory, and return it.

    ``on_peers`` and ``stopping`` are those of the worker. Raises Stopping if a stop is requested first.
    """
    found: list[T] = []
    complete = threading.Event()

    def check(peers: Peers) -> None:
        if not found and (result := find(peers)) is not None:
            found.append(result)
            complete.set()

    on_peers(check)
    while not complete.wait(_STOP_POLL_S):
        if stopping.is_set():
            raise Stopping
    return found[0]


def _await_rank0(connection: ManagerConnection) -> tuple[str, int]:
    """Return the host and the port of rank 0's store; meanwhile this process reports that it waits for rank 0."""
    first = connection.launch.incarnation.gang

    def address(peers: Peers) -> str | None:
        peer = peers.peers.get(first.replica)
        return peer.rendezvous_address if peer is not None and peer.incarnation == first else None

    with connection.status.blocked_on_replica(first.replica):
        found = await_peers(connection.on_peers, connection.stopping, address)
    host, _, port = found.removeprefix("tcp://").rpartition(":")
    return host, int(port)
