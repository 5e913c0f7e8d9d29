"""A member's side of snapshots: two buffers in the memory of its node's agent, so that they outlive the member.

A step's state is copied into the older buffer, which is all that the step waits for. The digest and the head are
written in the background: from then on the snapshot counts, and :meth:`SnapshotClient.buffer` waits for that.

Everything blocks, and may be called in any thread that runs no loop of its own. No torch here: bytes only.
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
    Damaged,
    Digest,
    Head,
    SnapshotError,
    SnapshotInfo,
    digest_of,
    next_slot,
)
from .mapping import MappedBuffer, Sending, anonymous_memory, map_snapshot


class SnapshotClient:
    """Of one member (``gang``, ``rank``) of this ``incarnation`` on ``node``. Connects when it is first needed."""

    def __init__(
        self, run: str, node: NodeName, keys: RunKeys, gang: ReplicaId, rank: int, incarnation: int
    ) -> None:  # fmt: skip
        self._secret = keys.secret
        self._agent = LocalAgentClient(run, node, keys)
        self._attached_generation = 0
        """which agent the buffers are of"""
        self._member = msg.Member(gang, rank, incarnation)
        self._lock = threading.RLock()
        """of the buffers"""
        self._buffers: list[MappedBuffer | None] = [None, None]
        self._handed_out: tuple[int, int] | None = None
        """slot and bytes of the view that is not sealed"""
        self._sealing: Future[SnapshotInfo] | None = None
        self._sealed: tuple[MappedBuffer, Head] | None = None
        """the newest, of this life"""
        self._times_sealed = 0
        self._last_read: tuple[int, int] | None = None
        """step and incarnation of what was had last: what this life goes on from"""
        self._sealer = ThreadPoolExecutor(1, "rrl-seal")

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, nbytes: int) -> None:
        """Have memory for two snapshots ready, which takes longer than copying them: best in a thread of its own while
        the first step computes. Raises as :meth:`buffer` does."""
        for slot in (0, 1):
            with self._lock:
                self._attach()
                self._ensure_buffer(slot, nbytes)

    def buffer(self, nbytes: int, step: int | None = None) -> memoryview:
        """Writable memory for the next snapshot (of ``step``): the older of two buffers, whose snapshot no longer
        counts; where a life does steps anew, rather the one of the later step, and before its first snapshot is sealed
        never the one that it has read last. A view that was had and not sealed is had again.

        Waits until the last snapshot is sealed, and ends a sending that still reads from this buffer. Raises
        SnapshotError: no agent is reached, or there is no room (then a copy in private memory does for the checkpoint);
        Fenced.
        """
        self.wait_until_sealed()
        with self._lock:
            self._attach()
            heads = [each.head if each is not None else None for each in self._buffers]
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
        return 1 - slot if needed else slot

    def seal(self, step: int, meta: bytes = b"") -> Future[SnapshotInfo]:
        """The view of :meth:`buffer` holds all of ``step`` now. Returns at once; the result is there when the snapshot
        counts. Until then nobody may write to the view.

        Raises ValueError: no view was had since the last one, or ``meta`` is longer than ``META_ROOM``.
        """
        if len(meta) > MAX_META_BYTES:
            raise ValueError(f"{len(meta)} bytes of meta; {MAX_META_BYTES} are the most")
        with self._lock:
            if self._handed_out is None:
                raise ValueError("nothing to seal: no view of a buffer was had since the last one")
            (slot, nbytes), self._handed_out = self._handed_out, None
            mapped = self._buffers[slot]
            assert mapped is not None
            self._sealing = self._sealer.submit(self._seal, mapped, step, meta, nbytes)
            return self._sealing

    def wait_until_sealed(self) -> None:
        """Wait until what was sealed last counts. A gang whose ranks all do so before the last collective of each step
        has, at any time, a step that all of them keep."""
        if self._sealing is not None:
            with contextlib.suppress(Exception):  # whoever has the future hears of it
                self._sealing.result()

    def _seal(self, mapped: MappedBuffer, step: int, meta: bytes, nbytes: int) -> SnapshotInfo:
        with mapped.view[PAYLOAD_OFFSET : PAYLOAD_OFFSET + nbytes] as payload:
            digest = digest_of(meta, payload)
        mapped.view[HEAD_AREA_BYTES : HEAD_AREA_BYTES + len(meta)] = meta
        heads = [head for each in self._buffers if each is not None and (head := each.head) is not None]
        sequence = 1 + max((head.sequence for head in heads), default=0)
        head = Head(sequence, step, self._member.incarnation, nbytes, len(meta), digest)
        mapped.commit(head)
        with self._lock:
            self._sealed = mapped, head
        self._times_sealed += 1
        if self._times_sealed == 2:  # both are this life's: what earlier ones left of it here is of no more use
            threading.Thread(target=self._forget_locally, name="rrl-forget", daemon=True).start()
        return self._snapshot_info(head, own=True)

    # ── copies on other nodes ──────────────────────────────────────────────────────────────────────────────────────
    def copy_to(self, address: str) -> SnapshotInfo:
        """Send the newest snapshot of this life to another node's agent (``Peers.keepers``); returns once it counts
        there. Raises SnapshotError: nothing is sealed yet, the agent is not reached, refuses or hangs, or the next
        snapshot needed the buffer; Fenced."""
        self.wait_until_sealed()
        with self._lock:
            if self._sealed is None:
                raise SnapshotError("no snapshot is sealed yet")
            mapped, head = self._sealed
            sending = Sending()
            mapped.sendings.add(sending)
        try:
            return run_blocking(address, self._send(address, mapped, head, sending))
        except SnapshotError:
            if sending.cancelled:
                raise SnapshotError(f"step {head.step} was not copied in time: its memory is needed again") from None
            raise
        finally:
            mapped.sendings.discard(sending)
            sending.ended.set()

    async def _send(self, address: str, mapped: MappedBuffer, head: Head, sending: Sending) -> SnapshotInfo:
        snapshot = self._snapshot_info(head, own=False)
        async with remote_agent(address, self._secret) as connection:
            sending.begin(connection)
            answer = await send_request(connection, msg.Upload(self._member, snapshot, head.meta))
            if not isinstance(answer, msg.SnapshotList):  # it had it already
                with (
                    mapped.view[HEAD_AREA_BYTES : HEAD_AREA_BYTES + head.meta] as meta,
                    mapped.view[PAYLOAD_OFFSET : PAYLOAD_OFFSET + head.nbytes] as payload,
                ):
                    await send_bulk(connection, meta)
                    await send_bulk(connection, payload)
                checked(await receive_message(connection, msg.Answer))
        return snapshot

    def forget(self, address: str) -> None:
        """An agent lets go of what earlier lives left of this rank there: for nodes that it has moved away from, once
        all ranks have complete snapshots of this life. Raises SnapshotError."""
        self._call_remote(address, msg.Forget(self._member))

    def _forget_locally(self) -> None:
        with contextlib.suppress(SnapshotError):
            self._agent.call(msg.Forget(self._member))

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────
    def list_snapshots(self, address: str | None = None) -> list[SnapshotInfo]:
        """The gang's snapshots of all ranks that this node's agent, or the one at ``address``, keeps; newest first.
        They have good heads; that their bytes are whole is known when they are read. From then on that agent takes
        nothing from earlier lives. Raises SnapshotError, Fenced."""
        if address is None:
            answer, _ = self._agent.call(msg.ListSnapshots(self._member), retry=True)
        else:
            answer = retry_while_hung(lambda: self._call_remote(address, msg.ListSnapshots(self._member)))
        return list(answer.snapshots) if isinstance(answer, msg.SnapshotList) else []

    def read(self, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        """A snapshot on this node, verified: its meta and its bytes, which lie in the agent's memory: good until
        :meth:`buffer` gives it out again. Raises Damaged, another SnapshotError."""
        _, fds = self._agent.call(msg.MapSnapshot(self._member, snapshot), retry=True)
        meta, payload = map_snapshot(fds[0], snapshot)
        if digest_of(meta, payload) != snapshot.digest:
            raise Damaged(f"{snapshot} is damaged: its bytes are not those that were sealed")
        self._last_read = snapshot.order
        return meta, payload

    def fetch(self, address: str, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        """A snapshot from another node's agent, verified: its meta and its bytes, in memory of this process. Raises
        Damaged, another SnapshotError."""
        return retry_while_hung(lambda: run_blocking(address, self._fetch(address, snapshot)))

    async def _fetch(self, address: str, snapshot: SnapshotInfo) -> tuple[bytes, memoryview]:
        async with remote_agent(address, self._secret) as connection:
            answer = await send_request(connection, msg.Download(self._member, snapshot))
            if not isinstance(answer, msg.SnapshotFound) or answer.meta > MAX_META_BYTES:
                raise TransportError(f"an answer that was not asked for: {answer}")
            meta, payload = bytearray(answer.meta), anonymous_memory(snapshot.nbytes)
            await receive_bulk(connection, memoryview(meta), lambda chunk: None)
            digest = Digest(meta)
            await receive_bulk(connection, payload, digest.add)
        if digest.value() != snapshot.digest:
            raise Damaged(f"{snapshot} came damaged from {address}")
        self._last_read = snapshot.order
        return bytes(meta), payload

    # ── the agent of this node ─────────────────────────────────────────────────────────────────────────────────────
    def _attach(self) -> None:
        """Have the buffers of this node's agent: of the one that is there now, should it have changed."""
        if self._attached_generation == self._agent.generation and self._agent.is_connected:
            return
        self._release_buffers()
        granted, fds = self._agent.call(msg.Attach(self._member))
        assert isinstance(granted, msg.BuffersGranted)
        self._attached_generation = self._agent.generation
        for (slot, capacity), fd in zip(granted.slots, fds, strict=True):
            self._buffers[slot] = MappedBuffer(fd, capacity)

    def _ensure_buffer(self, slot: int, nbytes: int) -> MappedBuffer:
        mapped = self._buffers[slot]
        if mapped is None or mapped.capacity < nbytes:
            granted, fds = self._agent.call(msg.Resize(self._member, slot, nbytes))
            assert isinstance(granted, msg.BuffersGranted)
            self._release_buffer(slot)
            mapped = self._buffers[slot] = MappedBuffer(fds[0], granted.slots[0][1])
        mapped.prefault()
        return mapped

    def _release_buffers(self) -> None:
        self._handed_out = None
        for slot in (0, 1):
            self._release_buffer(slot)

    def _release_buffer(self, slot: int) -> None:
        mapped, self._buffers[slot] = self._buffers[slot], None
        if mapped is not None:
            if self._sealed is not None and self._sealed[0] is mapped:
                self._sealed = None
            mapped.close()

    def close(self) -> None:
        """What is sealed stays with the agent. Repeatable."""
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
