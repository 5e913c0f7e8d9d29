"""Who may speak to whom, and which holders serve which version: derived from the state, pushed when it changes."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ...core.types import SHADOW, TRAINER, NodeName, ReplicaId, Version, natural, role_of, stands_for
from ...transport.messages import Holder, Peer, Peers
from ..model.queries import workers
from ..model.state import State, Status

_PUBLISHER = role_of(TRAINER)


class Wiring(Struct, frozen=True):
    peers: dict[ReplicaId, Peer]
    newest: Version | None
    holders: tuple[Holder, ...]
    keepers: dict[NodeName, str] = {}

    @property
    def urgent(self) -> Wiring:
        """All but what each holder holds: who receives looks at that when it begins or has lost its source, and is
        told all of it with its Welcome."""
        return replace(self, holders=tuple(replace(one, holds=None) for one in self.holders))

    def message(self, epoch: int, seq: int) -> Peers:
        return Peers(epoch, seq, self.peers, self.newest, self.holders, self.keepers)


def wire(state: State) -> Wiring:
    """Every believed life, members and all; the newest version that one of them holds; who serves weights, the
    publisher first, then the receivers in the order of their names; who keeps snapshots.

    A trainer that has published nothing yet is nobody to ask, and of a gang only the first member publishes."""
    believed = [replica for replica in workers(state) if replica.believed]
    peers = {r.id: Peer(r.life, r.listens, r.status is Status.JOINED) for r in believed}
    serving = [r for r in believed if r.status is Status.JOINED and r.serves]
    newest = max((r.holds for r in serving if r.holds is not None), default=None)
    told = sorted(serving, key=lambda r: (r.role != _PUBLISHER, natural(r.id)))
    holders = tuple(Holder(r.life, r.serves, r.holds) for r in told
                    if r.serves and (r.holds is not None or r.role != _PUBLISHER))  # fmt: skip
    return Wiring(peers, newest, holders, _keepers(state))


def _keepers(state: State) -> dict[NodeName, str]:
    """Where snapshots are, or can be put: the nodes of the trainer, also while it is down, and those where it may go
    on at once."""
    trainers = {role.name for role in state.job.kind("trainer")}
    nodes = {one.node or one.prefer for one in state.replicas.values()
             if one.role in trainers
             or (one.role == SHADOW and one.believed and stands_for(one.id) in trainers)}  # fmt: skip
    kept = (state.nodes[node] for node in nodes if node in state.nodes)
    return {node.name: node.keeps for node in sorted(kept, key=lambda node: node.name)
            if node.keeps and node.excluded is None}  # fmt: skip
