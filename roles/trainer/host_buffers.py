"""Host memory for the state of one step, and the positions of a rank's tensors in this memory.

If the node's agent stores snapshots, the memory belongs to the agent and outlives this process; otherwise it belongs to
this process. The memory for a step is one flat buffer, which is filled at the speed of a memcpy, or from a GPU at the
speed of PCIe (:class:`PinnedMemory`). Files and snapshots are made from the buffer while the next step runs.
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
from ..snapshots.format import SLOTS, SnapshotError
from ..snapshots.mapping import Pinning

_log = logging.getLogger("rrl.trainer")

_CUDA_SUCCESS = 0
"""Return code of CUDA's runtime."""


class HostBuffers:
    """Host memory for steps, in the agent or in this process.

    Args:
        client: Client of the agent's snapshot server; None if no snapshots are stored.
        own: Number of this process's own buffers, which are used in turn if the agent provides none. It must equal the
            number of steps that the trainer may complete while a checkpoint is written.
        buddy: Returns the address of the agent on another node that receives copies (the buddy); None if there is none.
        others: Returns the addresses of other nodes' agents that may have snapshots of earlier incarnations.
        pinning: Page-locks this process's own buffers, if the state is on a GPU; ``client`` page-locks the agent's
            buffers.
    """

    def __init__(
        self,
        client: SnapshotClient | None = None,
        own: int = 1,
        buddy: Callable[[], str | None] = lambda: None,
        others: Callable[[], Collection[str]] = tuple,
        pinning: Pinning | None = None,
    ) -> None:
        self._client, self._buddy, self._others, self._pinning = client, buddy, others, pinning
        self._own: list[mmap.mmap | None] = [None] * own
        self._turn = 0
        self._in_agent_memory = False
        """True if :meth:`buffer` last returned memory of the agent."""
        self._sending = threading.Lock()
        self._times_sealed = 0
        self._forgotten = False
        self._reported: dict[str, str] = {}

    def prepare(self, nbytes: int) -> None:
        """Allocate the agent's memory in a thread of its own, during the first step."""
        if self._client is not None:
            threading.Thread(target=self._prepare, args=(self._client, nbytes), daemon=True).start()

    def _prepare(self, client: SnapshotClient, nbytes: int) -> None:
        try:
            client.prepare(nbytes)
        except SnapshotError as error:
            self._report_once("store", error)

    def buffer(self, nbytes: int, step: int) -> memoryview:
        """Return writable memory for the state of ``step``; no checkpoint is being written from this memory."""
        self._in_agent_memory = False
        if self._client is not None:
            try:
                agent_memory = self._client.buffer(nbytes, step)
            except SnapshotError as error:
                self._report_once("store", error)
            else:
                self._in_agent_memory = True
                return agent_memory
        self._turn = (self._turn + 1) % len(self._own)
        own = self._own[self._turn]
        if own is None or len(own) < nbytes:
            if own is not None and self._pinning is not None:
                self._pinning.unpin(memoryview(own))
            own = self._own[self._turn] = mmap.mmap(-1, max(1, nbytes))
            if self._pinning is not None:
                self._pinning.pin(memoryview(own))
        return memoryview(own)[:nbytes]

    def seal(self, step: int, meta: bytes) -> None:
        """Turn the memory that :meth:`buffer` returned last into a snapshot, and start to copy it to the buddy.

        The memory must contain the complete state of ``step``. ``meta`` is the description that is stored with the
        snapshot. If the memory does not belong to the agent, this method does nothing.
        """
        if self._client is not None and self._in_agent_memory:
            self._client.seal(step, meta)
            self._times_sealed += 1
            threading.Thread(target=self._send, args=(self._client,), name="rrl-buddy", daemon=True).start()

    def _send(self, client: SnapshotClient) -> None:
        if not self._sending.acquire(blocking=False):
            return  # the network is slower than the steps: this step is not copied
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
        """Request that other nodes drop this rank's snapshots of earlier incarnations.

        The requests are sent once all snapshot buffers of this node's agent contain steps of this incarnation. The
        buddy gets no request, because new copies overwrite its buffers. ``client`` sends the requests.
        """
        if self._forgotten or self._times_sealed < len(SLOTS):
            return
        self._forgotten = True
        for address in self._others():
            with contextlib.suppress(SnapshotError):  # if this fails, that agent keeps the snapshots until it ends
                client.forget(address)

    def _report_once(self, operation: str, error: SnapshotError) -> None:
        """Log an error, unless it equals the last error of the same operation; the run continues without snapshots."""
        if self._reported.get(operation) != str(error):
            self._reported[operation] = str(error)
            messages = {
                "store": "this step has no snapshot, so a restart may have to read the last checkpoint",
                "copy": "the snapshot was not copied to another node, so it is lost if this node fails",
            }
            _log.warning("%s: %s", messages[operation], error)


