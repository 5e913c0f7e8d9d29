"""The trainer member's side of snapshots: two buffers in the memory of its node's agent, which outlive the member.

A step's state is copied into the older buffer; the step waits only for this copy. Digest and head are written in the
background. Only then is the snapshot valid, and :meth:`SnapshotClient.buffer` waits until it is.

All methods block, and may be called in any thread that runs no event loop. This module handles only bytes and does not
use torch.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from ...core.types import NodeName, ReplicaId
from ...transport.keys import RunKeys
from ...transport.streams.connection import TransportError
from ...transport.streams.framing import receive_bulk, receive_message, send_bulk
from . import messages as msg
from .connection import LocalAgentClient, checked, remote_agent, retry_while_hung, run_blocking, send_request
from .format import (
    HEAD_AREA_BYTES,
    MAX_META_BYTES,
    PAYLOAD_OFFSET,
    SLOTS,
    Damaged,
    Digest,
    Head,
    SnapshotError,
    SnapshotInfo,
    digest_of,
    next_slot,
)
from .mapping import MappedBuffer, Pinning, Sending, anonymous_memory, map_snapshot


class SnapshotClient:
    """The snapshots of one member (``gang``, ``rank``, ``incarnation``) on ``node``.

    The client connects to the agent on first use. ``pinning`` page-locks the buffers, for a member whose state is on a
    GPU.
    """

    def __init__(
        self,
        run: str,
        node: NodeName,
        keys: RunKeys,
        gang: ReplicaId,
        rank: int,
        incarnation: int,
        pinning: Pinning | None = None,
    ) -> None:
        self._secret, self._pinning = keys.secret, pinning
        self._agent = LocalAgentClient(run, node, keys)
        self._attached_generation = 0
        """Generation of the agent connection (``LocalAgentClient.generation``) that the buffers belong to."""
        self._member = msg.Member(gang, rank, incarnation)
        self._lock = threading.RLock()
        """Guards the buffers."""
        self._buffers: list[MappedBuffer | None] = [None for _ in SLOTS]
        self._handed_out: tuple[int, int] | None = None
        """Slot and size of the view that :meth:`buffer` returned and that is not sealed yet."""
        self._sealing: Future[SnapshotInfo] | None = None
        self._sealed: tuple[MappedBuffer, Head] | None = None
        """Buffer and head of the newest snapshot of this incarnation."""
        self._times_sealed = 0
        self._last_read: tuple[int, int] | None = None
        """Step and incarnation of the snapshot that was read last, from which this incarnation continues."""
        self._sealer = ThreadPoolExecutor(1, "rrl-seal")

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, nbytes: int) -> None:
        """Allocate memory for two snapshots.

        The allocation takes longer than a copy of a snapshot, so it is best done in a separate thread during the first
        step. Raises the same exceptions as :meth:`buffer`.
        """
        for slot in SLOTS:
            with self._lock:
                self._attach()
                self._ensure_buffer(slot, nbytes)

    def buffer(self, nbytes: int, step: int | None = None) -> memoryview:
        """Return writable memory for the snapshot of ``step``.

        The memory is one of two buffers. The snapshot in this buffer becomes invalid. The first rule that applies
        decides which buffer is used:

        - A buffer that was returned and not sealed is returned again.
        - If a buffer is empty, it is used.
        - If steps are repeated, a buffer may have a snapshot of ``step`` or a later step. Such a buffer is used; of two
          such buffers, the one with the later step. If ``step`` is None, this rule never applies.
        - The buffer with the older snapshot is used.

        There is one exception to the last two rules: until the incarnation has sealed its first snapshot, the snapshot
        that it read last is kept, and the other buffer is used. The call waits until the last snapshot is sealed, and
        aborts a copy to another node that still reads from the buffer.

        Raises:
            SnapshotError: No agent can be reached, or memory is not available (the checkpoint then uses private
                memory).
            Fenced: A newer incarnation exists.
        """
        self.wait_until_sealed()
        with self._lock:
            self._attach()
            heads = [buffer.head if buffer is not None else None for buffer in self._buffers]
            slot = self._handed_out[0] if self._handed_out else self._next_slot(heads, 2**63 if step is None else step)
            mapped = self._ensure_buffer(slot, nbytes)
            mapped.invalidate()
            if self._sealed is not None and self._sealed[0] is mapped:
                self._sealed = None
            self._handed_out = slot, nbytes
            return mapped.view[PAYLOAD_OFFSET : PAYLOAD_OFFSET + nbytes]

    def _next_slot(self, heads: list[Head | None], step: int) -> int:
        slot = next_slot(heads, step)
        head = heads[slot]
        needed = head is not None and not self._times_sealed and (head.step, head.incarnation) == self._last_read
        return next(other for other in SLOTS if other != slot) if needed else slot

    def seal(self, step: int, meta: bytes = b"") -> Future[SnapshotInfo]:
        """Declare that the view of :meth:`buffer` contains the complete state of ``step``.

        Returns at once; the future is done when the snapshot is valid. Until then the view must not be written to.

        Raises:
            ValueError: No view was returned since the last seal, or ``meta`` exceeds ``MAX_META_BYTES``.
        """
        if len(meta) > MAX_META_BYTES:
            raise ValueError(f"meta has {len(meta)} bytes, but at most {MAX_META_BYTES} are allowed")
        with self._lock:
            if self._handed_out is None:
                raise ValueError("nothing to seal: call buffer() before each seal()")
            (slot, nbytes), self._handed_out = self._handed_out, None
            mapped = self._buffers[slot]
            assert mapped is not None
            self._sealing = self._sealer.submit(self._seal, mapped, step, meta, nbytes)
            return self._sealing

    def wait_until_sealed(self) -> None:
        """Wait until the snapshot that was sealed last is valid.

        If every rank of a gang calls it before the last collective of each step, there is always a step of which all
        ranks have a snapshot.
        """
        if self._sealing is not None:
            with contextlib.suppress(Exception):  # reported through the future
                self._sealing.result()

    def _seal(self, mapped: MappedBuffer, step: int, meta: bytes, nbytes: int) -> SnapshotInfo:
        with mapped.view[PAYLOAD_OFFSET : PAYLOAD_OFFSET + nbytes] as payload:
            digest = digest_of(meta, payload)
        mapped.view[HEAD_AREA_BYTES : HEAD_AREA_BYTES + len(meta)] = meta
        heads = [head for buffer in self._buffers if buffer is not None and (head := buffer.head) is not None]
        sequence = 1 + max((head.sequence for head in heads), default=0)
        head = Head(sequence, step, self._member.incarnation, nbytes, len(meta), digest)
        mapped.commit(head)
        with self._lock:
            self._sealed = mapped, head
        self._times_sealed += 1
        if self._times_sealed == len(SLOTS):  # all buffers are now of this incarnation
            threading.Thread(target=self._forget_locally, name="rrl-forget", daemon=True).start()
        return self._snapshot_info(head, own=True)

    # ── copies on other nodes ──────────────────────────────────────────────────────────────────────────────────────
    def copy_to(self, address: str) -> SnapshotInfo:
        """Copy the newest snapshot of this incarnation to the agent of another node; return once the copy is valid.

        ``address`` is one of ``Peers.snapshot_servers``.

        Raises:
            SnapshotError: There is no sealed snapshot; or the agent cannot be reached, refuses the copy or does not
                answer; or the copy was aborted, because the next snapshot needs the buffer.
            Fenced: A newer incarnation exists.
        """
        self.wait_until_sealed()
        with self._lock:
            if self._sealed is None:
                raise SnapshotError("this process has not completed a snapshot yet, so there is none to copy")
            mapped, head = self._sealed
            sending = Sending()
            mapped.sendings.add(sending)
        try:
            return run_blocking(address, self._send(address, mapped, head, sending))
        except SnapshotError:
            if sending.cancelled:
                raise SnapshotError(
                    f"the copy of the snapshot of step {head.step} was aborted, because the next snapshot needs its"
                    " memory"
                ) from None
            raise
        finally:
            mapped.sendings.discard(sending)
            sending.ended.set()

    async def _send(self, address: str, mapped: MappedBuffer, head: Head, sending: Sending) -> SnapshotInfo:
        snapshot = self._snapshot_info(head, own=False)
        async with remote_agent(address, self._secret) as connection:
            sending.begin(connection)
            answer = await send_request(connection, msg.Upload(self._member, snapshot, head.meta))
            if not isinstance(answer, msg.SnapshotList):  # otherwise the agent has the snapshot already
                with (
                    mapped.view[HEAD_AREA_BYTES : HEAD_AREA_BYTES + head.meta] as meta,
                    mapped.view[PAYLOAD_OFFSET : PAYLOAD_OFFSET + head.nbytes] as payload,
                ):
                    await send_bulk(connection, meta)
                    await send_bulk(connection, payload)
                checked(await receive_message(connection, msg.Answer))
        return snapshot

    def forget(self, address: str) -> None:
        """Make an agent drop the snapshots that earlier incarnations stored there for this rank.

        Used for nodes that the rank has left, once all ranks have complete snapshots of this incarnation.

        Raises:
            SnapshotError: The agent does not answer.
        """
        self._call_remote(address, msg.Forget(self._member))

    def _forget_locally(self) -> None:
        with contextlib.suppress(SnapshotError):
            self._agent.call(msg.Forget(self._member))

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────
    def list_snapshots(self, address: str | None = None) -> list[SnapshotInfo]:
        """Return the gang's snapshots of all ranks on this node's agent or on the agent at ``address``, newest first.

        The heads of the snapshots are valid; only a read verifies the bytes. The agent refuses earlier incarnations
        from now on.

        Raises:
            SnapshotError: The agent does not answer.
            Fenced: A newer incarnation exists.
        """
        if address is None:
            answer, _ = self._agent.call(msg.ListSnapshots(self._member), retry=True)
        else:
            answer = retry_while_hung(lambda: self._call_remote(address, msg.ListSnapshots(self._member)))
        return list(answer.snapshots) if isinstance(answer, msg.SnapshotList) else []

    def read(self, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        """Return the writer's metadata and the bytes of a snapshot on this node, verified.

        The bytes are in the agent's memory, and valid until :meth:`buffer` returns the same buffer again.

        Raises:
            Damaged: The bytes do not match the digest.
            SnapshotError: The snapshot cannot be read for another reason.
        """
        _, fds = self._agent.call(msg.MapSnapshot(self._member, snapshot), retry=True)
        meta, payload = map_snapshot(fds[0], snapshot)
        if digest_of(meta, payload) != snapshot.digest:
            raise Damaged(f"{snapshot} is damaged: its bytes do not match its digest")
        self._last_read = snapshot.order
        return meta, payload

    def fetch(self, address: str, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        """Return the writer's metadata and the bytes of another node's snapshot, verified, in memory of this process.

        Raises:
            Damaged: The bytes do not match the digest.
            SnapshotError: The snapshot cannot be fetched for another reason.
        """
        return retry_while_hung(lambda: run_blocking(address, self._fetch(address, snapshot)))

    async def _fetch(self, address: str, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        async with remote_agent(address, self._secret) as connection:
            answer = await send_request(connection, msg.Download(self._member, snapshot))
            if not isinstance(answer, msg.SnapshotFound) or answer.meta > MAX_META_BYTES:
                raise TransportError(f"the agent sent an unexpected answer: {answer}")
            meta, payload = bytearray(answer.meta), anonymous_memory(snapshot.nbytes)
            await receive_bulk(connection, memoryview(meta), lambda chunk: None)
            digest = Digest(meta)
            await receive_bulk(connection, payload, digest.add)
        if digest.value() != snapshot.digest:
            raise Damaged(f"{snapshot} was received damaged from {address}: its bytes do not match its digest")
        self._last_read = snapshot.order
        return bytes(meta), payload

    # ── the agent of this node ─────────────────────────────────────────────────────────────────────────────────────
    def _attach(self) -> None:
        """Map the buffers of this node's agent, unless they are already mapped on the same connection to the agent."""
        if self._attached_generation == self._agent.generation and self._agent.is_connected:
            return
        self._release_buffers()
        granted, fds = self._agent.call(msg.Attach(self._member))
        assert isinstance(granted, msg.BuffersGranted)
        self._attached_generation = self._agent.generation
        for (slot, capacity), fd in zip(granted.slots, fds, strict=True):
            self._buffers[slot] = MappedBuffer(fd, capacity, self._pinning)

    def _ensure_buffer(self, slot: int, nbytes: int) -> MappedBuffer:
        mapped = self._buffers[slot]
        if mapped is None or mapped.capacity < nbytes:
            granted, fds = self._agent.call(msg.Resize(self._member, slot, nbytes))
            assert isinstance(granted, msg.BuffersGranted)
            self._release_buffer(slot)
            mapped = self._buffers[slot] = MappedBuffer(fds[0], granted.slots[0][1], self._pinning)
        mapped.prefault()
        return mapped

    def _release_buffers(self) -> None:
        self._handed_out = None
        for slot in SLOTS:
            self._release_buffer(slot)

    def _release_buffer(self, slot: int) -> None:
        mapped, self._buffers[slot] = self._buffers[slot], None
        if mapped is not None:
            if self._sealed is not None and self._sealed[0] is mapped:
                self._sealed = None
            mapped.close()

    def close(self) -> None:
        """Release the buffers; sealed snapshots stay in the agent. May be repeated."""
        self._sealer.shutdown()
        with self._lock:
            self._release_buffers()
        self._agent.close()

    def _call_remote(self, address: str, request: msg.Request) -> msg.Answer:
        async def call() -> msg.Answer:
            async with remote_agent(address, self._secret) as connection:
                return await send_request(connection, request)

        return run_blocking(address, call())

    def _snapshot_info(self, head: Head, own: bool) -> SnapshotInfo:
        member = self._member
        return SnapshotInfo(member.gang, member.rank, head.step, head.incarnation, head.nbytes, head.digest, own)
