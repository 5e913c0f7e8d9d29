"""What a trainer goes on from: the newest state that every member can get and verify.

That is a snapshot of the committed step or of the one after it, whose commit is then finished, else the last commit.
All members agree before anything is loaded, and compare afterwards what they have.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

import rrl

from ...core.types import NodeName
from ..snapshots.client import SnapshotClient
from ..snapshots.format import SnapshotError, SnapshotInfo
from ..worker.checkpoint_files import incarnation_of
from .async_saver import SnapshotMeta
from .checkpoint import Checkpoints
from .host_buffers import Layout
from .learner import Learner
from .process_group import Gang, blocked_on_rank0

_log = logging.getLogger("rrl.trainer")

SnapshotKey = tuple[int, int]
"""Of a snapshot: the step, and the incarnation that made it. Two of one name fit together."""


class Commit(Struct, frozen=True):
    """The last one; before the first ``number`` is 0 and ``manifest`` None."""

    number: int
    manifest: dict[str, Any] | None

    @property
    def incarnation(self) -> int:
        """That made it; -1: there is none."""
        name = self.manifest["folder"].rpartition("/")[2] if self.manifest else ""
        return -1 if (made_by := incarnation_of(name)) is None else made_by


class RestorePoint(Struct, frozen=True):
    """What all members agreed on: a snapshot (its note, its bytes here), else the commit."""

    commit: Commit
    note: SnapshotMeta | None = None
    data: memoryview = memoryview(b"")

    @property
    def fresh(self) -> bool:
        return self.note is None and self.commit.manifest is None

    def __str__(self) -> str:
        if self.note is not None:
            return f"the snapshot of step {self.note.number}; committed is {self.commit.number}"
        return f"the commit of step {self.commit.number}" if self.commit.manifest else "a fresh model"

    @property
    def uncommitted(self) -> SnapshotMeta | None:
        """The commit of this one is still to be finished."""
        return self.note if self.note is not None and self.note.number > self.commit.number else None


def candidates(names: Iterable[SnapshotKey], commit: Commit) -> list[SnapshotKey]:
    """Newest first. A step beyond the next cannot be committed yet. What an earlier life made of the committed step, or
    of a later one, does not descend from what was committed, unless the same life did that too."""
    fit = [
        (step, incarnation)
        for step, incarnation in set(names)
        if (step == commit.number and incarnation == commit.incarnation)
        or (step == commit.number + 1 and incarnation >= commit.incarnation)
    ]
    return sorted(fit, reverse=True)


def agree_on_restore_point(me: rrl.Worker, gang: Gang, client: SnapshotClient | None) -> RestorePoint:
    """Ask who has what, agree, get it and verify it."""
    with blocked_on_rank0(me, gang):
        commit = gang.broadcast_from_rank0(lambda: Commit(me.committed or 0, me.committed_manifest), Commit)
    places = _locations(me, gang, client)
    everybody = gang.gather(set(places), set[SnapshotKey])
    for name in candidates(set.intersection(*everybody), commit):
        got = _fetch(client, places[name], gang.world)
        if gang.all(got is not None) and got is not None:
            return RestorePoint(commit, *got)
    return RestorePoint(commit)


def load(restore_point: RestorePoint, learner: Learner, checkpoints: Checkpoints, gang: Gang) -> None:
    """Make the learner what was found. Raises DamagedCheckpoint, and RuntimeError where members differ."""
    if restore_point.note is None:
        assert restore_point.commit.manifest is not None
        checkpoints.read(restore_point.commit.manifest, learner)
        state = f"checkpoint {restore_point.commit.manifest['folder']}"
    else:
        tensors = learner.tensors()
        layout = Layout(tensors)
        if layout.digest != restore_point.note.layout:
            raise RuntimeError(f"the snapshot of step {restore_point.note.number} is of another model than job.toml's")
        layout.load(restore_point.data, tensors)
        learner.resume(restore_point.note.extra_state)
        if restore_point.commit.manifest is not None:
            checkpoints.set_committed(restore_point.commit.manifest)
        state = f"snapshot of batch {restore_point.note.digest}"
    check_same(gang.gather((learner.number, state), tuple[int, str]))


def check_same(states: Sequence[tuple[int, str]]) -> None:
    """By rank: the step that each member stands at, and what it loaded. Raises RuntimeError when they differ."""
    if len(set(states)) > 1:
        text = "; ".join(f"rank {rank}: step {step}, {state}" for rank, (step, state) in enumerate(states))
        raise RuntimeError(f"the members of the trainer do not stand at the same state: {text}")


_Location = tuple[str | None, SnapshotInfo]
"""An agent's address, None for that of this node; and what it keeps."""


def _locations(me: rrl.Worker, gang: Gang, client: SnapshotClient | None) -> dict[SnapshotKey, list[_Location]]:
    """Where this member's snapshots are, at its own node first. Each member asks the agent beside it; the first one
    asks those of standbys too."""
    snapshot_servers = dict(me.peers.snapshot_servers) if me.peers is not None else {}
    here = [(me.node, kept) for kept in _list_snapshots(client, None)]
    ours = set(gang.gather(me.node, NodeName))
    if gang.rank == 0:
        beside = {node: address for node, address in sorted(snapshot_servers.items()) if node not in ours}
        here += [(node, kept) for node, address in beside.items() for kept in _list_snapshots(client, address)]
    places: dict[SnapshotKey, list[_Location]] = {}
    everywhere = set().union(*gang.gather(here, list[tuple[NodeName, SnapshotInfo]]))
    for node, kept in sorted(everywhere, key=lambda each: each[0] != me.node):
        if kept.rank == gang.rank and (node == me.node or node in snapshot_servers):
            address = None if node == me.node else snapshot_servers[node]
            places.setdefault((kept.step, kept.incarnation), []).append((address, kept))
    return places


def _list_snapshots(client: SnapshotClient | None, address: str | None) -> Collection[SnapshotInfo]:
    if client is None:
        return ()
    try:
        return client.list_snapshots(address)
    except SnapshotError as error:
        _log.warning("cannot list the snapshots on %s: %s", address or "this node", error)
        return ()


def _fetch(
    client: SnapshotClient | None, places: Sequence[_Location], world: int
) -> tuple[SnapshotMeta, memoryview] | None:
    """From the first place that gives all of it, unchanged."""
    assert client is not None
    for address, snapshot in places:
        try:
            meta, data = client.read(snapshot) if address is None else client.fetch(address, snapshot)
            note = msgspec.msgpack.decode(meta, type=SnapshotMeta)
        except (SnapshotError, msgspec.MsgspecError) as error:
            _log.warning("cannot read %s from %s: %s", snapshot, address or "this node", error)
            continue
        if note.world == world:
            return note, memoryview(data)
    return None
