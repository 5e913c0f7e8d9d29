"""Who may speak to whom, and which holders serve which version: derived from the state, pushed when it changes."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ...core.types import (
    STANDBY_ROLE,
    TRAINER,
    NodeName,
    ReplicaId,
    Version,
    natural_sort_key,
    role_of,
    standby_role_of,
)
from ...transport.messages import Peer, Peers, WeightSource
from ..model.queries import workers
from ..model.state import State, Status

_PUBLISHER = role_of(TRAINER)


class PeerDirectory(Struct, frozen=True):
    peers: dict[ReplicaId, Peer]
    newest: Version | None
    sources: tuple[WeightSource, ...]
    snapshot_servers: dict[NodeName, str] = {}

    @property
    def without_versions(self) -> PeerDirectory:
        """All but what each holder holds: who receives looks at that when it begins or has lost its source, and is
        told all of it with its Welcome."""
        return replace(self, sources=tuple(replace(one, version=None) for one in self.sources))

    def message(self, epoch: int, seq: int) -> Peers:
        return Peers(epoch, seq, self.peers, self.newest, self.sources, self.snapshot_servers)


def build_directory(state: State) -> PeerDirectory:
    """Every believed life, members and all; the newest version that one of them holds; who serves weights, the
    publisher first, then the receivers in the order of their names; who keeps snapshots.

    A trainer that has published nothing yet is nobody to ask, and of a gang only the first member publishes."""
    current = [replica for replica in workers(state) if replica.is_current]
    peers = {r.id: Peer(r.incarnation, r.listen_address, r.status is Status.JOINED) for r in current}
    serving = [r for r in current if r.status is Status.JOINED and r.weight_address]
    newest = max((r.weight_version for r in serving if r.weight_version is not None), default=None)
    servers = sorted(serving, key=lambda r: (r.role != _PUBLISHER, natural_sort_key(r.id)))
    sources = tuple(WeightSource(r.incarnation, r.weight_address, r.weight_version) for r in servers
                    if r.weight_address and (r.weight_version is not None or r.role != _PUBLISHER))  # fmt: skip
    return PeerDirectory(peers, newest, sources, _snapshot_servers(state))


def _snapshot_servers(state: State) -> dict[NodeName, str]:
    """Where snapshots are, or can be put: the nodes of the trainer, also while it is down, and those where it may go
    on at once."""
    trainers = {role.name for role in state.job.kind("trainer")}
    nodes = {one.node or one.preferred_node for one in state.replicas.values()
             if one.role in trainers
             or (one.role == STANDBY_ROLE and one.is_current and standby_role_of(one.id) in trainers)}  # fmt: skip
    candidates = (state.nodes[node] for node in nodes if node in state.nodes)
    return {node.name: node.snapshot_address for node in sorted(candidates, key=lambda node: node.name)
            if node.snapshot_address and node.excluded is None}  # fmt: skip
