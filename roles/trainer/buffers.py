"""Host memory for a step's state: the agent's where it keeps snapshots, which outlives this process, else its own."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.shape import SnapshotError
from rrl.spec.words import NodeName


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
        self._kept_by_agent = False
        """the memory given last is the agent's"""
        self._sending = threading.Lock()
        self._times_sealed = 0
        self._forgotten = False
        self._told: dict[str, str] = {}

    def prepare(self, nbytes: int) -> None:
        """Have the agent's memory ready, beside the first step."""
        if self._client is not None:
            threading.Thread(target=self._prepare, args=(self._client, nbytes), daemon=True).start()

    def _prepare(self, client: SnapshotClient, nbytes: int) -> None:
        try:
            client.prepare(nbytes)
        except SnapshotError as error:
            self._say("keep", error)

    def buffer(self, nbytes: int, step: int) -> memoryview:
        """Writable; not what was given for the step before."""
        self._kept_by_agent = False
        if self._client is not None:
            try:
                given = self._client.buffer(nbytes, step)
            except SnapshotError as error:
                self._say("keep", error)
            else:
                self._kept_by_agent = True
                return given
        self._turn = (self._turn + 1) % len(self._own)
        mine = self._own[self._turn]
        if mine is None or len(mine) < nbytes:
            mine = self._own[self._turn] = mmap.mmap(-1, max(1, nbytes))
        return memoryview(mine)[:nbytes]

    def seal(self, step: int, meta: bytes) -> None:
        """The buffer given last holds the whole of ``step``: it counts soon, and a copy of it goes to the buddy."""
        if self._client is not None and self._kept_by_agent:
            self._client.seal(step, meta)
            self._times_sealed += 1
            threading.Thread(target=self._send, args=(self._client,), name="rrl-buddy", daemon=True).start()

    def _send(self, client: SnapshotClient) -> None:
        if not self._sending.acquire(blocking=False):
            return  # the network is slower than the steps: this one is left out
        try:
            client.settle()
            if address := self._buddy():
                client.copy_to(address)
                self._told.pop("copy", None)
        except SnapshotError as error:
            self._say("copy", error)
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

    def _say(self, what: str, error: SnapshotError) -> None:
        """Once for each trouble, not in each step: a run goes on without snapshots, from its checkpoints."""
        if self._told.get(what) != str(error):
            self._told[what] = str(error)
            told = {"keep": "no snapshot is kept of this step", "copy": "no copy of the snapshot is at another node"}
            print(f"rrl: {told[what]}: {error}", file=sys.stderr, flush=True)


def buddy_of(node: NodeName, nodes: Sequence[NodeName], keepers: Mapping[NodeName, str]) -> str | None:
    """Where the members on ``node`` send their copies: to the next of the gang's ``nodes`` (by rank), or, where it has
    no other one, to the first keeper beside it: a standby's, which may become the trainer."""
    ring = list(dict.fromkeys(nodes))
    at = ring.index(node)
    others = [each for each in (*ring[at + 1 :], *ring[:at]) if each in keepers]
    beside = sorted(each for each in keepers if each not in ring)
    return next((keepers[each] for each in (*others, *beside)), None)
