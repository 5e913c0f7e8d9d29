"""Host memory for the state of one step, and where each tensor of a rank lies in it.

The memory belongs to the agent where it keeps snapshots, and so outlives this process; else to this process. It is one
flat buffer, filled in each step at the speed of a memcpy; files and snapshots are made from it while the next step
runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.types import NodeName
from ..snapshots.client import SnapshotClient
from ..snapshots.format import SnapshotError

_log = logging.getLogger("rrl.trainer")


class HostBuffers:
    """``client``: None where no snapshots are kept. ``own``: how many buffers of its own it takes turns with where the
    agent has none; as many as may be uncommitted. ``buddy`` tells where copies go, if anywhere; ``others`` which other
    nodes' agents may have snapshots of earlier lives, which moved."""

    def __init__(
        self, client: SnapshotClient | None = None, own: int = 1, buddy: Callable[[], str | None] = lambda: None,
        others: Callable[[], Collection[str]] = tuple,
    ) -> None:  # fmt: skip
        self._client, self._buddy, self._others = client, buddy, others
        self._own: list[mmap.mmap | None] = [None] * own
        self._turn = 0
        self._in_agent_memory = False
        """the memory given last is the agent's"""
        self._sending = threading.Lock()
        self._times_sealed = 0
        self._forgotten = False
        self._reported: dict[str, str] = {}

    def prepare(self, nbytes: int) -> None:
        """Have the agent's memory ready, beside the first step."""
        if self._client is not None:
            threading.Thread(target=self._prepare, args=(self._client, nbytes), daemon=True).start()

    def _prepare(self, client: SnapshotClient, nbytes: int) -> None:
        try:
            client.prepare(nbytes)
        except SnapshotError as error:
            self._report_once("keep", error)

    def buffer(self, nbytes: int, step: int) -> memoryview:
        """Writable; not what was given for the step before."""
        self._in_agent_memory = False
        if self._client is not None:
            try:
                given = self._client.buffer(nbytes, step)
            except SnapshotError as error:
                self._report_once("keep", error)
            else:
                self._in_agent_memory = True
                return given
        self._turn = (self._turn + 1) % len(self._own)
        mine = self._own[self._turn]
        if mine is None or len(mine) < nbytes:
            mine = self._own[self._turn] = mmap.mmap(-1, max(1, nbytes))
        return memoryview(mine)[:nbytes]

    def seal(self, step: int, meta: bytes) -> None:
        """The buffer given last holds the whole of ``step``: it counts soon, and a copy of it goes to the buddy."""
        if self._client is not None and self._in_agent_memory:
            self._client.seal(step, meta)
            self._times_sealed += 1
            threading.Thread(target=self._send, args=(self._client,), name="rrl-buddy", daemon=True).start()

    def _send(self, client: SnapshotClient) -> None:
        if not self._sending.acquire(blocking=False):
            return  # the network is slower than the steps: this one is left out
        try:
            client.wait_until_sealed()
            if address := self._buddy():
                client.copy_to(address)
                self._reported.pop("copy", None)
        except SnapshotError as error:
            self._report_once("copy", error)
        finally:
            self._forget_others(client)
            self._sending.release()

    def _forget_others(self, client: SnapshotClient) -> None:
        """Once both snapshots here are this life's, those of earlier ones are of no more use anywhere; the agent of
        this node is told so by ``client``, and the buddy's memory is taken for new copies."""
        if self._forgotten or self._times_sealed < 2:
            return
        self._forgotten = True
        for address in self._others():
            with contextlib.suppress(SnapshotError):  # it keeps them until it ends
                client.forget(address)

    def _report_once(self, operation: str, error: SnapshotError) -> None:
        """Once for each trouble, not in each step: a run goes on without snapshots, from its checkpoints."""
        if self._reported.get(operation) != str(error):
            self._reported[operation] = str(error)
            messages = {"keep": "no snapshot is kept of this step", "copy": "no other node has a copy of the snapshot"}
            _log.warning("%s: %s", messages[operation], error)


def buddy_of(node: NodeName, nodes: Sequence[NodeName], snapshot_servers: Mapping[NodeName, str]) -> str | None:
    """Where the members on ``node`` send their copies: to the next of the gang's ``nodes`` (by rank), or, where it has
    no other one, to the first keeper beside it: a standby's, which may become the trainer."""
    ring = list(dict.fromkeys(nodes))
    at = ring.index(node)
    others = [each for each in (*ring[at + 1 :], *ring[:at]) if each in snapshot_servers]
    beside = sorted(each for each in snapshot_servers if each not in ring)
    return next((snapshot_servers[each] for each in (*others, *beside)), None)


warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to what is read
_ALIGNED = 64
"""bytes: a cache line, and more than any dtype needs"""


class _TensorSlot(Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: memoryview) -> Tensor:
        """A view of its part of the buffer; its storage is that part alone, as torch.save writes whole storages."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset).view(self.shape)


class Layout:
    """Of :meth:`rrl.roles.trainer.learner.Learner.tensors`: of a sharded tensor, this member's shard."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        places, offset = [], 0
        for name, tensor in tensors.items():
            local = shard_of(tensor)
            places.append(_TensorSlot(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), offset))
            offset += -(-local.numel() * local.element_size() // _ALIGNED) * _ALIGNED
        self._places = tuple(places)
        self.nbytes = offset
        self.digest = hashlib.sha256(msgspec.msgpack.encode(self._places)).hexdigest()
        """two buffers with the same one hold the same tensors at the same places"""

    def fill(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for place in self._places:
                place.view(buffer).copy_(shard_of(tensors[place.name]))

    def load(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        """The other way round."""
        with torch.no_grad():
            for name, held in self.views(buffer).items():
                shard_of(tensors[name]).copy_(held)

    def views(self, buffer: memoryview) -> dict[str, Tensor]:
        """What lies there, by name, without copying."""
        return {place.name: place.view(buffer) for place in self._places}


def shard_of(tensor: Tensor) -> Tensor:
    """This member's part of it."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
