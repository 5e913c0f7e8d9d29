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
from ...transport.streams.framing import hear, receive_bulk, send_bulk
from ...transport.weights.base import PipeError
from . import messages as msg
from .connection import OwnAgent, ask, checked, other_agent, patiently, run
from .format import HEAD_ROOM, META_ROOM, PAYLOAD, Damaged, Digest, Head, Kept, SnapshotError, digest_of, turn
from .mapping import Mapped, Sending, lent, private


class SnapshotClient:
    """Of one member (``gang``, ``rank``) of this ``incarnation`` on ``node``. Connects when it is first needed."""

    def __init__(
        self, run: str, node: NodeName, keys: RunKeys, gang: ReplicaId, rank: int, incarnation: int
    ) -> None:  # fmt: skip
        self._secret = keys.secret
        self._agent = OwnAgent(run, node, keys)
        self._met = 0
        """which agent the buffers are of"""
        self._who = msg.Who(gang, rank, incarnation)
        self._lock = threading.RLock()
        """of the buffers"""
        self._buffers: list[Mapped | None] = [None, None]
        self._handed_out: tuple[int, int] | None = None
        """slot and bytes of the view that is not sealed"""
        self._sealing: Future[Kept] | None = None
        self._sealed: tuple[Mapped, Head] | None = None
        """the newest, of this life"""
        self._times_sealed = 0
        self._read: tuple[int, int] | None = None
        """step and incarnation of what was had last: what this life goes on from"""
        self._sealer = ThreadPoolExecutor(1, "rrl-seal")

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, nbytes: int) -> None:
        """Have memory for two snapshots ready, which takes longer than copying them: best in a thread of its own while
        the first step computes. Raises as :meth:`buffer` does."""
        for slot in (0, 1):
            with self._lock:
                self._attach()
                self._ready(slot, nbytes)

    def buffer(self, nbytes: int, step: int | None = None) -> memoryview:
        """Writable memory for the next snapshot (of ``step``): the older of two buffers, whose snapshot no longer
        counts; where a life does steps anew, rather the one of the later step, and before its first snapshot is sealed
        never the one that it has read last. A view that was had and not sealed is had again.

        Waits until the last snapshot is sealed, and ends a sending that still reads from this buffer. Raises
        SnapshotError: no agent is reached, or there is no room (then a copy in private memory does for the checkpoint);
        Fenced.
        """
        self.settle()
        with self._lock:
            self._attach()
            heads = [each.head if each is not None else None for each in self._buffers]
            slot = self._handed_out[0] if self._handed_out else self._turn(heads, 2**63 if step is None else step)
            mapped = self._ready(slot, nbytes)
            mapped.begin()
            if self._sealed is not None and self._sealed[0] is mapped:
                self._sealed = None
            self._handed_out = slot, nbytes
            return mapped.view[PAYLOAD : PAYLOAD + nbytes]

    def _turn(self, heads: list[Head | None], step: int) -> int:
        slot = turn(heads, step)
        head = heads[slot]
        needed = head is not None and not self._times_sealed and (head.step, head.incarnation) == self._read
        return 1 - slot if needed else slot

    def seal(self, step: int, meta: bytes = b"") -> Future[Kept]:
        """The view of :meth:`buffer` holds all of ``step`` now. Returns at once; the result is there when the snapshot
        counts. Until then nobody may write to the view.

        Raises ValueError: no view was had since the last one, or ``meta`` is longer than ``META_ROOM``.
        """
        if len(meta) > META_ROOM:
            raise ValueError(f"{len(meta)} bytes of meta; {META_ROOM} are the most")
        with self._lock:
            if self._handed_out is None:
                raise ValueError("nothing to seal: no view of a buffer was had since the last one")
            (slot, nbytes), self._handed_out = self._handed_out, None
            mapped = self._buffers[slot]
            assert mapped is not None
            self._sealing = self._sealer.submit(self._seal, mapped, step, meta, nbytes)
            return self._sealing

    def settle(self) -> None:
        """Wait until what was sealed last counts. A gang whose ranks all do so before the last collective of each step
        has, at any time, a step that all of them keep."""
        if self._sealing is not None:
            with contextlib.suppress(Exception):  # whoever has the future hears of it
                self._sealing.result()

    def _seal(self, mapped: Mapped, step: int, meta: bytes, nbytes: int) -> Kept:
        with mapped.view[PAYLOAD : PAYLOAD + nbytes] as payload:
            digest = digest_of(meta, payload)
        mapped.view[HEAD_ROOM : HEAD_ROOM + len(meta)] = meta
        heads = [head for each in self._buffers if each is not None and (head := each.head) is not None]
        sequence = 1 + max((head.sequence for head in heads), default=0)
        head = Head(sequence, step, self._who.incarnation, nbytes, len(meta), digest)
        mapped.seal(head)
        with self._lock:
            self._sealed = mapped, head
        self._times_sealed += 1
        if self._times_sealed == 2:  # both are this life's: what earlier ones left of it here is of no more use
            threading.Thread(target=self._forget_here, name="rrl-forget", daemon=True).start()
        return self._kept(head, own=True)

    # ── copies on other nodes ──────────────────────────────────────────────────────────────────────────────────────
    def copy_to(self, address: str) -> Kept:
        """Send the newest snapshot of this life to another node's agent (``Peers.keepers``); returns once it counts
        there. Raises SnapshotError: nothing is sealed yet, the agent is not reached, refuses or hangs, or the next
        snapshot needed the buffer; Fenced."""
        self.settle()
        with self._lock:
            if self._sealed is None:
                raise SnapshotError("no snapshot is sealed yet")
            mapped, head = self._sealed
            sending = Sending()
            mapped.sendings.add(sending)
        try:
            return run(address, self._send(address, mapped, head, sending))
        except SnapshotError:
            if sending.over:
                raise SnapshotError(f"step {head.step} was not copied in time: its memory is needed again") from None
            raise
        finally:
            mapped.sendings.discard(sending)
            sending.ended.set()

    async def _send(self, address: str, mapped: Mapped, head: Head, sending: Sending) -> Kept:
        kept = self._kept(head, own=False)
        async with other_agent(address, self._secret) as line:
            sending.begin(line)
            answer = await ask(line, msg.Put(self._who, kept, head.meta))
            if not isinstance(answer, msg.Listed):  # it had it already
                with (
                    mapped.view[HEAD_ROOM : HEAD_ROOM + head.meta] as meta,
                    mapped.view[PAYLOAD : PAYLOAD + head.nbytes] as payload,
                ):
                    await send_bulk(line, meta)
                    await send_bulk(line, payload)
                checked(await hear(line, msg.Answer))
        return kept

    def forget(self, address: str) -> None:
        """An agent lets go of what earlier lives left of this rank there: for nodes that it has moved away from, once
        all ranks have complete snapshots of this life. Raises SnapshotError."""
        self._ask_there(address, msg.Forget(self._who))

    def _forget_here(self) -> None:
        with contextlib.suppress(SnapshotError):
            self._agent.ask(msg.Forget(self._who))

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────
    def available(self, address: str | None = None) -> list[Kept]:
        """The gang's snapshots of all ranks that this node's agent, or the one at ``address``, keeps; newest first.
        They have good heads; that their bytes are whole is known when they are read. From then on that agent takes
        nothing from earlier lives. Raises SnapshotError, Fenced."""
        if address is None:
            answer, _ = self._agent.ask(msg.Ask(self._who), patient=True)
        else:
            answer = patiently(lambda: self._ask_there(address, msg.Ask(self._who)))
        return list(answer.kept) if isinstance(answer, msg.Listed) else []

    def read(self, kept: Kept) -> tuple[bytes, memoryview]:
        """A snapshot on this node, verified: its meta and its bytes, which lie in the agent's memory: good until
        :meth:`buffer` gives it out again. Raises Damaged, another SnapshotError."""
        _, fds = self._agent.ask(msg.Lend(self._who, kept), patient=True)
        meta, payload = lent(fds[0], kept)
        if digest_of(meta, payload) != kept.digest:
            raise Damaged(f"{kept} is damaged: its bytes are not those that were sealed")
        self._read = kept.order
        return meta, payload

    def fetch(self, address: str, kept: Kept) -> tuple[bytes, memoryview]:
        """A snapshot from another node's agent, verified: its meta and its bytes, in memory of this process. Raises
        Damaged, another SnapshotError."""
        return patiently(lambda: run(address, self._fetch(address, kept)))

    async def _fetch(self, address: str, kept: Kept) -> tuple[bytes, memoryview]:
        async with other_agent(address, self._secret) as line:
            answer = await ask(line, msg.Get(self._who, kept))
            if not isinstance(answer, msg.Here) or answer.meta > META_ROOM:
                raise PipeError(f"an answer that was not asked for: {answer}")
            meta, payload = bytearray(answer.meta), private(kept.nbytes)
            await receive_bulk(line, memoryview(meta), lambda chunk: None)
            digest = Digest(meta)
            await receive_bulk(line, payload, digest.add)
        if digest.value() != kept.digest:
            raise Damaged(f"{kept} came damaged from {address}")
        self._read = kept.order
        return bytes(meta), payload

    # ── the agent of this node ─────────────────────────────────────────────────────────────────────────────────────
    def _attach(self) -> None:
        """Have the buffers of this node's agent: of the one that is there now, should it have changed."""
        if self._met == self._agent.met and self._agent.there:
            return
        self._let_go()
        granted, fds = self._agent.ask(msg.Attach(self._who))
        assert isinstance(granted, msg.Granted)
        self._met = self._agent.met
        for (slot, room), fd in zip(granted.slots, fds, strict=True):
            self._buffers[slot] = Mapped(fd, room)

    def _ready(self, slot: int, nbytes: int) -> Mapped:
        mapped = self._buffers[slot]
        if mapped is None or mapped.room < nbytes:
            granted, fds = self._agent.ask(msg.Grow(self._who, slot, nbytes))
            assert isinstance(granted, msg.Granted)
            self._drop(slot)
            mapped = self._buffers[slot] = Mapped(fds[0], granted.slots[0][1])
        mapped.warm()
        return mapped

    def _let_go(self) -> None:
        self._handed_out = None
        for slot in (0, 1):
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        mapped, self._buffers[slot] = self._buffers[slot], None
        if mapped is not None:
            if self._sealed is not None and self._sealed[0] is mapped:
                self._sealed = None
            mapped.close()

    def close(self) -> None:
        """What is sealed stays with the agent. Repeatable."""
        self._sealer.shutdown()
        with self._lock:
            self._let_go()
        self._agent.close()

    def _ask_there(self, address: str, request: msg.Request) -> msg.Answer:
        async def asked() -> msg.Answer:
            async with other_agent(address, self._secret) as line:
                return await ask(line, request)

        return run(address, asked())

    def _kept(self, head: Head, own: bool) -> Kept:
        who = self._who
        return Kept(who.gang, who.rank, head.step, head.incarnation, head.nbytes, head.digest, own)