def buddy_of(node: NodeName, nodes: Sequence[NodeName], snapshot_servers: Mapping[NodeName, str]) -> str | None:
    """Return the address of the agent to which the members on ``node`` send their copies; None if there is none.

    The gang's ``nodes`` form a ring in the order of ranks. The agent is on the first node after ``node`` in this ring
    that has a snapshot server. If no other node of the gang has one, the agent is on the first node outside of the gang
    (by name) that has one, because a standby on that node may become the trainer.
    """
    ring = list(dict.fromkeys(nodes))
    index = ring.index(node)
    others = [peer for peer in (*ring[index + 1 :], *ring[:index]) if peer in snapshot_servers]
    outside = sorted(peer for peer in snapshot_servers if peer not in ring)
    return next((snapshot_servers[peer] for peer in (*others, *outside)), None)


class PinnedMemory:
    """Page-locks host memory, so that a GPU copies into it at the speed of PCIe. Used only where the role has a GPU.

    Measured on one NVIDIA H200 (PCIe 5.0 x16, torch 2.11) with 8.6 GB in 328 tensors and memory that is shared with the
    agent: a step waits 0.64 s for the copy into pageable memory, and 0.16 s for the copy into page-locked memory.
    Page-locking takes 0.40 s for each buffer; for the agent's buffers this happens in the background of the first step.

    Memory must be unpinned before it is unmapped. Otherwise CUDA would treat new memory at the same address as
    page-locked, and would copy into the pages of the old memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Number of bytes by address."""
        self._failed = False

    def pin(self, memory: memoryview) -> None:
        """Page-lock writable memory, unless it is page-locked already.

        If CUDA refuses, the memory stays pageable, and the first refusal is logged.
        """
        address = _address(memory)
        with self._lock:
            if self._sizes.get(address) == memory.nbytes:
                return
            self._unpin(address)
            code = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
            if code == _CUDA_SUCCESS:
                self._sizes[address] = memory.nbytes
            elif not self._failed:
                self._failed = True
                _log.warning(
                    "CUDA cannot page-lock %.0f MB of host memory (cudaHostRegister: error %d): steps wait longer for"
                    " the copy of their state",
                    memory.nbytes / 1e6,
                    code,
                )

    def unpin(self, memory: memoryview) -> None:
        """Make memory pageable again, before it is unmapped."""
        with self._lock:
            self._unpin(_address(memory))

    def _unpin(self, address: int) -> None:
        if self._sizes.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


warnings.filterwarnings("ignore", message="The given buffer is not writable")  # its tensors are only read
_ALIGNMENT_BYTES = 64
"""Alignment of each tensor in bytes: a cache line, and more than any dtype needs."""


class _TensorSlot(Struct, frozen=True):
    """Position of one tensor in a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: memoryview) -> Tensor:
        """Return the tensor as a view of its part of the buffer only, because torch.save writes whole storages."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset).view(self.shape)


class Layout:
    """Positions of :meth:`.learner.Learner.tensors` in a buffer, which contains only this member's shards."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        slots, offset = [], 0
        for name, tensor in tensors.items():
            local = shard_of(tensor)
            slots.append(_TensorSlot(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), offset))
            offset += -(-local.numel() * local.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._slots = tuple(slots)
        self.nbytes = offset
        self.digest = hashlib.sha256(msgspec.msgpack.encode(self._slots)).hexdigest()
        """Digest of the positions. Buffers with the same digest have the same tensors at the same positions."""

    def fill(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into the buffer; return once the copy is complete."""
        devices = set()
        with torch.no_grad():
            for slot in self._slots:
                shard = shard_of(tensors[slot.name])
                slot.view(buffer).copy_(shard, non_blocking=True)  # copies overlap only in page-locked memory
                devices.add(shard.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def load(self, buffer: memoryview, tensors: Mapping[str, Tensor]) -> None:
        """Copy the buffer into the tensors."""
        with torch.no_grad():
            for name, view in self.views(buffer).items():
                shard_of(tensors[name]).copy_(view)

    def views(self, buffer: memoryview) -> dict[str, Tensor]:
        """Return the tensors in the buffer by name, without a copy."""
        return {slot.name: slot.view(buffer) for slot in self._slots}


def shard_of(tensor: Tensor) -> Tensor:
    """Return this member's shard of a tensor; the tensor itself if it is not sharded."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
