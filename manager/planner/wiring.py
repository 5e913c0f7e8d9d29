"""Who may speak to whom, and which holders serve which version: derived from the state, pushed when it changes."""

from __future__ import annotations

from msgspec import Struct

from rrl.manager.state import State, Status, workers
from rrl.spec.words import ReplicaId, Version
from rrl.transport.messages import Holder, Peer, Peers


class Wiring(Struct, frozen=True):
    peers: dict[ReplicaId, Peer]
    newest: Version | None
    holders: tuple[Holder, ...]

    def message(self, epoch: int, seq: int) -> Peers:
        return Peers(epoch, seq, self.peers, self.newest, self.holders)


def wire(state: State) -> Wiring:
    """Every believed life; the newest version that a believed life holds; its holders, the publisher first."""
    believed = [replica for replica in workers(state) if replica.believed]
    peers = {r.id: Peer(r.life, r.listens, r.status is Status.JOINED) for r in believed}
    joined = [r for r in believed if r.status is Status.JOINED and r.serves and r.holds is not None]
    newest = max((r.holds for r in joined if r.holds is not None), default=None)
    holding = sorted((r for r in joined if r.holds == newest), key=lambda r: (r.role != "trainer", r.id))
    holders = tuple(Holder(r.life, r.serves) for r in holding if r.serves)
    return Wiring(peers, newest, holders)
