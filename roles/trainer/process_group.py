"""The process group of one trainer incarnation, and the parts of batches that its ranks receive together.

Each incarnation has its own rendezvous, a torch key-value store of rank 0 (:mod:`rrl.roles.worker.rendezvous`). Neither
torch's store nor gloo authenticates its peers. Both listen only at the run's own address, and received data is never
unpickled (:mod:`.exchange`). But a process that reaches this address can list and change the keys of the store, and
read and change the data that ranks exchange. Keys differ between incarnations, so that members of two incarnations
cannot form a group by mistake. All groups are created at the start, because no group can be created once rank 0's store
is gone (docs/sources.md, torch).

Each rank requests its share of a part from the trajectory store (:mod:`rrl.roles.trajectories.partition`): the tokens
of the rank's own trajectories, and the values of all other trajectories that the whole step needs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # torch does not list them
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import rrl

from ...core.phases import WAIT_DATA
from ...core.types import STORE, Incarnation, member_id
from ...transport.messages import Peers
from ..models.policy import blocks
from ..models.tensors import assigned_device
from ..trajectories.batches import Part
from ..worker.connection import Stopping
from ..worker.rendezvous import await_peers, bind_to_address
from . import exchange

_log = logging.getLogger("rrl.trainer")

RENDEZVOUS_TIMEOUT_S = 60.0
"""Timeout (s) of the rendezvous after the last member has joined; until then, the manager's deadlines apply. torch's
own timeouts are unreliable: with a timeout of 5 s, a rendezvous with keys that were used before failed only after 25 s
(docs/sources.md)."""
COLLECTIVE_TIMEOUT_S = 24 * 3600.0
"""Timeout (s) of a collective operation. It is long, because members wait in the operation for a member that still
works or that waits for an unavailable store: a step may take 6 h, and a write 1 h (:mod:`rrl.core.phases`). The manager
detects a hung member much earlier, even if a network drops all packets."""
FENCE_WAIT_S = 10.0
"""Seconds for which a member waits to be fenced after it has lost another member. All survivors fail within 30 ms after
a death. If a survivor exited at once, the manager could mistake the survivor for the member that failed first."""
_CLAIM_POLL_S = 0.02
"""Seconds between two questions whether all members have claimed their GPUs."""
_LOST_MEMBER_TEXTS = (
    "gloo",
    "Gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset",
    "Timed out waiting",
    "Broken pipe",
)
"""Parts of torch's error messages that show the loss of another member, since torch raises plain RuntimeErrors."""

T = TypeVar("T")


class Gang:
    """The ``world`` processes of a trainer, as seen by the process with rank ``rank``.

    A single process (the default) needs no torch.distributed. There are three gloo groups: ``control_group`` for the
    main thread, ``file_group`` for the thread that writes checkpoints, and ``publish_group`` for the thread that
    publishes weights.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
        *,
        mesh: DeviceMesh | None = None,
        host_mesh: DeviceMesh | None = None,
        control_group: dist.ProcessGroup | None = None,
        file_group: dist.ProcessGroup | None = None,
        publish_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")
        self.control_group, self.file_group, self.publish_group = control_group, file_group, publish_group
        self._mesh, self._host_mesh = mesh, host_mesh or mesh

    def shard(self, model: nn.Module, compute_dtype: torch.dtype = torch.float32) -> nn.Module:
        """Shard the parameters over the members (FSDP2), layer by layer.

        Parameters of another dtype than ``compute_dtype`` keep their dtype and are cast for each use; gradients are
        summed in float32.

        Raises:
            ValueError: A parameter has another dtype than ``compute_dtype``, and there is no process group to cast it.
        """
        if self._mesh is None:
            if any(parameter.dtype != compute_dtype for parameter in model.parameters()):
                raise ValueError(
                    f"without a process group every parameter must have the dtype {compute_dtype}, because none is cast"
                )
            return model
        policy = MixedPrecisionPolicy()
        if compute_dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in blocks(model):
            fully_shard(layer, mesh=self._mesh, mp_policy=policy)
        fully_shard(model, mesh=self._mesh, mp_policy=policy)
        return model

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, sharded like the tensor."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor.to("cpu", copy=True)
        return DTensor.from_local(
            tensor.to_local().to("cpu", copy=True),
            self._host_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all members."""
        if self.control_group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control_group)
        return [float(value) for value in total]

    def all(self, mine: bool) -> bool:
        """Return whether ``mine`` is true in all members."""
        return self.sum([float(mine)])[0] == self.world

    def gather(self, mine: T, kind: Any) -> list[T]:
        """Return the value ``mine`` of each member, by rank; ``kind`` is its type (:func:`.exchange.gather`)."""
        return exchange.gather(self.control_group, mine, kind)

    def broadcast_from_rank0(self, do: Callable[[], T], kind: Any) -> T:
        """Call ``do`` on rank 0 only, and return its result in all members; ``kind`` is the type of the result."""
        return exchange.broadcast_from_rank0(self.control_group, self.rank, do, kind)


