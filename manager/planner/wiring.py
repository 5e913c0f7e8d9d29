"""Who may speak to whom, and which holders serve which version: derived from the state, pushed when it changes."""

from __future__ import annotations

from msgspec import Struct

from rrl.manager.state import State, Status, workers
from rrl.spec.words import SHADOW, NodeName, ReplicaId, Version
from rrl.transport.messages import Holder, Peer, Peers


class Wiring(Struct, frozen=True):
    peers: dict[ReplicaId, Peer]
    newest: Version | None
    holders: tuple[Holder, ...]
    keepers: dict[NodeName, str] = {}

    def message(self, epoch: int, seq: int) -> Peers:
        return Peers(epoch, seq, self.peers, self.newest, self.holders, self.keepers)


def wire(state: State) -> Wiring:
    """Every believed life, members and all; the newest version that one of them holds; its holders, the publisher
    first; who keeps snapshots."""
    believed = [replica for replica in workers(state) if replica.believed]
    peers = {r.id: Peer(r.life, r.listens, r.status is Status.JOINED) for r in believed}
    joined = [r for r in believed if r.status is Status.JOINED and r.serves and r.holds is not None]
    newest = max((r.holds for r in joined if r.holds is not None), default=None)
    holding = sorted((r for r in joined if r.holds == newest), key=lambda r: (r.role != "trainer", r.id))
    holders = tuple(Holder(r.life, r.serves) for r in holding if r.serves)
    return Wiring(peers, newest, holders, _keepers(state))


def _keepers(state: State) -> dict[NodeName, str]:
    """Where snapshots are, or can be put: the nodes of the trainer, also while it is down, and those where it may go
    on at once."""
    trainers = {role.name for role in state.job.kind("trainer")}
    nodes = {one.node or one.prefer for one in state.replicas.values()
             if one.role in trainers or (one.role == SHADOW and one.believed)}  # fmt: skip
    kept = (state.nodes[node] for node in nodes if node in state.nodes)
    return {node.name: node.keeps for node in sorted(kept, key=lambda node: node.name)
            if node.keeps and node.excluded is None}  # fmt: skip
