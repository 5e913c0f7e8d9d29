"""Select the state from which a trainer continues: the newest state that every member can read and verify.

The state is a snapshot of the committed step, a snapshot of a later step up to the next step with a checkpoint, or the
last commit. If a snapshot of the next step with a checkpoint is loaded, the trainer completes the commit of this step.
All members agree before anything is loaded, and compare the loaded states afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

import rrl

from ...core.run_dir import attempt_of
from ...core.types import NodeName
from ..snapshots.client import SnapshotClient
from ..snapshots.format import SnapshotError, SnapshotInfo
from .async_saver import SnapshotMeta
from .checkpoint import Checkpoints
from .host_buffers import Layout
from .learner import Learner
from .process_group import Gang, blocked_on_rank0

_log = logging.getLogger("rrl.trainer")

SnapshotKey = tuple[int, int]
"""Step of a snapshot, and number of the incarnation that made the snapshot. The snapshots of all ranks with the same
key belong together."""


class Commit(Struct, frozen=True):
    """The last commit. Before the first commit, ``number`` is 0 and ``manifest`` is None."""

    number: int
    manifest: dict[str, Any] | None

    @property
    def incarnation(self) -> int:
        """Number of the incarnation that made the commit; -1 before the first commit."""
        name = self.manifest["folder"].rpartition("/")[2] if self.manifest else ""
        return -1 if (attempt := attempt_of(name)) is None else attempt.incarnation


class RestorePoint(Struct, frozen=True):
    """The state that all members agreed on.

    If ``meta`` is set, the state is a snapshot with the bytes ``data``; otherwise it is the state of the commit.
    """

    commit: Commit
    meta: SnapshotMeta | None = None
    data: memoryview = memoryview(b"")

    @property
    def fresh(self) -> bool:
        """True if there is neither a snapshot nor a commit."""
        return self.meta is None and self.commit.manifest is None

    def __str__(self) -> str:
        if self.meta is not None:
            return f"the snapshot of step {self.meta.number} (committed: step {self.commit.number})"
        return f"the commit of step {self.commit.number}" if self.commit.manifest else "a fresh model"

    @property
    def uncommitted(self) -> SnapshotMeta | None:
        """The description of the snapshot if its step is not committed yet, else None."""
        return self.meta if self.meta is not None and self.meta.number > self.commit.number else None


def candidates(names: Iterable[SnapshotKey], commit: Commit, next_checkpoint: int) -> list[SnapshotKey]:
    """Return the snapshots that may be restored, newest first.

    ``next_checkpoint`` is the first step after ``commit`` that gets a checkpoint. Two kinds of snapshots agree with the
    committed history:

    - snapshots of the committed step, by the incarnation that committed it;
    - snapshots of later steps up to ``next_checkpoint``, by the same or a later incarnation.

    A snapshot of a step after ``next_checkpoint`` is useless: its step can be committed only after
    ``next_checkpoint``, whose state is lost.
    """
    usable = [
        (step, incarnation)
        for step, incarnation in set(names)
        if (step == commit.number and incarnation == commit.incarnation)
        or (commit.number < step <= next_checkpoint and incarnation >= commit.incarnation)
    ]
    return sorted(usable, reverse=True)


def agree_on_restore_point(me: rrl.Worker, gang: Gang, client: SnapshotClient | None) -> RestorePoint:
    """Return the newest snapshot that all members can read and verify, or the last commit if there is none."""
    with blocked_on_rank0(me, gang):
        commit = gang.broadcast_from_rank0(lambda: Commit(me.committed or 0, me.committed_manifest), Commit)
    locations = _locations(me, gang, client)
    available = gang.gather(set(locations), set[SnapshotKey])
    next_checkpoint = me.job.trainer.next_checkpoint_step(commit.number, me.job.steps)
    for name in candidates(set.intersection(*available), commit, next_checkpoint):
        snapshot_data = _fetch(client, locations[name], gang.world)
        if gang.all(snapshot_data is not None) and snapshot_data is not None:
            return RestorePoint(commit, *snapshot_data)
    return RestorePoint(commit)


def load(restore_point: RestorePoint, learner: Learner, checkpoints: Checkpoints, gang: Gang) -> None:
    """Load the restore point into the learner.

    Raises:
        DamagedCheckpoint: The checkpoint does not match its manifest.
        RuntimeError: The snapshot is of another model, or members have loaded different states.
    """
    if restore_point.meta is None:
        assert restore_point.commit.manifest is not None
        checkpoints.read(restore_point.commit.manifest, learner)
        state = f"checkpoint {restore_point.commit.manifest['folder']}"
    else:
        tensors = learner.tensors()
        layout = Layout(tensors)
        if layout.digest != restore_point.meta.layout:
            raise RuntimeError(f"the snapshot of step {restore_point.meta.number} does not fit the model in job.toml")
        layout.load(restore_point.data, tensors)
        learner.resume(restore_point.meta.extra_state)
        state = f"snapshot of batch {restore_point.meta.digest}"
    check_same(gang.gather((learner.number, state), tuple[int, str]))


def check_same(states: Sequence[tuple[int, str]]) -> None:
    """Compare the step and the digest of the loaded state of all ranks.

    Raises:
        RuntimeError: The ranks have loaded different states.
    """
    if len(set(states)) > 1:
        text = "; ".join(f"rank {rank}: step {step}, {state}" for rank, (step, state) in enumerate(states))
        raise RuntimeError(f"the members of the trainer loaded different states: {text}")


_Location = tuple[str | None, SnapshotInfo]
"""Address of an agent, or None for the agent of this node; and a snapshot that the agent stores."""


def _locations(me: rrl.Worker, gang: Gang, client: SnapshotClient | None) -> dict[SnapshotKey, list[_Location]]:
    """Return the locations of each snapshot of this member's rank, first the member's own node.

    Each member queries the agent of its own node; rank 0 also queries the agents on the nodes of standbys.
    """
    snapshot_servers = dict(me.peers.snapshot_servers) if me.peers is not None else {}
    found = [(me.node, info) for info in _list_snapshots(client, None)]
    gang_nodes = set(gang.gather(me.node, NodeName))
    if gang.rank == 0:
        others = {node: address for node, address in sorted(snapshot_servers.items()) if node not in gang_nodes}
        found += [(node, info) for node, address in others.items() for info in _list_snapshots(client, address)]
    locations: dict[SnapshotKey, list[_Location]] = {}
    everywhere = set().union(*gang.gather(found, list[tuple[NodeName, SnapshotInfo]]))
    for node, info in sorted(everywhere, key=lambda entry: entry[0] != me.node):
        if info.rank == gang.rank and (node == me.node or node in snapshot_servers):
            address = None if node == me.node else snapshot_servers[node]
            locations.setdefault((info.step, info.incarnation), []).append((address, info))
    return locations


def _list_snapshots(client: SnapshotClient | None, address: str | None) -> Collection[SnapshotInfo]:
    if client is None:
        return ()
    try:
        return client.list_snapshots(address)
    except SnapshotError as error:
        _log.warning("cannot list the snapshots on %s: %s", address or "this node", error)
        return ()


def _fetch(
    client: SnapshotClient | None, locations: Sequence[_Location], world: int
) -> tuple[SnapshotMeta, memoryview] | None:
    """Return the description and bytes of a snapshot from the first location where they can be read and verified.

    Return None if there is no such location. A snapshot of a gang with another number of members than ``world`` is not
    used.
    """
    assert client is not None
    for address, snapshot in locations:
        try:
            encoded, data = client.read(snapshot) if address is None else client.fetch(address, snapshot)
            meta = msgspec.msgpack.decode(encoded, type=SnapshotMeta)
        except (SnapshotError, msgspec.MsgspecError) as error:
            _log.warning("cannot read %s from %s: %s", snapshot, address or "this node", error)
            continue
        if meta.world == world:
            return meta, memoryview(data)
    return None