def init_process_group(
    me: rrl.Worker, compute_dtype: torch.dtype = torch.float32, claim: Callable[[bool], None] | None = None
) -> Gang:
    """Create the process group together with the other members, and return the gang.

    ``claim`` waits until other processes have freed the GPUs of this node. Each member calls it, with whether it is the
    first member of its node. No member uses a GPU before all calls have returned.

    Ends the process if the members do not meet within ``RENDEZVOUS_TIMEOUT_S``, or if this process lacks its assigned
    GPU. A single process needs a group too, unless it computes in float32: its parameters are float32, and only FSDP
    casts them to another dtype.

    Raises:
        Stopping: The manager has requested a stop.
    """
    if me.world == 1 and compute_dtype == torch.float32:
        if claim is not None:
            claim(True)
        return Gang(device=assigned_device(me.launch))
    bind_to_address(me.host)
    first = me.launch.incarnation.gang
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if me.world > 1:
        _await_members(me, first)
    problem = f"the {me.world} members of {first} did not connect within {RENDEZVOUS_TIMEOUT_S:g} s"
    in_time = partial(_exit_after, RENDEZVOUS_TIMEOUT_S, f"{me.launch.incarnation}: {problem}")
    with in_time():
        store = _connect_store() if me.world > 1 else HashStore()
        keys = PrefixStore(_store_prefix(me.keys.secret, first), store)
    if claim is not None:
        _claim_gpus(me, keys, claim)
    device = assigned_device(me.launch)
    with in_time():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=keys, rank=me.rank, world_size=me.world, timeout=timeout)
        control_group, file_group, publish_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(3))
        mesh, host_mesh = (init_device_mesh(kind, (me.world,)) for kind in (device.type, "cpu"))
        dist.barrier(group=control_group)
    return Gang(
        me.rank,
        me.world,
        device,
        mesh=mesh,
        host_mesh=host_mesh,
        control_group=control_group,
        file_group=file_group,
        publish_group=publish_group,
    )


def is_lost_member(error: BaseException) -> bool:
    """Return whether the error means that another member is gone."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST_MEMBER_TEXTS)


@contextmanager
def wait_to_be_fenced(me: rrl.Worker) -> Iterator[None]:
    """Delay an error caused by the loss of another member by up to ``FENCE_WAIT_S``, then raise it again.

    This function is a context manager. The delay gives the manager time to detect the member that failed first, and to
    fence the survivors. The delay ends early if a stop of this process is requested. Other errors are not delayed.
    """
    try:
        yield
    except RuntimeError as error:
        if me.world > 1 and is_lost_member(error):
            _log.error(
                "%s lost the connection to another member of its gang; waiting to be restarted with the whole gang: %s",
                me.launch.incarnation,
                error,
            )
            me.stopping.wait(FENCE_WAIT_S)
        raise


def blocked_on_rank0(me: rrl.Worker, gang: Gang) -> AbstractContextManager[None]:
    """Return a context manager that reports a wait for rank 0 while its block runs; on rank 0 it does nothing.

    The other ranks wait for rank 0 where only rank 0 asks the store: for the newest commit, and to commit.
    """
    return me.blocked_on(me.launch.incarnation.gang.replica) if gang.rank > 0 else nullcontext()


def _claim_gpus(me: rrl.Worker, keys: PrefixStore, claim: Callable[[bool], None]) -> None:
    """Call ``claim`` in all members, and wait for all of them, as long as it takes.

    Raises:
        Stopping: A stop was requested meanwhile.
    """

    def gather(what: str, mine: str) -> list[str]:
        names = [f"{what} {rank}" for rank in range(me.world)]
        keys.set(names[me.rank], mine)
        while not keys.check(names):
            if me.stopping.wait(_CLAIM_POLL_S):
                raise Stopping
        return [keys.get(name).decode() for name in names]

    nodes = gather("node", me.node)
    claim(nodes.index(me.node) == me.rank)
    gather("claimed", me.node)


def _store_prefix(secret: bytes, gang: Incarnation) -> str:
    return hmac.digest(secret, f"gang {gang}".encode(), hashlib.sha256).hex()


def _await_members(me: rrl.Worker, first: Incarnation) -> None:
    """Wait until all members of the gang whose rank 0 is ``first`` have joined; raise Stopping on a stop request."""
    members = {Incarnation(member_id(first.replica, rank), first.number) for rank in range(me.world)}

    def complete(peers: Peers) -> bool | None:
        return {peer.incarnation for peer in peers.peers.values() if peer.joined} >= members or None

    await_peers(me.on_peers, me.stopping, complete)


def _connect_store() -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, None, False, timedelta(seconds=RENDEZVOUS_TIMEOUT_S), wait_for_workers=False)


@contextmanager
def _exit_after(timeout_s: float, message: str) -> Iterator[None]:
    """End the process with a log message if the block takes longer than ``timeout_s`` seconds.

    An exception does not suffice, because it does not interrupt torch's native code.
    """

    def end() -> None:
        _log.critical("%s", message)
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def parts(me: rrl.Worker, gang: Gang, after: int) -> Iterator[Part]:
    """Yield in each member its share of every part that ``me.parts()`` yields. All members must call this function.

    The iteration ends at the same part in all members once any member has received a stop request, although the request
    may reach other members later. A member that has its share waits for the store, which the others still wait for.
    """
    received = me.parts(after, (gang.rank, gang.world), "sequence")
    while True:
        part = next(received, None)
        with me.phase(WAIT_DATA, waits_for=STORE) if gang.world > 1 else nullcontext():
            if not gang.all(part is not None) or part is None:
                return
        yield part
