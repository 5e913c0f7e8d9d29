"""The peer directory: the address of every process and the sources of each weight version, derived from the state.

The manager sends it to all processes whenever it changes.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ...core.types import STANDBY_ROLE, NodeName, ReplicaId, Version, is_trainer, natural_sort_key, standby_role_of
from ...transport.messages import Peer, Peers, WeightSource
from ..model.state import Replica, State, Status


class PeerDirectory(Struct, frozen=True):
    """Addresses of the current incarnations, weight sources and snapshot servers."""

    peers: dict[ReplicaId, Peer]
    newest: Version | None
    """Newest weight version that a source holds."""
    sources: tuple[WeightSource, ...]
    snapshot_servers: dict[NodeName, str] = {}
    evaluated: int = -1
    """Newest step whose evaluation is in the state; -1 if there is none."""

    @property
    def without_versions(self) -> PeerDirectory:
        """Return a copy without the version of each source.

        If two directories differ only in these versions, the newer directory is announced with a longer delay. A
        receiver needs the versions only when it begins to receive or has lost its source; the Welcome contains them.
        """
        return replace(self, sources=tuple(replace(source, version=None) for source in self.sources))

    def message(self, epoch: int, seq: int) -> Peers:
        """Return the directory as a message, with the manager's epoch and the number of the announcement (``seq``)."""
        return Peers(epoch, seq, self.peers, self.newest, self.sources, self.snapshot_servers, self.evaluated)


def build_directory(state: State) -> PeerDirectory:
    """Return the directory of all current incarnations, and of a trainer that still finishes its step.

    Weight sources are ordered: the publisher first, then the receivers in natural order of their names. A trainer that
    has not published a version yet is not a source. In a gang only the first member publishes.
    """
    current = [replica for replica in state.workers if replica.is_current or _may_commit(state, replica)]
    peers = {r.id: Peer(r.incarnation, r.listen_address, r.status is Status.JOINED) for r in current}
    serving = [r for r in current if r.status is Status.JOINED and r.weight_address]
    newest = max((r.weight_version for r in serving if r.weight_version is not None), default=None)
    servers = sorted(serving, key=lambda r: (not is_trainer(r.id), natural_sort_key(r.id)))
    sources = tuple(
        WeightSource(r.incarnation, r.weight_address, r.weight_version)
        for r in servers
        if r.weight_address and (r.weight_version is not None or not is_trainer(r.id))
    )
    return PeerDirectory(peers, newest, sources, _snapshot_servers(state), state.evaluated)


def _may_commit(state: State, replica: Replica) -> bool:
    """Return whether the replica is a trainer of a run that ends, and its step is still being stopped.

    Such a trainer may still commit the training step that it is working on. It stays in the directory, because the
    store accepts commits only from incarnations in the directory. This is safe, since no further incarnation of the
    trainer will follow.
    """
    if state.finish is None or not is_trainer(replica.id):
        return False
    return any(orphan.incarnation == replica.incarnation for orphan in state.orphan_steps.values())


def _is_trainer_standby(state: State, replica: Replica) -> bool:
    return replica.role == STANDBY_ROLE and state.job.role(standby_role_of(replica.id)).traits.trains


def _snapshot_servers(state: State) -> dict[NodeName, str]:
    """Return the snapshot servers' addresses on the nodes of the trainer and of its standby processes.

    The trainer's nodes are included while it is down, too.
    """
    nodes = {
        replica.node or replica.preferred_node
        for replica in state.replicas.values()
        if is_trainer(replica.id) or (replica.is_current and _is_trainer_standby(state, replica))
    }
    candidates = (state.nodes[node] for node in nodes if node is not None and node in state.nodes)
    return {
        node.name: node.snapshot_address
        for node in sorted(candidates, key=lambda node: node.name)
        if node.snapshot_address and node.excluded is None
    }
